"""The command line: `jetspecpp serve | generate | exactness | train | eval | bench | doctor | trace | version`.

Only parsing happens here; what a command needs is imported when it runs, so that `--help` and mistakes are answered at
once. Exit status: 0 done, 1 failed, 2 wrong input.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from server.config import ArgumentParser, ConfigError, add_flags, from_arguments, http_flags

EXIT_FAILURE = 1
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130

PASSED_ON = {
    "train": "training",
    "eval": "evaluation",
    "bench": "evaluation.bench",
    "trace": "evaluation.trace",
    "doctor": "evaluation.doctor",
}
"""Commands of packages that the server may not import."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = ArgumentParser(
        prog="jetspecpp", description="A lossless inference server: verifier and drafter in parallel."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve the OpenAI interface over HTTP")
    serve.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    add_flags(serve)

    generate = commands.add_parser("generate", help="answer one prompt in the terminal")
    generate.add_argument("prompt", nargs="?", help="the prompt (default: read from standard input)")
    generate.add_argument("--max-tokens", metavar="VALUE", help="most tokens to generate (default: as many as fit)")
    generate.add_argument("--temperature", metavar="VALUE", default="0", help="0 to 2 (default: 0)")
    generate.add_argument("--top-p", metavar="VALUE", help="0 to 1")
    generate.add_argument("--top-k", metavar="VALUE", help="0: off")
    generate.add_argument("--min-p", metavar="VALUE", help="0 to 1")
    generate.add_argument("--sampling-seed", metavar="VALUE", help="makes the answer repeatable")
    generate.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    generate.add_argument("--no-speculation", action="store_true", help="decode one token at a time")
    generate.add_argument("--stats", action="store_true", help="print token counts and speed at the end")
    add_flags(generate, exclude=http_flags())

    exactness = commands.add_parser("exactness", help="compare speculative with plain decoding, token for token")
    exactness.add_argument("--dtype", nargs="+", metavar="DTYPE", help="float32, bfloat16 or both (default: auto)")
    exactness.add_argument("--num-prompts", metavar="VALUE", default="8", help="prompts to compare (default: 8)")
    exactness.add_argument("--max-tokens", metavar="VALUE", default="96", help="tokens per prompt (default: 96)")
    exactness.add_argument(
        "--methods", nargs="+", metavar="METHOD", help="methods to compare with ar, or all (default: jetspec++)"
    )
    exactness.add_argument(
        "--prompts", metavar="FILE", help='JSON lines with {"turns": [...]} instead of the own prompts'
    )
    exactness.add_argument(
        "--parameters",
        metavar="KIND",
        default="plain",
        help="plain, or random: penalties, bias, filters, grammars, ... of its own for every prompt (default: plain)",
    )
    exactness.add_argument("--json", metavar="FILE", help="write the results to a file")
    add_flags(exactness, exclude=(*http_flags(), "dtype", "method"))

    commands.add_parser("train", help="train the drafting networks for a target (jetspecpp train --help)")
    commands.add_parser("eval", help="measure acceptance lengths and hit rates offline (jetspecpp eval --help)")
    commands.add_parser("bench", help="measure methods and peers over HTTP (jetspecpp bench --help)")
    commands.add_parser("doctor", help="check models and machine, explain the speed-up (jetspecpp doctor --help)")
    commands.add_parser("trace", help="draw rounds of a trace of serve --trace-dir (jetspecpp trace --help)")
    commands.add_parser("version", help="print the version")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if given[:1] and given[0] in PASSED_ON:
            return _pass_on(PASSED_ON[given[0]], given[1:])
        parsed = build_parser().parse_args(given)
        return _run(parsed)
    except ConfigError as error:
        print(f"jetspecpp: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader left; keep the interpreter's own flush at exit from complaining about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE


def _run(parsed: argparse.Namespace) -> int:
    match parsed.command:
        case "serve":
            return _serve(parsed)
        case "generate":
            from server.terminal import generate

            return generate(parsed, from_arguments(vars(parsed), os.environ, **_quiet(parsed)))
        case "exactness":
            from server.exactness import exactness

            return exactness(parsed)
        case _:
            from server.build import package_version

            print(package_version())
            return 0


def _pass_on(module: str, arguments: Sequence[str]) -> int:
    """`python -m MODULE` in this process, with the arguments as they are: the server knows nothing of what it does."""
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _serve(parsed: argparse.Namespace) -> int:
    if os.environ.get("WEB_CONCURRENCY", "1") not in ("", "1"):
        raise ConfigError("WEB_CONCURRENCY: one process serves HTTP; start more servers on other ports instead")
    if parsed.model_tag is not None and parsed.model is not None:
        raise ConfigError(f"--model: the model was given twice, as {parsed.model_tag} and as {parsed.model}")
    arguments = vars(parsed) | {"model": parsed.model_tag or parsed.model}
    # More than one HTTP process would need this; with one it only takes metrics away.
    for name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        os.environ.pop(name, None)
    config = from_arguments(arguments, os.environ)
    from server.serve import configure_logging, run
    from server.service import StartupError

    configure_logging(config.log_level)
    try:
        return run(config)
    except StartupError as error:
        print(f"jetspecpp: {error}", file=sys.stderr)
        return EXIT_FAILURE


def _quiet(parsed: argparse.Namespace) -> dict[str, str]:
    """Terminal commands log warnings only, unless asked for more."""
    return {} if parsed.log_level or "JETSPEC_LOG_LEVEL" in os.environ else {"log_level": "warning"}


if __name__ == "__main__":
    sys.exit(main())

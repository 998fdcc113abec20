"""`jetspecpp bench`: every method over HTTP, one request at a time, beside peers, in one table.

Flags after `--` go to every server as they are.
"""

import argparse
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from evaluation.bench.errors import WrongInput
from evaluation.bench.plots import write_plots
from evaluation.bench.report import Report, write_json
from evaluation.bench.run import Plan, plan_run, run
from evaluation.plotting import PlotsUnavailable
from evaluation.prompts import PromptFileError
from server.models import ModelError

logger = logging.getLogger("jetspec.bench")

EXIT_FAILURE = 1
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """Every complaint leaves by the same door."""

    def error(self, message: str) -> NoReturn:
        raise WrongInput(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser of `jetspecpp bench`."""
    parser = Parser(prog="jetspecpp bench", description=__doc__)
    parser.add_argument("--model", default="demo", help="target: demo, a folder or a hub id (default: demo)")
    parser.add_argument("--methods", default="all", help="comma-separated methods, or all (default); ar always runs")
    parser.add_argument("--datasets", default="gsm8k,math500", help="comma-separated names or JSON-lines files")
    parser.add_argument("--prompts-dir", type=Path, default=Path("../shared/prompts"), help="where the files lie")
    parser.add_argument("--num-prompts", type=_positive, default=16, metavar="N", help="of each data set (default: 16)")
    parser.add_argument("--max-tokens", type=_positive, default=160, metavar="N", help="of each text (default: 160)")
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument("--num-speculative-tokens", type=_positive, metavar="N", help="the same γ for every method")
    drafts.add_argument(
        "--gammas",
        type=_positives,
        default=(3, 4, 6, 8),
        metavar="N,N",
        help="try these γ for every method and take its best (default: 3,4,6,8)",
    )
    parser.add_argument("--sweep-prompts", type=_positive, default=2, metavar="N", help="for the trial (default: 2)")
    parser.add_argument("--cache-sizes", type=_positives, default=(), metavar="N,N", help="also jetspec++ at these B")
    parser.add_argument(
        "--concurrency", type=_positives, default=(), metavar="N,N", help="also so many requests at once"
    )
    parser.add_argument("--peers", action="store_true", help="also transformers and llama.cpp, where installed")
    parser.add_argument("--peer-python", default=sys.executable, metavar="PATH", help="interpreter that has the peers")
    parser.add_argument("--max-servers", type=_positive, default=8, metavar="N", help="processes at once (default: 8)")
    parser.add_argument("--max-model-len", type=_positive, default=2048, metavar="N", help="of every server")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--verify-core", default="auto", metavar="CORE", help="as for serve; peers use it too")
    parser.add_argument("--draft-core", default="auto", metavar="CORE", help="as for serve")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results, after every prompt")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the printed tables")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw pictures")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark; returns the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    own, server_flags = _split(given)
    try:
        parsed = build_parser().parse_args(own)
        plan = plan_run(parsed, server_flags)
    except (WrongInput, PromptFileError, ModelError) as error:
        print(f"jetspecpp bench: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    return execute(plan, parsed.json, parsed.markdown, parsed.plots)


def configure_logging() -> None:
    """Progress goes to stderr, one line each; libraries report trouble only."""
    logging.basicConfig(stream=sys.stderr, level="WARNING", format="%(message)s", force=True)
    logging.getLogger("jetspec.bench").setLevel("INFO")


def execute(
    plan: Plan,
    json_path: Path | None = None,
    markdown_path: Path | None = None,
    plots_folder: Path | None = None,
    work: Callable[[Plan, Report, Callable[[], None]], None] = run,
) -> int:
    """Measure, then print and write what there is, however the measuring ended."""
    report = Report(settings=plan.settings)

    def keep() -> None:
        if json_path is not None:
            write_json(json_path, report)

    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        status = _measure(plan, report, keep, work)
    finally:
        signal.signal(signal.SIGTERM, before)
    if not report.measured.measurements and not report.loads:
        return status or EXIT_FAILURE
    print(report.as_markdown())
    try:
        keep()
        if markdown_path is not None:
            markdown_path.parent.mkdir(parents=True, exist_ok=True)
            markdown_path.write_text(report.as_markdown(), encoding="utf-8")
        if plots_folder is not None:
            for picture in write_plots(report, plots_folder):
                print(picture)
    except (OSError, PlotsUnavailable) as error:
        print(f"jetspecpp bench: {error}", file=sys.stderr)
        status = status or EXIT_FAILURE
    for line in report.mismatch_lines():
        print(f"MISMATCH: {line}", file=sys.stderr)
    is_faulty = bool(report.mismatch_lines() or report.measured.failures)
    return status or (EXIT_FAILURE if is_faulty else 0)


def _measure(
    plan: Plan, report: Report, keep: Callable[[], None], work: Callable[[Plan, Report, Callable[[], None]], None]
) -> int:
    try:
        work(plan, report, keep)
    except KeyboardInterrupt:
        print("interrupted; what was measured follows", file=sys.stderr)
        return EXIT_INTERRUPTED
    except WrongInput as error:
        print(f"jetspecpp bench: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    return 0


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _split(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Our own flags, and those after `--`."""
    if "--" not in arguments:
        return list(arguments), ()
    at = list(arguments).index("--")
    return list(arguments[:at]), tuple(arguments[at + 1 :])


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:10]) < 1 << 31:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def _positives(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_positive(part.strip()) for part in text.split(",")))

"""`jetspecpp doctor`: examine what `jetspecpp serve` with the same flags would run, and explain its speed-up.

Exit status: 0 healthy, 1 problems found, 2 wrong input.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from evaluation.bench.errors import ContestantFailed, WrongInput
from evaluation.bench.servers import ServerProcess
from evaluation.doctor.explanation import explain
from evaluation.doctor.figures import Figures, figures_of
from evaluation.doctor.findings import Finding, has_problem, problem
from evaluation.doctor.machine import check_machine
from evaluation.doctor.pair import check_pair, check_template, has_thinking_mode
from evaluation.doctor.trial import Subject, make_cases, measure
from server.config import (
    ArgumentParser,
    ConfigError,
    ServeConfig,
    add_flags,
    choose_cores,
    flag_of,
    from_arguments,
    http_flags,
)
from server.draft_files import find_draft_files
from server.exactness import PROMPTS
from server.models import ModelError, ResolvedModel, resolve
from server.tokenizer import Tokenizer, TokenizerError

EXIT_PROBLEMS = 1
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130

Opener = Callable[[Sequence[str]], AbstractContextManager[Subject]]


@dataclass(frozen=True)
class Settings:
    """What is measured and how."""

    num_prompts: int
    max_tokens: int
    temperature: float


def build_parser() -> argparse.ArgumentParser:
    """The parser of `jetspecpp doctor`: its own flags, and those of `serve` that the workers use."""
    parser = ArgumentParser(prog="jetspecpp doctor", description=__doc__)
    parser.add_argument("--num-prompts", default="4", metavar="VALUE", help="short prompts to measure (default: 4)")
    parser.add_argument("--max-tokens", default="96", metavar="VALUE", help="tokens of each answer (default: 96)")
    parser.add_argument("--temperature", default="0", metavar="VALUE", help="0 to 2 (default: 0)")
    parser.add_argument("--no-measure", action="store_true", help="look at files and machine only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write findings and figures to a file")
    add_flags(parser, exclude=http_flags())
    return parser


@contextmanager
def start_server(flags: Sequence[str]) -> Iterator[Subject]:
    """A server of its own; raises `WrongInput` with its words when it does not come up with its drafter."""
    with ServerProcess(flags) as server:
        server.wait_until_ready(needs_drafter=True)
        yield server.client


def main(arguments: Sequence[str] | None = None, open_server: Opener = start_server) -> int:
    """Run the command; returns the exit status."""
    try:
        parsed = build_parser().parse_args(arguments)
        settings = _settings(parsed)
        config = from_arguments(vars(parsed), os.environ)
        if config.method == "ar":
            raise ConfigError("--method: ar drafts nothing; name the method to examine")
        examination = Examination(config)
        findings = examination.look()
        if not parsed.no_measure and not has_problem(findings):
            findings += examination.try_out(settings, _server_flags(parsed), open_server)
        if parsed.json is not None:
            examination.write_json(parsed.json)
    except (ConfigError, ModelError) as error:
        print(f"jetspecpp doctor: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_PROBLEMS if has_problem(findings) else 0


class Examination:
    """What was found so far; every finding is printed as it is made."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._model = resolve(config.model, config.revision)
        self._findings: list[Finding] = []
        self._figures: Figures | None = None
        self._tokenizer: Tokenizer | None = None

    def look(self) -> list[Finding]:
        """Files and machine. Raises `ConfigError` for a flag that cannot be used."""
        files = find_draft_files(self._config)
        found = self._note(check_machine(self._config, choose_cores(self._config)))
        found += self._note(check_pair(self._config, self._model, files))
        return found + self._note(self._template())

    def try_out(self, settings: Settings, server_flags: Sequence[str], open_server: Opener) -> list[Finding]:
        """Start a server, measure, explain."""
        gamma = self._config.num_speculative_tokens
        try:
            self._figures = self._measure(settings, server_flags, open_server)
        except WrongInput as error:
            return self._note([problem("server", str(error))])
        except ContestantFailed as error:
            return self._note([problem("server", f"it failed under the trial: {error}")])
        return self._note(explain(self._figures, gamma, settings.temperature))

    def write_json(self, path: Path) -> None:
        """Findings and figures. Raises `ConfigError` when the file cannot be written."""
        figures = None if self._figures is None else self._figures.as_json()
        content = {"findings": [finding.as_json() for finding in self._findings], "figures": figures}
        try:
            path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json: {path}: {error.strerror}") from None

    def _template(self) -> Iterator[Finding]:
        try:
            self._tokenizer = Tokenizer.load(self._model.folder)
        except TokenizerError as error:
            yield problem("tokenizer", str(error))
            return
        yield check_template(self._model, self._tokenizer)

    def _measure(self, settings: Settings, server_flags: Sequence[str], open_server: Opener) -> Figures:
        assert self._tokenizer is not None, "without a tokenizer there is a problem, and no trial"
        tokenizer = self._tokenizer
        has_thinking = tokenizer.chat_template is not None and has_thinking_mode(tokenizer)
        limit = _max_model_len(self._config, self._model) - settings.max_tokens
        cases = make_cases(PROMPTS[: settings.num_prompts], tokenizer, has_thinking=has_thinking, limit=limit)
        if not any(case.kind == "short" for case in cases):
            raise ConfigError("--max-tokens: no prompt fits beside so long an answer")
        _progress("starting a server")
        with open_server(server_flags) as subject:
            return figures_of(measure(subject, cases, settings.max_tokens, settings.temperature, _progress))

    def _note(self, findings: Iterable[Finding]) -> list[Finding]:
        found = []
        for finding in findings:
            print(finding, flush=True)
            found.append(finding)
            self._findings.append(finding)
        return found


def _max_model_len(config: ServeConfig, model: ResolvedModel) -> int:
    return min(model.max_position_embeddings, config.max_model_len or model.max_position_embeddings)


def _server_flags(parsed: argparse.Namespace) -> list[str]:
    """The flags of `serve` that were given, as they were given; variables reach the server by themselves."""
    own = {"num_prompts", "max_tokens", "temperature", "no_measure", "json"}
    given = {name: value for name, value in vars(parsed).items() if name not in own and value is not None}
    return [part for name, value in given.items() for part in (flag_of(name), str(value))]


def _settings(parsed: argparse.Namespace) -> Settings:
    """Raises `ConfigError` naming the flag."""

    def number(name: str, low: float, high: float, kind: type[int] | type[float]) -> float:
        text = getattr(parsed, name)
        try:
            value = kind(text)
        except ValueError:
            raise ConfigError(f"{flag_of(name)}: expected a number, got {text!r}") from None
        if not low <= value <= high:
            raise ConfigError(f"{flag_of(name)}: must be between {low:g} and {high:g}, got {text}")
        return value

    return Settings(
        num_prompts=int(number("num_prompts", 1, len(PROMPTS), int)),
        max_tokens=int(number("max_tokens", 8, 2**20, int)),
        temperature=number("temperature", 0, 2, float),
    )


def _progress(line: str) -> None:
    print(f"... {line}", file=sys.stderr, flush=True)

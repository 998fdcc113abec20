"""`jetspecpp eval`: acceptance lengths and hit rates on benchmark prompts, without a server.

`acceptance` measures, `report` turns what it wrote into tables and pictures.
"""

import argparse
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, get_args

from decoding.calibration import InvalidCalibration
from evaluation.acceptance import Outcome, run_study
from evaluation.acceptance_plan import TABLES, AcceptancePlan, WrongInput, plan_acceptance
from evaluation.crew import WorkerFailed
from evaluation.plotting import PlotsUnavailable
from evaluation.prompts import PromptFileError
from evaluation.records import Records
from evaluation.results import ResultFileError, Results, read_results, write_whole
from evaluation.tables import acceptance_lengths
from modeling.architecture import UnsupportedModel
from modeling.kernels.int8 import QuantizationChoice
from server.models import ModelError

EXIT_FAILURE = 1
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130
RESULT_NAME = "acceptance"

WRONG_INPUT = (WrongInput, PromptFileError, ResultFileError, ModelError, UnsupportedModel, InvalidCalibration)


class Parser(argparse.ArgumentParser):
    """Every complaint leaves by the same door."""

    def error(self, message: str) -> NoReturn:
        raise WrongInput(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser of `jetspecpp eval`."""
    parser = Parser(prog="jetspecpp eval", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_acceptance(commands.add_parser("acceptance", help="tokens a round and hit rates, offline"))
    report = commands.add_parser("report", help="tables and pictures of what acceptance has written")
    report.add_argument(
        "results",
        nargs="?",
        type=Path,
        default=Path("results") / f"{RESULT_NAME}.json",
        help="file written by acceptance (default: results/acceptance.json)",
    )
    report.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="where to write")
    return parser


def _add_acceptance(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="demo", help="target: demo, a local folder or a hub id (default: demo)")
    add("--methods", default="jetspec++", help="comma-separated, or all: those that have weights (default: jetspec++)")
    add(
        "--weights",
        action="append",
        default=[],
        metavar="METHOD=FOLDER",
        help="weights of a method (default: shipped)",
    )
    add(
        "--control",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a further draft model, only to see how it takes Jacobi passes",
    )
    add("--draft-model", type=Path, metavar="FOLDER", help="draft model of jetspec++ (default: the shipped one)")
    add("--adapter", type=Path, metavar="FOLDER", help="adapter of jetspec++ (default: the shipped one)")
    add(
        "--calibration",
        type=Path,
        metavar="PATH",
        help="calibration of jetspec++: a folder with budget-N.json, or a file for all budgets (default: shipped)",
    )
    add(
        "--datasets", default="gsm8k,math500", help="comma-separated names or JSON-lines files (default: gsm8k,math500)"
    )
    add("--prompts-dir", type=Path, default=Path("../shared/prompts"), help="where named data sets lie")
    add("--num-prompts", default="16", metavar="N", help="of each data set (default: 16)")
    add("--max-tokens", default="160", metavar="N", help="longest answer (default: 160)")
    add("--temperatures", default="0,1", metavar="T,T", help="(default: 0,1)")
    add("--budgets", default="8,16,32", metavar="N,N", help="rows a verification, γ + 1 (default: 8,16,32)")
    add("--tables", default="all", metavar="NAME,NAME", help=f"what to measure: {', '.join(TABLES)}, or all (default)")
    add("--minutes", metavar="M", help="stop after so long, with what has been measured")
    add("--workers", metavar="N", help="processes, one a core (default: as many as there are cores)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    add("--device", default="cpu")
    add(
        "--draft-quantization",
        default="auto",
        choices=get_args(QuantizationChoice),
        help="weights of the drafting networks: int8, none, or auto as the server does (default: auto)",
    )
    add("--output", type=Path, default=Path("results"), metavar="FOLDER", help="where to write (default: results)")
    add("--json", type=Path, metavar="FILE", help="also write the rows of methods as served to a file")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    logging.basicConfig(stream=sys.stderr, level="WARNING", format="%(message)s")
    try:
        parsed = build_parser().parse_args(arguments)
        if parsed.command == "report":
            return _report(parsed.results, parsed.output)
        return _acceptance(plan_acceptance(parsed), parsed.output, parsed.json)
    except WRONG_INPUT as error:
        print(f"jetspecpp eval: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    except (OSError, WorkerFailed, PlotsUnavailable) as error:
        print(f"jetspecpp eval: {error}", file=sys.stderr)
        return EXIT_FAILURE


def _acceptance(plan: AcceptancePlan, folder: Path, json_path: Path | None) -> int:
    for line in plan.notes:
        print(line, file=sys.stderr)

    def save(records: Records) -> None:
        print(acceptance_lengths(records.rows()).to_text(), end="\n\n", flush=True)
        write_results(Results(plan.about, records.rows()), folder, json_path)

    outcome = _interruptible(lambda: run_study(plan.study, plan.options, plan.num_workers, save))
    results = Results.of(outcome.records, plan.about, plan.calibrations)
    if not results.rows:
        return EXIT_INTERRUPTED if outcome.is_interrupted else EXIT_FAILURE
    for table in results.tables():
        print(table.to_text(), end="\n\n")
    for path in write_results(results, folder, json_path):
        print(f"wrote {path}", file=sys.stderr)
    return EXIT_INTERRUPTED if outcome.is_interrupted else 0


def write_results(results: Results, folder: Path, json_path: Path | None) -> list[Path]:
    """Everything as JSON and Markdown in a folder, and the served rows in a file of their own. Raises OSError."""
    files = {folder / f"{RESULT_NAME}.json": results.to_json(), folder / f"{RESULT_NAME}.md": results.to_markdown()}
    if json_path is not None:
        files[json_path] = results.rows_as_json()
    for path, text in files.items():
        write_whole(path, text)
    return list(files)


def _report(source: Path, folder: Path) -> int:
    from evaluation.acceptance_plots import write_plots

    results = read_results(source)
    write_whole(folder / f"{RESULT_NAME}.md", results.to_markdown())
    print(folder / f"{RESULT_NAME}.md")
    for picture in write_plots(results, folder):
        print(picture)
    return 0


def _interruptible(work: Callable[[], Outcome]) -> Outcome:
    """SIGTERM ends the measuring as Ctrl-C does: what has been measured is kept."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return work()
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt

"""`jetspecpp trace FILE_OR_FOLDER --output PNG`: a dozen rounds as a picture, the verifier above the drafter.

The trace comes from `jetspecpp serve --trace-dir FOLDER`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from evaluation.plotting import PlotsUnavailable, save
from evaluation.trace_picture import draw
from evaluation.trace_spans import choose_rounds, spans_of
from protocol.trace import TraceFileError, read_trace_file

EXIT_FAILURE = 1
EXIT_WRONG_INPUT = 2
DEFAULT_ROUNDS = 12


def newest_trace(path: Path) -> Path:
    """The file itself, or the newest trace of a folder; raises `TraceFileError` when there is none."""
    if not path.is_dir():
        return path
    files = sorted(path.glob("trace-*.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise TraceFileError(f"{path} holds no trace-*.json; make one with jetspecpp serve --trace-dir {path}")
    return files[-1]


def build_parser() -> argparse.ArgumentParser:
    """The parser of `jetspecpp trace`."""
    parser = argparse.ArgumentParser(prog="jetspecpp trace", description=__doc__)
    parser.add_argument("trace", type=Path, help="a trace file, or a folder whose newest one is taken")
    parser.add_argument("--output", type=Path, required=True, metavar="PNG", help="the picture (.png, .svg or .pdf)")
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS, help=f"how many (default: {DEFAULT_ROUNDS})")
    parser.add_argument("--first-round", type=int, help="where to begin (default: after the first ones)")
    parser.add_argument("--sequence", type=int, help="id of the sequence (default: the longest one)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw a picture; returns the exit status."""
    parsed = build_parser().parse_args(arguments)
    try:
        if parsed.rounds < 1:
            raise TraceFileError(f"--rounds: must be at least 1, got {parsed.rounds}")
        path = newest_trace(parsed.trace)
        spans = spans_of(read_trace_file(path))
        excerpt = choose_rounds(spans, parsed.rounds, parsed.sequence, parsed.first_round)
        save(draw(excerpt), parsed.output)
    except TraceFileError as error:
        print(f"jetspecpp trace: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    except PlotsUnavailable as error:
        print(f"jetspecpp trace: {error}", file=sys.stderr)
        return EXIT_FAILURE
    first, last = excerpt.first_round, excerpt.last_round
    print(f"{parsed.output}: rounds {first} to {last} of sequence {excerpt.sequence_id} in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

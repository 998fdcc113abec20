"""The trace file: what is written is read, whatever moment the writers end at."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.trace import (
    NO_TRACE,
    Trace,
    TraceFileError,
    create_trace_file,
    finish_trace_file,
    read_trace_file,
)

KILLED_WRITER = """
import os, sys
from pathlib import Path
from protocol.trace import Trace
trace = Trace(Path(sys.argv[1]), "drafter")
trace.complete("foresight", 1.0, 1.5, round=3)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return create_trace_file(tmp_path / "traces", "trace-1")


def lasting(path: Path) -> list[tuple[str, float, float]]:
    return [(e["name"], e["ts"], e["dur"]) for e in read_trace_file(path) if e["ph"] == "X"]


def test_two_processes_write_one_file(path: Path) -> None:
    with Trace(path, "verifier", 11) as verifier, Trace(path, "drafter", 22) as drafter:
        verifier.complete("verify", 1.0, 1.03, "slot 0", sequence=4, round=2)
        drafter.complete("J0", 1.01, 1.02)
    events = read_trace_file(path)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {11: "verifier", 22: "drafter"}
    verify = next(event for event in events if event["name"] == "verify")
    assert (verify["ts"], verify["dur"], verify["args"]) == (1_000_000.0, 30_000.0, {"sequence": 4, "round": 2})
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks[11, verify["tid"]] == "slot 0"


def test_a_span_lasts_as_long_as_its_block(path: Path) -> None:
    with Trace(path, "drafter") as trace, trace.span("outer"), trace.span("inner", round=1):
        pass
    (inner, outer) = lasting(path)
    assert (inner[0], outer[0]) == ("inner", "outer")
    assert outer[1] <= inner[1] and inner[2] <= outer[2]


def test_a_finished_file_is_strict_json(path: Path) -> None:
    finish_trace_file(create_trace_file(path.parent, "empty"))
    assert json.loads((path.parent / "empty.json").read_text()) == []
    with Trace(path, "verifier") as trace:
        trace.complete("verify", 0.0, 1.0)
    before = read_trace_file(path)
    finish_trace_file(path)
    assert json.loads(path.read_text()) == before == read_trace_file(path)


def test_a_killed_writer_leaves_whole_events(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(path)], cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    assert lasting(path) == [("foresight", 1_000_000.0, 500_000.0)]
    with path.open("ab") as file:
        file.write(b'{"name": "J0", "ph')  # the worst a crash of the machine could leave
    assert lasting(path) == [("foresight", 1_000_000.0, 500_000.0)]


def test_a_broken_line_is_named(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'nonsense,\n{"ph": "X"},\n')
    with pytest.raises(TraceFileError, match=f"{path}:2"):
        read_trace_file(path)
    with pytest.raises(TraceFileError, match="missing"):
        read_trace_file(path.parent / "missing.json")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TraceFileError, match="file"):
        create_trace_file(tmp_path / "file" / "traces", "trace-1")


def test_the_file_stays_below_its_limit(path: Path) -> None:
    trace = Trace(path, "verifier", max_bytes=1000)
    for number in range(100):
        trace.complete("verify", number, number + 1.0)
    assert not trace.is_on
    assert 500 < path.stat().st_size <= 1000 + len("[\n")
    assert lasting(path)[0] == ("verify", 0.0, 1_000_000.0)


def test_nothing_is_written_when_off(tmp_path: Path) -> None:
    with NO_TRACE.span("J0"):
        pass
    NO_TRACE.complete("J0", 0.0, 1.0)
    assert not NO_TRACE.is_on
    assert os.listdir(tmp_path) == []

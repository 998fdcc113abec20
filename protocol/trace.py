"""What both workers do and when, as Chrome trace events: one file that chrome://tracing, Perfetto and `jetspecpp trace`
open.

The server makes the file, both workers append to it, a whole line an event, so it stays readable when one of them is
killed (the format's array may lack its end). Times are `time.perf_counter()`, which is CLOCK_MONOTONIC on Linux and so
the same clock in every process of a machine. Knows nothing of what the events mean.
"""

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

logger = logging.getLogger("jetspec.trace")

TraceProcess = Literal["verifier", "drafter"]
Detail = str | int | float | bool | None

MAX_TRACE_BYTES = 256 * 2**20
"""A process writes no more than this; about an hour of one busy sequence on the demo target."""
WORK_TRACK = "work"
OPENING = b"[\n"
SEPARATOR = b",\n"
SORT_INDEX: dict[TraceProcess, int] = {"verifier": 0, "drafter": 1}


class TraceFileError(Exception):
    """A trace file cannot be made or read; the message names it, and the line at fault."""


def create_trace_file(folder: Path, name: str) -> Path:
    """A new trace file in a folder, which is made if need be; raises `TraceFileError`."""
    path = folder / f"{name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(OPENING)
    except OSError as error:
        raise TraceFileError(f"{path}: {error.strerror or error}") from None
    return path


def finish_trace_file(path: Path) -> None:
    """Close the array, so that strict JSON readers take the file too. Only when nobody writes any more."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - len(SEPARATOR)))
        if file.read() == SEPARATOR:
            file.seek(size - len(SEPARATOR))
            file.truncate()
        file.seek(0, os.SEEK_END)
        file.write(b"\n]\n")


def read_trace_file(path: Path) -> list[dict[str, Any]]:
    """All events, in the order of writing; a line that a killed process left incomplete at the end is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceFileError(f"{path}: {error}") from None
    events = []
    for number, line in enumerate(lines, start=1):
        text = line.strip().rstrip(",")
        if text in ("", "[", "]"):
            continue
        try:
            event = json.loads(text)
        except ValueError:
            if number == len(lines):
                break
            raise TraceFileError(f"{path}:{number}: not a trace event") from None
        if not isinstance(event, dict) or "ph" not in event:
            raise TraceFileError(f"{path}:{number}: not a trace event")
        events.append(event)
    return events


class Trace:
    """The events of one process. Without a path nothing is written, and `is_on` tells so."""

    def __init__(
        self,
        path: Path | None,
        process: TraceProcess,
        process_id: int | None = None,
        max_bytes: int = MAX_TRACE_BYTES,
    ) -> None:
        self._file = None if path is None else path.open("ab", buffering=0)
        self._process_id = os.getpid() if process_id is None else process_id
        self._category = process
        self._bytes_left = max_bytes
        self._tracks: dict[str, int] = {}
        self._describe("process_name", 0, name=process)
        self._describe("process_sort_index", 0, sort_index=SORT_INDEX[process])

    @property
    def is_on(self) -> bool:
        """Whether events are written."""
        return self._file is not None

    def complete(self, name: str, started_s: float, ended_s: float, track: str = WORK_TRACK, **details: Detail) -> None:
        """Something that lasted from one `time.perf_counter()` to another, on a track of this process."""
        if self._file is None:
            return
        track_id = self._track_id(track)
        event = {
            "name": name,
            "cat": self._category,
            "ph": "X",
            "ts": round(started_s * 1e6, 1),
            "dur": round((ended_s - started_s) * 1e6, 1),
            "pid": self._process_id,
            "tid": track_id,
            "args": details,
        }
        self._write(event)

    @contextmanager
    def span(self, name: str, track: str = WORK_TRACK, **details: Detail) -> Iterator[None]:
        """What the block does, written when it ends."""
        started = time.perf_counter()
        yield
        self.complete(name, started, time.perf_counter(), track, **details)

    def close(self) -> None:
        """Write no more."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _track_id(self, track: str) -> int:
        if track not in self._tracks:
            self._tracks[track] = len(self._tracks)
            self._describe("thread_name", self._tracks[track], name=track)
        return self._tracks[track]

    def _describe(self, what: str, track_id: int, **values: Detail) -> None:
        self._write({"name": what, "ph": "M", "pid": self._process_id, "tid": track_id, "args": values})

    def _write(self, event: dict[str, Any]) -> None:
        """One line in one call, so that a kill leaves whole lines. Tracing never ends a worker."""
        if self._file is None:
            return
        line = json.dumps(event, separators=(",", ":")).encode() + SEPARATOR
        self._bytes_left -= len(line)
        if self._bytes_left < 0:
            logger.warning("the trace has reached its largest size and ends here")
            self.close()
            return
        try:
            self._file.write(line)
        except OSError as error:
            logger.error("the trace ends here: %s", error)
            self.close()


NO_TRACE = Trace(None, "verifier")
"""Writes nothing."""

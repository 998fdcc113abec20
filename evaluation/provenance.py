"""Where and when a result was measured: date, commit, machine, versions."""

import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from server.build import GIT_LIMIT_S, ROOT, UNKNOWN, git_commit


@dataclass(frozen=True)
class Provenance:
    """Plain words for the head of a report."""

    date: str
    commit: str
    machine: str
    software: str

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def describe_run() -> Provenance:
    """This machine, this checkout, now."""
    return Provenance(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        commit=_commit(),
        machine=f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        software=f"Python {platform.python_version()}, torch {version('torch')}",
    )


def _commit() -> str:
    """Short id of the commit this code is from, marked where files of the checkout differ from it."""
    found = git_commit()[:10]
    return f"{found} with changes" if _has_changes() else found


def _has_changes() -> bool:
    command = ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GIT_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and bool(done.stdout.strip())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or UNKNOWN

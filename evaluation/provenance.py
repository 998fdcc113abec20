"""Where and when a result was measured: date, commit, machine, versions."""

import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNKNOWN = "unknown"


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
    """Short id of the checkout, marked where files differ from it; unknown outside a checkout."""
    found = _git("rev-parse", "--short=10", "HEAD")
    if not found:
        return UNKNOWN
    return f"{found} with changes" if _git("status", "--porcelain", "--untracked-files=no") else found


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or UNKNOWN

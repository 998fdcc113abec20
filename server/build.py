"""What exactly runs here: the version of this package, the commit it was built from, and the revisions of its weights.

Reads files only. A revision is the hub's commit where a folder is a hub snapshot, else an id made from the contents.
"""

import hashlib
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
COMMIT_FILE = Path(__file__).with_name("commit.txt")
"""Written into the wheel by hatch_build.py."""
UNKNOWN = "unknown"
SAMPLE_BYTES = 1 << 20
GIT_LIMIT_S = 5.0


@cache
def package_version() -> str:
    """The installed version of this distribution."""
    try:
        return version("jetspec-pp")
    except PackageNotFoundError:
        return "0+unknown"


@cache
def git_commit() -> str:
    """The commit of this code: as noted in the wheel, else that of the checkout, else `unknown`."""
    if COMMIT_FILE.is_file():
        return COMMIT_FILE.read_text(encoding="ascii").strip()
    if not (ROOT / ".git").exists():
        return UNKNOWN
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=GIT_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return found.stdout.strip()


@dataclass(frozen=True)
class Weights:
    """One set of weights in use."""

    role: Literal["target", "draft", "adapter"]
    name: str
    revision: str


def identify(role: Literal["target", "draft", "adapter"], path: Path, name: str | None = None) -> Weights:
    """Name and revision of a model folder or weights file; the name never tells where it lies. Raises `OSError`."""
    folder = path if path.is_dir() else path.parent
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        hub_id = folder.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
        return Weights(role, name or hub_id, folder.name)
    return Weights(role, name or "/".join(path.parts[-2:]), _content_id(path))


def _content_id(path: Path) -> str:
    """An id of the configuration and the weights. Large files are sampled: their length, first and last mebibyte."""
    files = sorted([*path.glob("config.json"), *path.glob("*.safetensors")]) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size};".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(SAMPLE_BYTES))
            if size > SAMPLE_BYTES:
                stream.seek(max(SAMPLE_BYTES, size - SAMPLE_BYTES))
                digest.update(stream.read(SAMPLE_BYTES))
    return f"sha256-{digest.hexdigest()[:16]}"

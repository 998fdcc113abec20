"""What a training writes beside its state: its fixed settings, a log, and a lock against a second training.

OUTPUT/run/       settings.json and tensors that may not change between runs of one training
OUTPUT/state/     weights, optimizer and progress, swapped in whole
OUTPUT/log.txt    a line per evaluation
"""

import contextlib
import fcntl
import json
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from modeling.architecture import read_json
from modeling.draft_model import read_tensors
from training.errors import InputError
from training.loop import restore_folder, write_folder

Settings = Mapping[str, Any]
FOLDERS = ("run", "state", "draft", "adapter", "dflash", "jetspec", "dspark", "domino", "ssd")


@dataclass(frozen=True)
class FixedSettings:
    """Settings that make the weights what they are, and tensors that go with them."""

    settings: Settings
    tensors: dict[str, Tensor]


def read_settings(output: Path, kind: str) -> FixedSettings | None:
    """What an earlier run wrote; None before the first. Raises `UnsupportedModel` when it is broken.

    Raises `InputError` when the output belongs to another kind of training.
    """
    folder = output / "run"
    if not folder.exists():
        return None
    settings = read_json(folder / "settings.json")
    if settings.get("kind") != kind:
        raise InputError(f"{output} holds a training of kind {settings.get('kind')!r}, not {kind!r}")
    return FixedSettings(settings, read_tensors(folder / "tensors.safetensors"))


def write_settings(output: Path, fixed: FixedSettings) -> None:
    """Remember the settings for later runs."""
    text = json.dumps(dict(fixed.settings), indent=1) + "\n"
    write_folder(output / "run", {"settings.json": text, "tensors.safetensors": fixed.tensors})


def check_settings(output: Path, before: Settings, now: Settings) -> None:
    """Raise `InputError` naming every setting in which a resumed training differs from its first run."""
    different = [name for name in now if json.loads(json.dumps(now[name])) != before.get(name)]
    if different:
        told = "; ".join(f"{name} was {before.get(name)}, now {now[name]}" for name in different)
        raise InputError(f"{output} holds a training with other settings: {told}. Choose another --output")


@contextlib.contextmanager
def exclusive(output: Path) -> Iterator[None]:
    """Keep a second training out of an output folder and undo what an interrupted one left half done.

    The lock ends with the process. Raises `InputError`.
    """
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another process is writing to {output}") from None
        for name in FOLDERS:
            restore_folder(output / name)
        yield


class StopRequest:
    """Turns the first Ctrl-C or SIGTERM into a wish to stop at the next safe place; the second ends the process."""

    def __init__(self) -> None:
        self.is_set = False

    def __call__(self) -> bool:
        return self.is_set

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen inside the block."""
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True

"""The training loop all networks share: AdamW with warm-up and cosine, clipping, time limit, checkpoints, resume.

A checkpoint is a folder written beside the old one and swapped in: an interruption leaves the old or the new one,
whole.
"""

import errno
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVarTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.errors import InputError

Item = TypeVarTuple("Item")


@dataclass(frozen=True)
class LoopConfig:
    """How long and how fast: `minutes` bounds this run, `total_minutes` of training shape the cosine over all runs."""

    minutes: float
    total_minutes: float
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    final_ratio: float = 0.1
    clip_norm: float = 1.0
    weight_decay: float = 0.0
    evaluate_minutes: float = 5.0
    bfloat16: bool = False
    """Run the loss in bf16 autocast; the weights stay fp32."""
    max_steps: int | None = None
    """Steps of this run, where that is the limit."""


@dataclass
class LoopState:
    """Progress that survives a restart."""

    step: int = 0
    trained_s: float = 0.0


def learning_rate(config: LoopConfig, state: LoopState) -> float:
    """Linear warm-up in steps, then a cosine in trained time from the peak to `final_ratio` of it."""
    if state.step < config.warmup_steps:
        return config.learning_rate * (state.step + 1) / config.warmup_steps
    floor = config.final_ratio
    return config.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress(config, state))))


def progress(config: LoopConfig, state: LoopState) -> float:
    """Share of the whole training that is behind, 0 to 1."""
    return min(1.0, state.trained_s / (60 * config.total_minutes))


def write_folder(folder: Path, files: dict[str, dict[str, Tensor] | str]) -> None:
    """Write tensors (safetensors) and texts into a folder atomically; an existing folder is replaced.

    Raises OSError, and leaves what was there before, when the disk does not take it.
    """
    temporary = folder.with_name(folder.name + f".partial-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for name, content in files.items():
            _write_file(temporary / name, content)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    temporary.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _write_file(path: Path, content: dict[str, Tensor] | str) -> None:
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    else:
        try:
            save_file({key: value.contiguous() for key, value in content.items()}, path)
        except SafetensorError as error:  # the library wraps what the disk says
            is_full = "No space left" in str(error)
            raise OSError(errno.ENOSPC if is_full else errno.EIO, str(error), str(path)) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def restore_folder(folder: Path) -> None:
    """Undo an interruption of `write_folder` between its two renames, and remove what else it left behind."""
    old = folder.with_name(folder.name + ".old")
    if not folder.exists() and old.exists():
        old.rename(folder)
    for left in (old, *folder.parent.glob(folder.name + ".partial-*")):
        shutil.rmtree(left, ignore_errors=True)


def read_state(output: Path) -> LoopState:
    """The progress of a training, zero where none has been saved. Raises `InputError` when it is broken."""
    path = output / "state" / "progress.json"
    if not path.parent.exists():
        return LoopState()
    try:
        return LoopState(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} cannot be read, so the training cannot go on: {error}") from error


class Trainer:
    """Runs a loss over batches until the time is used up."""

    def __init__(self, module: nn.Module, config: LoopConfig, output: Path) -> None:
        self.module = module
        self.config = config
        self.output = output
        self.state = LoopState()
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=config.weight_decay,
        )
        self._resume()

    def _resume(self) -> None:
        folder = self.output / "state"
        restore_folder(folder)
        if not folder.exists():
            return
        self.state = read_state(self.output)
        try:
            self.module.load_state_dict(load_file(folder / "model.safetensors"))
            moments = load_file(folder / "optimizer.safetensors")
        except (OSError, SafetensorError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"{folder} cannot be resumed: {reason[:300]}") from error
        for index, parameter in enumerate(self._parameters()):
            if f"{index}.exp_avg" in moments:
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(self.state.step)),
                    "exp_avg": moments[f"{index}.exp_avg"].to(parameter.device),
                    "exp_avg_sq": moments[f"{index}.exp_avg_sq"].to(parameter.device),
                }

    def _parameters(self) -> Sequence[nn.Parameter]:
        parameters: Sequence[nn.Parameter] = self.optimizer.param_groups[0]["params"]
        return parameters

    def save(self) -> None:
        """Write model, optimizer and progress."""
        moments = {}
        for index, parameter in enumerate(self._parameters()):
            stored = self.optimizer.state.get(parameter)
            if stored:
                moments[f"{index}.exp_avg"] = stored["exp_avg"]
                moments[f"{index}.exp_avg_sq"] = stored["exp_avg_sq"]
        write_folder(
            self.output / "state",
            {
                "model.safetensors": dict(self.module.state_dict()),
                "optimizer.safetensors": moments,
                "progress.json": json.dumps(asdict(self.state)),
            },
        )

    def run(
        self,
        batches: Iterable[tuple[*Item]],
        loss_of: Callable[[*Item], Tensor],
        evaluate: Callable[[], str],
        report: Callable[[str], None],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Train; every `evaluate_minutes` and at the end: save, evaluate, report a line where there is news.

        `should_stop` is asked before every step. Raises `InputError` when the loss is no number: what was saved stays.
        """
        config, state = self.config, self.state
        before = state.trained_s
        report(f"step {state.step} start {evaluate()}")
        started = last_evaluation = time.monotonic()  # the first evaluation may have to compute states
        running, count = 0.0, 0
        for num_steps, item in enumerate(batches):
            elapsed = time.monotonic() - started
            is_over = elapsed > config.minutes * 60 or state.trained_s > config.total_minutes * 60
            if is_over or num_steps == config.max_steps or should_stop():
                break
            running, count = running + self._step(loss_of, *item), count + 1
            state.trained_s = before + time.monotonic() - started
            if time.monotonic() - last_evaluation > config.evaluate_minutes * 60:
                self.save()
                report(f"step {state.step} minutes {state.trained_s / 60:.1f} loss {running / count:.4f} {evaluate()}")
                running, count = 0.0, 0
                last_evaluation = time.monotonic()
        self.save()
        if count:  # otherwise the last line already says how the training stands
            report(f"step {state.step} minutes {state.trained_s / 60:.1f} loss {running / count:.4f} {evaluate()}")

    def _step(self, loss_of: Callable[[*Item], Tensor], *item: *Item) -> float:
        """One optimizer step; returns the loss before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.state)
        with torch.autocast(self._parameters()[0].device.type, torch.bfloat16, enabled=self.config.bfloat16):
            loss = loss_of(*item)
        value = loss.item()
        if not math.isfinite(value):
            raise InputError(f"the loss is {value} at step {self.state.step}; try a lower --learning-rate")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.state.step += 1
        return value

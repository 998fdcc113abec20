"""The training loop all networks share: AdamW with warm-up and cosine, clipping, time limit, checkpoints, resume.

A checkpoint is a folder written beside the old one and swapped in: an interruption leaves the old or the new one,
whole.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.blocks import Blocks
from training.corpus import Batch


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


@dataclass
class LoopState:
    """Progress that survives a restart."""

    step: int = 0
    trained_s: float = 0.0


def learning_rate(config: LoopConfig, state: LoopState) -> float:
    """Linear warm-up in steps, then a cosine in trained time from the peak to `final_ratio` of it."""
    if state.step < config.warmup_steps:
        return config.learning_rate * (state.step + 1) / config.warmup_steps
    progress = min(1.0, state.trained_s / (60 * config.total_minutes))
    floor = config.final_ratio
    return config.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def write_folder(folder: Path, files: dict[str, dict[str, Tensor] | str]) -> None:
    """Write tensors (safetensors) and texts into a folder atomically; an existing folder is replaced."""
    temporary = folder.with_name(folder.name + f".partial-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name, content in files.items():
        if isinstance(content, str):
            (temporary / name).write_text(content, encoding="utf-8")
        else:
            save_file({key: value.contiguous() for key, value in content.items()}, temporary / name)
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


class Trainer:
    """Runs `loss_of(batch, blocks)` over batches until the time is used up."""

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
        if not folder.exists() and (self.output / "state.old").exists():
            (self.output / "state.old").rename(folder)
        if not folder.exists():
            return
        self.state = LoopState(**json.loads((folder / "progress.json").read_text()))
        self.module.load_state_dict(load_file(folder / "model.safetensors"))
        moments = load_file(folder / "optimizer.safetensors")
        parameters = self.optimizer.param_groups[0]["params"]
        for index, parameter in enumerate(parameters):
            if f"{index}.exp_avg" in moments:
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(self.state.step)),
                    "exp_avg": moments[f"{index}.exp_avg"].to(parameter.device),
                    "exp_avg_sq": moments[f"{index}.exp_avg_sq"].to(parameter.device),
                }

    def save(self) -> None:
        """Write model, optimizer and progress."""
        moments = {}
        for index, parameter in enumerate(self.optimizer.param_groups[0]["params"]):
            stored = self.optimizer.state.get(parameter)
            if stored:
                moments[f"{index}.exp_avg"] = stored["exp_avg"]
                moments[f"{index}.exp_avg_sq"] = stored["exp_avg_sq"]
        write_folder(
            self.output / "state",
            {
                "model.safetensors": dict(self.module.state_dict()),
                "optimizer.safetensors": moments,
                "progress.json": json.dumps({"step": self.state.step, "trained_s": self.state.trained_s}),
            },
        )

    def run(
        self,
        batches: Iterable[tuple[Batch, Blocks]],
        loss_of: Callable[[Batch, Blocks], Tensor],
        evaluate: Callable[[], str],
        report: Callable[[str], None],
    ) -> None:
        """Train; every `evaluate_minutes` and at the end: evaluate, report a line, save."""
        config, state = self.config, self.state
        started = last_evaluation = time.monotonic()
        before = state.trained_s
        report(f"step {state.step} start {evaluate()}")
        running, count = 0.0, 0
        for batch in batches:
            elapsed = time.monotonic() - started
            if elapsed > config.minutes * 60 or state.trained_s > config.total_minutes * 60:
                break
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(config, state)
            loss = loss_of(*batch)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.module.parameters(), config.clip_norm)
            self.optimizer.step()
            state.step += 1
            running, count = running + loss.item(), count + 1
            state.trained_s = before + time.monotonic() - started
            if time.monotonic() - last_evaluation > config.evaluate_minutes * 60:
                report(f"step {state.step} minutes {state.trained_s / 60:.1f} loss {running / count:.4f} {evaluate()}")
                running, count = 0.0, 0
                self.save()
                last_evaluation = time.monotonic()
        mean = running / count if count else float("nan")
        report(f"step {state.step} minutes {state.trained_s / 60:.1f} loss {mean:.4f} {evaluate()}")
        self.save()

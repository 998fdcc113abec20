"""The loop: progress, checkpoints and what interruptions leave behind."""

import errno
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.training.texts import CPU, States
from training.blocks import Blocks, make_blocks
from training.corpus import Batch
from training.errors import InputError
from training.loop import (
    LoopConfig,
    LoopState,
    Trainer,
    learning_rate,
    read_state,
    restore_folder,
    write_folder,
)
from training.output import StopRequest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def one_batch(states: States) -> tuple[Batch, Blocks]:
    batch = states.store.batch(states.corpus.sequences[:2], CPU)
    anchors = torch.full((2, 1), 4)
    return batch, make_blocks(batch, anchors, torch.ones(2, 1, dtype=torch.bool), 4, 2)


def make_trainer(output: Path, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"minutes": 60.0, "total_minutes": 60.0, "warmup_steps": 2, "max_steps": 5}
    return Trainer(nn.Linear(64, 64), LoopConfig(**(settings | changes)), output)


def run(
    trainer: Trainer, one_batch: tuple[Batch, Blocks], should_stop: Callable[[], bool] = lambda: False
) -> list[str]:
    """Learn to copy states; returns the reported lines."""

    def endless() -> Iterator[tuple[Batch, Blocks]]:
        while True:
            yield one_batch

    def loss_of(batch: Batch, blocks: Blocks) -> Tensor:
        mapped: Tensor = trainer.module(batch.last)
        return (mapped - batch.last).square().mean()

    lines: list[str] = []
    trainer.run(endless(), loss_of, lambda: "evaluated", lines.append, should_stop)
    return lines


def losses(lines: list[str]) -> list[float]:
    return [float(line.split("loss ")[1].split()[0]) for line in lines if "loss" in line]


def test_loss_falls_and_lines_are_reported(tmp_path: Path, one_batch: tuple[Batch, Blocks]) -> None:
    lines = run(make_trainer(tmp_path, max_steps=1), one_batch)
    assert lines[0] == "step 0 start evaluated"
    first = losses(lines)[0]
    lines = run(make_trainer(tmp_path, max_steps=30, learning_rate=1e-2), one_batch)
    assert lines[0] == "step 1 start evaluated"
    assert lines[-1].startswith("step 31 ")
    assert losses(lines)[-1] < 0.7 * first


def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path: Path, one_batch: tuple[Batch, Blocks]) -> None:
    """Weights, moments and the step count go on; the rate depends on time only after the warm-up."""
    whole = make_trainer(tmp_path / "whole", max_steps=6, warmup_steps=10)
    run(whole, one_batch)
    run(make_trainer(tmp_path / "parts", max_steps=2, warmup_steps=10), one_batch)
    second = make_trainer(tmp_path / "parts", max_steps=4, warmup_steps=10)
    assert second.state.step == 2
    run(second, one_batch)
    assert second.state.step == whole.state.step == 6
    for mine, theirs in zip(second.module.parameters(), whole.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    saved = [load_file(tmp_path / name / "state" / "optimizer.safetensors") for name in ("whole", "parts")]
    assert saved[0].keys() == saved[1].keys()
    assert len(saved[0]) == 4
    for name in saved[0]:
        torch.testing.assert_close(saved[0][name], saved[1][name], rtol=0, atol=0)


def test_trained_time_adds_up(tmp_path: Path, one_batch: tuple[Batch, Blocks]) -> None:
    run(make_trainer(tmp_path), one_batch)
    first = read_state(tmp_path).trained_s
    run(make_trainer(tmp_path), one_batch)
    assert read_state(tmp_path).trained_s > first > 0


def test_total_minutes_end_the_training(tmp_path: Path, one_batch: tuple[Batch, Blocks]) -> None:
    trainer = make_trainer(tmp_path)
    trainer.state.trained_s = 61 * 60
    run(trainer, one_batch)
    assert trainer.state.step == 0


def test_stop_request_ends_and_saves(tmp_path: Path, one_batch: tuple[Batch, Blocks]) -> None:
    trainer = make_trainer(tmp_path, max_steps=None)
    run(trainer, one_batch, lambda: trainer.state.step == 3)
    assert read_state(tmp_path).step == 3


def test_learning_rate_rises_then_falls() -> None:
    config = LoopConfig(60, 10, 1.0, warmup_steps=4, final_ratio=0.1)
    assert [learning_rate(config, LoopState(step, 0)) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    rates = [learning_rate(config, LoopState(10, minutes * 60)) for minutes in (0, 5, 10, 20)]
    assert rates == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_a_loss_that_is_no_number_keeps_what_was_saved(tmp_path: Path, one_batch: tuple[Batch, Blocks]) -> None:
    run(make_trainer(tmp_path), one_batch)
    before = (tmp_path / "state" / "model.safetensors").read_bytes()
    trainer = make_trainer(tmp_path)
    with torch.no_grad():
        next(trainer.module.parameters()).fill_(float("nan"))
    with pytest.raises(InputError, match="the loss is nan at step 5"):
        run(trainer, one_batch)
    assert (tmp_path / "state" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "progress.json"])
def test_a_broken_state_is_named(tmp_path: Path, one_batch: tuple[Batch, Blocks], name: str) -> None:
    run(make_trainer(tmp_path), one_batch)
    path = tmp_path / "state" / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match="state"):
        make_trainer(tmp_path)


def test_a_state_of_another_shape_is_refused(tmp_path: Path, one_batch: tuple[Batch, Blocks]) -> None:
    run(make_trainer(tmp_path), one_batch)
    with pytest.raises(InputError, match=r"cannot be resumed: .*size mismatch"):
        Trainer(nn.Linear(64, 32), LoopConfig(1, 1), tmp_path)


def content(folder: Path) -> tuple[str, list[float]]:
    return (folder / "text").read_text(), load_file(folder / "numbers.safetensors")["x"].tolist()


def write(folder: Path, value: int) -> None:
    write_folder(folder, {"numbers.safetensors": {"x": torch.full((2,), float(value))}, "text": str(value)})


@pytest.mark.parametrize("call", range(7))
def test_an_interrupted_write_leaves_one_whole_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """The process ends at any call that changes the disk: both files are of the old version, or both of the new one."""
    folder = tmp_path / "state"
    write(folder, 1)
    calls = iter(range(100))

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call_or_die(*arguments: Any, **named: Any) -> Any:
            if next(calls) == call:
                raise KeyboardInterrupt
            return function(*arguments, **named)

        return call_or_die

    with monkeypatch.context() as patch:
        patch.setattr("training.loop.save_file", dying(save_file))
        patch.setattr(Path, "write_text", dying(Path.write_text))
        patch.setattr(Path, "rename", dying(Path.rename))
        patch.setattr("training.loop.shutil.rmtree", dying(shutil.rmtree))
        with pytest.raises(KeyboardInterrupt):
            write(folder, 2)
    restore_folder(folder)
    assert content(folder) in [("1", [1.0, 1.0]), ("2", [2.0, 2.0])]
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_killed_writer_leaves_a_whole_folder(tmp_path: Path) -> None:
    """kill -9 at an arbitrary moment of many writes to the same folder."""
    code = (
        "import torch; from pathlib import Path; from training.loop import write_folder\n"
        "for value in range(10**6):\n"
        "    x = {'x': torch.full((2,), float(value))}\n"
        f"    write_folder(Path({str(tmp_path)!r}) / 'state', {{'numbers.safetensors': x, 'text': str(value)}})\n"
        "    if value == 0: print('go', flush=True)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    with writer.stdout as output:
        assert output.readline() == "go\n"
        time.sleep(0.01)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    restore_folder(tmp_path / "state")
    text, numbers = content(tmp_path / "state")
    assert numbers == [float(text)] * 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_keeps_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    folder = tmp_path / "state"
    write(folder, 1)

    def fail(*arguments: object, **named: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError) as caught:
        write(folder, 2)
    assert caught.value.errno == number
    assert content(folder) == ("1", [1.0, 1.0])
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_the_tensor_librarys_full_disk_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("training.loop.save_file", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        write(tmp_path / "state", 1)
    assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def test_progress_file_has_both_counts(tmp_path: Path, one_batch: tuple[Batch, Blocks]) -> None:
    run(make_trainer(tmp_path), one_batch)
    fields = json.loads((tmp_path / "state" / "progress.json").read_text())
    assert fields["step"] == 5
    assert set(fields) == {"step", "trained_s"}


def test_the_first_signal_is_a_wish_and_the_second_an_interruption() -> None:
    stop = StopRequest()
    before = signal.getsignal(signal.SIGTERM)
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before

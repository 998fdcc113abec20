"""One process that measures: target, methods, and the two steps of a conversation, writing the text and replaying it.

Knows nothing of how work is divided or of what becomes of the results.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from evaluation.contestants import Contestant, ContestantFiles, ContestantSettings, load_contestant, load_control
from evaluation.conversations import Conversation, Writer
from evaluation.prompts import Prompt
from evaluation.records import Measured, Unit
from evaluation.rounds import ReplayedRound
from modeling.architecture import UnsupportedModel
from modeling.chat import load_chat_format
from modeling.runtime import choose_dtype
from modeling.target import TargetRunner, load_target, read_architecture
from protocol.worker_config import DraftMethodName

MOST_POSITIONS = 2048
"""Longest prompt and answer together; the paper's longest answer."""


@dataclass(frozen=True)
class LaboratoryOptions:
    """Everything a process needs to measure; plain values, so that it can be sent to one.

    controls: further draft models by name, which are no methods.
    """

    target: Path
    files: dict[DraftMethodName, ContestantFiles]
    controls: dict[str, Path]
    settings: ContestantSettings
    max_tokens: int
    dtype: str
    device: str


@dataclass(frozen=True)
class Task:
    """Some prompts of a unit; the first has the number `first_number`."""

    unit: Unit
    first_number: int
    prompts: tuple[Prompt, ...]


class Laboratory:
    """Loads everything. Raises `UnsupportedModel` or `InvalidCalibration` naming the file at fault."""

    def __init__(self, options: LaboratoryOptions) -> None:
        device = torch.device(options.device)
        dtype = choose_dtype(options.dtype, device)
        chat = load_chat_format(options.target)
        num_positions = options.settings.num_positions
        common = options.settings, chat.stop_token_ids, dtype, device
        self.contestants: dict[str, Contestant] = {
            **{name: load_contestant(name, options.target, files, *common) for name, files in options.files.items()},
            **{name: load_control(name, options.target, draft, *common) for name, draft in options.controls.items()},
        }
        taps = sorted({layer for contestant in self.contestants.values() for layer in contestant.tap_layers})
        target = load_target(options.target, dtype, device)
        num_layers = target.architecture.num_layers
        layers = [layer for contestant in self.contestants.values() for layer in contestant.decoder_layers]
        self._writer = Writer(
            runner=TargetRunner(target, taps, num_positions),
            chat=chat,
            first_decoder_layer=min(layers, default=num_layers),
            max_tokens=options.max_tokens,
            max_prompt_tokens=num_positions - options.max_tokens - 2 * max(options.settings.budgets),
        )

    def measure(self, task: Task) -> Iterator[Measured]:
        """The conversations of a task, one after another."""
        for conversation in self._writer.write(task.prompts, task.unit.temperature, task.first_number):
            yield self._replay(task.unit, conversation)

    def _replay(self, unit: Unit, conversation: Conversation) -> Measured:
        measured = Measured(unit, conversation.number, {}, {})
        for turn, text in enumerate(conversation.texts):
            for contestant in self.contestants.values():
                for played in contestant.play(text, conversation.number + (turn << 32)):
                    rounds: list[ReplayedRound] = measured.rounds.setdefault(played.series, [])
                    rounds += played.rounds
                    if played.observed:
                        measured.observed.setdefault(played.series.budget, []).extend(played.observed)
        return measured


def choose_num_positions(target: Path, max_tokens: int, budgets: Sequence[int]) -> int:
    """Positions that networks are made for. Raises `UnsupportedModel` where no prompt would fit."""
    most = min(MOST_POSITIONS + 2 * max(budgets), read_architecture(target).max_positions)
    if most - max_tokens - 2 * max(budgets) < 1:
        raise UnsupportedModel(f"--max-tokens {max_tokens} leaves no room for a prompt in {most} positions")
    return most

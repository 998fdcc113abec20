"""Benchmark prompts: JSON lines with `turns`, worded as the field's evaluation code words them (prompts/README.md)."""

import gzip
import json
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHUFFLE_SEED = 20261129
"""Seed of the fixed shuffle: the first prompts are evaluated, later ones are free for calibration."""

TURN = "{turn}"
REASONING = TURN + "\nPlease reason step by step, and put your final answer within \\boxed{}."
CODE_QUESTION = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\n{turn}\n\n### Format: {format}\n```python\n{code}\n```\n\n"
    "### Answer: (use the provided format with backticks)"
)
WORDINGS = {
    "gsm8k": REASONING,
    "math500": REASONING,
    "aime25": REASONING,
    "humaneval": (
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{turn}\n```"
    ),
}
FILES = {"gsm8k": "gsm8k_test.jsonl"}
ENDINGS = (".jsonl", ".jsonl.gz")


class PromptFileError(ValueError):
    """A prompt file is missing or a line of it is broken; the message names file and line."""


@dataclass(frozen=True)
class Prompt:
    """One conversation: what the user says, worded for the model. `text` is the first turn."""

    id: str
    text: str
    later_turns: tuple[str, ...] = ()

    @property
    def turns(self) -> tuple[str, ...]:
        return (self.text, *self.later_turns)


def load_prompts(dataset: str, folder: Path, num_prompts: int) -> list[Prompt]:
    """The first prompts of the fixed shuffle of a data set: a known name in `folder`, or a path to a file."""
    rows = read_prompt_file(prompt_file(dataset, folder), dataset)
    random.Random(SHUFFLE_SEED).shuffle(rows)
    return rows[:num_prompts]


def prompt_file(dataset: str, folder: Path) -> Path:
    """Where a data set lies. Raises `PromptFileError` naming those there are."""
    if dataset.endswith(ENDINGS):
        return Path(dataset)
    path = folder / FILES.get(dataset, f"{dataset}.jsonl")
    if not path.is_file():
        names = {file: name for name, file in FILES.items()}
        known = sorted(names.get(found.name, found.name.removesuffix(".jsonl")) for found in folder.glob("*.jsonl"))
        there = f"known there: {', '.join(known)}" if known else "no *.jsonl is there"
        raise PromptFileError(f"unknown data set {dataset!r} ({path} is missing; {there})")
    return path


def read_prompt_file(path: Path, dataset: str = "") -> list[Prompt]:
    """All prompts of a file, in order, worded as `dataset` is. Raises `PromptFileError` naming file and line."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            lines = file.read().split("\n")
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise PromptFileError(f"{path}: {error}") from error
    prompts = [
        _parse(line, f"{path}:{number}", dataset, number) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise PromptFileError(f"{path} holds no prompt")
    return prompts


def _parse(line: str, where: str, dataset: str, number: int) -> Prompt:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptFileError(f"{where}: not JSON: {error}") from error
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise PromptFileError(f'{where}: not a JSON object with "turns": [text, ...]')
    text, *later = (_worded(turn, dataset, row) for turn in turns)
    return Prompt(str(row.get("id", number)), text, tuple(later))


def _worded(turn: str, dataset: str, row: Mapping[str, Any]) -> str:
    if dataset == "livecodebench":
        code = row.get("starter_code")
        how = "Use the following code structure:" if code else "Write your code in the following format:"
        filled = CODE_QUESTION.replace("{format}", how).replace("{code}", str(code or "# YOUR CODE HERE"))
        return filled.replace(TURN, turn)
    return WORDINGS.get(dataset, TURN).replace(TURN, turn)

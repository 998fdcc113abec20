"""Benchmark prompts: JSON lines with `turns`, worded as the field's evaluation code words them (prompts/README.md)."""

import gzip
import json
import random
from dataclasses import dataclass
from pathlib import Path

SHUFFLE_SEED = 20261129
"""Seed of the fixed shuffle: the first prompts are evaluated, later ones are free for calibration."""

REASONING = "\nPlease reason step by step, and put your final answer within \\boxed{}."
FORMATS = {
    "gsm8k": "{turn}" + REASONING,
    "math500": "{turn}" + REASONING,
    "aime25": "{turn}" + REASONING,
    "humaneval": (
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{turn}\n```"
    ),
}
FILES = {"gsm8k": "gsm8k_test.jsonl"}


class PromptFileError(ValueError):
    """A prompt file is missing or a line of it is broken; the message names file and line."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a data set: its first turn, worded for the model."""

    id: str
    text: str


def load_prompts(dataset: str, folder: Path, num_prompts: int) -> list[Prompt]:
    """The first prompts of the fixed shuffle of a data set: a known name in `folder`, or a path to a file."""
    path = (
        Path(dataset) if dataset.endswith((".jsonl", ".jsonl.gz")) else folder / FILES.get(dataset, f"{dataset}.jsonl")
    )
    rows = read_prompt_file(path)
    random.Random(SHUFFLE_SEED).shuffle(rows)
    wording = FORMATS.get(dataset, "{turn}")
    return [Prompt(prompt.id, wording.replace("{turn}", prompt.text)) for prompt in rows[:num_prompts]]


def read_prompt_file(path: Path) -> list[Prompt]:
    """All prompts of a file, in order. Raises `PromptFileError`."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise PromptFileError(f"{path}: {error}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompts.append(Prompt(str(row.get("id", number)), str(row["turns"][0])))
        except (json.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise PromptFileError(f'{path}:{number}: not a JSON object with "turns": [text, ...]') from error
    if not prompts:
        raise PromptFileError(f"{path} holds no prompt")
    return prompts

"""Prompt files: which lines may be used, in which wording, and in which order.

A file holds one JSON object a line, `{"id", "turns", ...}`, plain or gzipped. Only the first turn is used. It knows no
tokens.
"""

import gzip
import json
import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.errors import InputError

RESTRICTED_SETS = frozenset(
    {
        "alpaca",
        "code_alpaca_2k",
        "code_alpaca_new",
        "evol_code",
        "instruction_wild",
        "wizardlm_testset",
        # no licence is known for these
        "lima_testset",
        "realign_tasks",
    }
)
"""Sets that are for non-commercial use, or whose licence is not known."""

EVALUATION_SETS = frozenset(
    {"aime25", "gsm8k_test", "HumanEval", "livecodebench", "math500", "mbpp", "mtbench", "ultrachat"}
)
"""First parts of the ids of prompts that are measured with, and so are never trained on."""

TURN = "{turn}"
STEP_BY_STEP = TURN + "\nPlease reason step by step, and put your final answer within \\boxed{}."
WORDINGS = {
    "gsm8k": STEP_BY_STEP,
    "math500": STEP_BY_STEP,
    "aime25": STEP_BY_STEP,
    "humaneval": "Write a solution to the following problem and make sure that it passes the tests:\n"
    f"```python\n{TURN}\n```",
}
"""What published evaluations send, by the first part of the file's name; other files go as they are."""

SHUFFLE_SEED = 20261129
NUM_EVALUATION_PROMPTS = 128


@dataclass(frozen=True)
class Prompt:
    """One prompt: the user's text, and the set it comes from ("" where the file does not say)."""

    prompt_id: str
    text: str
    source_set: str = ""
    is_for_evaluation: bool = False


def read_prompts(path: Path) -> list[Prompt]:
    """Every line of a prompt file. Raises `InputError` naming the file and the line."""
    opener = gzip.open if path.suffix == ".gz" else open
    prompts = []
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    prompts.append(_parse(line, f"{path}, line {number}"))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not prompts:
        raise InputError(f"{path} holds no prompt")
    return prompts


def _parse(line: str, where: str) -> Prompt:
    try:
        fields: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON: {error}") from error
    turns = fields.get("turns") if isinstance(fields, dict) else None
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or "id" not in fields:
        raise InputError(f'{where}: expected an object with "id" and a list "turns" of texts')
    prompt_id = str(fields["id"])
    is_for_evaluation = prompt_id.split("/")[0] in EVALUATION_SETS or any(
        fields.get(mark) for mark in ("near_eval", "sanitized")
    )
    return Prompt(prompt_id, turns[0], str(fields.get("set", "")), is_for_evaluation)


def is_permitted(prompt: Prompt) -> bool:
    """Whether a training corpus that is released may hold answers to this prompt."""
    return prompt.source_set not in RESTRICTED_SETS and not prompt.is_for_evaluation


def normalised(text: str) -> str:
    """Lower case and single spaces, to compare prompts."""
    return " ".join(text.lower().split())


def without(prompts: Iterable[Prompt], excluded: Iterable[Prompt]) -> list[Prompt]:
    """The prompts whose text is none of the excluded ones."""
    taken = {normalised(prompt.text) for prompt in excluded}
    return [prompt for prompt in prompts if normalised(prompt.text) not in taken]


def shuffled(prompts: Sequence[Prompt], seed: int = SHUFFLE_SEED) -> list[Prompt]:
    """The fixed shuffle that evaluation and calibration share: the first 128 are for evaluation."""
    order = list(prompts)
    random.Random(seed).shuffle(order)
    return order


def worded(prompt: Prompt, path: Path) -> str:
    """The text that published evaluations send for a file's prompts."""
    for name, wording in WORDINGS.items():
        if path.name.split(".")[0].split("_")[0] == name:
            return wording.replace(TURN, prompt.text)
    return prompt.text

"""Prompt files: reading, licences, wording, and the fixed shuffle."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.prompts import load_prompts
from training.errors import InputError
from training.prompts import Prompt, is_permitted, read_prompts, shuffled, without, worded


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_first_turns_are_read(tmp_path: Path, name: str) -> None:
    path = write_lines(tmp_path / name, {"id": "x/1", "turns": ["one", "two"], "set": "dolly"})
    assert read_prompts(path) == [Prompt("x/1", "one", "dolly", False)]


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"id": 1}', '{"turns": ["a"]}', '{"id": 1, "turns": []}', '{"id": 1, "turns": [2]}']
)
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 0, "turns": ["fine"]}\n' + line + "\n")
    with pytest.raises(InputError, match=r"a\.jsonl, line 2: "):
        read_prompts(path)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    whole = write_lines(tmp_path / "a.jsonl.gz", *({"id": number, "turns": ["text"]} for number in range(500)))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(whole.read_bytes()[:-20])
    for path in (cut, tmp_path / "missing.jsonl", write_lines(tmp_path / "empty.jsonl")):
        with pytest.raises(InputError, match=path.name):
            read_prompts(path)


@pytest.mark.parametrize(
    ("line", "permitted"),
    [
        ({"id": "train_chat/dolly/1", "set": "dolly"}, True),
        ({"id": "gsm8k_train/1"}, True),
        ({"id": "gsm8k_train/2", "near_eval": "gsm8k_test"}, False),
        ({"id": "train_chat/alpaca/1", "set": "alpaca"}, False),
        ({"id": "train_code/1", "set": "code_alpaca_2k"}, False),
        ({"id": "train_code/2", "set": "evol_code"}, False),
        ({"id": "gsm8k_test/1"}, False),
        ({"id": "HumanEval/3"}, False),
        ({"id": "mbpp_full/1", "sanitized": False}, True),
        ({"id": "mbpp_full/2", "sanitized": True}, False),
    ],
)
def test_what_may_be_trained_on(tmp_path: Path, line: dict[str, Any], permitted: bool) -> None:
    (prompt,) = read_prompts(write_lines(tmp_path / "a.jsonl", line | {"turns": ["text"]}))
    assert is_permitted(prompt) == permitted


def test_excluded_texts_are_compared_without_case_and_spaces() -> None:
    prompts = [Prompt("1", "Add  two\nnumbers"), Prompt("2", "add three numbers")]
    assert without(prompts, [Prompt("x", "add two numbers ")]) == prompts[1:]


def test_the_shuffle_is_the_evaluations(tmp_path: Path) -> None:
    """The first prompts are evaluation's; calibration takes later ones, so the order must be the same on both sides."""
    path = write_lines(tmp_path / "a.jsonl", *({"id": f"x/{number}", "turns": ["text"]} for number in range(200)))
    evaluated = [prompt.id for prompt in load_prompts(str(path), tmp_path, 128)]
    assert [prompt.prompt_id for prompt in shuffled(read_prompts(path))[:128]] == evaluated


def test_wording_of_published_evaluations() -> None:
    prompt = Prompt("1", "1 {x} + 1")
    ending = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert worded(prompt, Path("a/gsm8k_test.jsonl")) == "1 {x} + 1" + ending
    assert worded(prompt, Path("math500.jsonl")) == "1 {x} + 1" + ending
    assert worded(prompt, Path("humaneval.jsonl")).endswith("```python\n1 {x} + 1\n```")
    assert worded(prompt, Path("mbpp.jsonl")) == "1 {x} + 1"

"""Prompt files: which prompts, in which wording and order, and what is said about a broken one."""

import gzip
import json
import random
from pathlib import Path

import pytest

from evaluation.prompts import SHUFFLE_SEED, Prompt, PromptFileError, load_prompts, read_prompt_file
from training.prompts import read_prompts, shuffled


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_the_first_of_the_fixed_shuffle(tmp_path: Path) -> None:
    """The same shuffle that calibration skips the first of."""
    path = write_lines(tmp_path / "some.jsonl", *(json.dumps({"id": str(i), "turns": [f"q{i}"]}) for i in range(40)))
    order = list(range(40))
    random.Random(SHUFFLE_SEED).shuffle(order)
    assert [prompt.id for prompt in load_prompts("some", tmp_path, 5)] == [str(i) for i in order[:5]]
    assert [p.prompt_id for p in shuffled(read_prompts(path))] == [p.id for p in load_prompts("some", tmp_path, 40)]


def test_wordings(tmp_path: Path) -> None:
    write_lines(tmp_path / "gsm8k_test.jsonl", json.dumps({"turns": ["1+1?"]}))
    write_lines(tmp_path / "humaneval.jsonl", json.dumps({"turns": ["def f(): {turn}"]}))
    write_lines(
        tmp_path / "livecodebench.jsonl",
        json.dumps({"turns": ["Sort."], "starter_code": "class S:"}),
        json.dumps({"turns": ["Sum."], "starter_code": ""}),
    )
    write_lines(tmp_path / "mtbench.jsonl", json.dumps({"turns": ["Write.", "Again."]}))
    assert load_prompts("gsm8k", tmp_path, 1)[0].text.startswith("1+1?\nPlease reason step by step")
    assert load_prompts("humaneval", tmp_path, 1)[0].text.endswith("```python\ndef f(): {turn}\n```")
    texts = sorted(prompt.text for prompt in load_prompts("livecodebench", tmp_path, 2))
    assert "### Question:\nSort.\n\n### Format: Use the following code structure:\n```python\nclass S:\n```" in texts[0]
    assert "Write your code in the following format:\n```python\n# YOUR CODE HERE\n```" in texts[1]
    assert load_prompts("mtbench", tmp_path, 1)[0].turns == ("Write.", "Again.")


def test_a_file_of_any_name_packed_or_not(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "mine.jsonl.gz", "wt") as file:
        file.write('{"turns": ["one\\u2028line"]}\n\n')
    assert load_prompts(str(tmp_path / "mine.jsonl.gz"), Path("/nowhere"), 9) == [Prompt("1", "one\u2028line")]


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '"text"', "{}", '{"turns": []}', '{"turns": "text"}', '{"turns": [""]}', '{"turns": ["a", 1]}'],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = write_lines(tmp_path / "some.jsonl", '{"turns": ["fine"]}', line)
    with pytest.raises(PromptFileError, match=r"some\.jsonl:2: not"):
        read_prompt_file(path)


def test_an_unknown_data_set_is_answered_with_those_there_are(tmp_path: Path) -> None:
    write_lines(tmp_path / "gsm8k_test.jsonl", '{"turns": ["a"]}')
    write_lines(tmp_path / "other.jsonl", '{"turns": ["a"]}')
    with pytest.raises(PromptFileError, match=r"unknown data set 'gsm9k'.*known there: gsm8k, other"):
        load_prompts("gsm9k", tmp_path, 1)
    with pytest.raises(PromptFileError, match=r"no \*\.jsonl is there"):
        load_prompts("gsm8k", tmp_path / "none", 1)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe\x00"])
def test_a_file_without_prompts_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "some.jsonl").write_bytes(content)
    with pytest.raises(PromptFileError, match=r"some\.jsonl"):
        read_prompt_file(tmp_path / "some.jsonl")


def test_a_truncated_archive_is_named(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"turns": ["a"]}\n' * 200)
    (tmp_path / "some.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(PromptFileError, match=r"some\.jsonl\.gz"):
        read_prompt_file(tmp_path / "some.jsonl.gz")

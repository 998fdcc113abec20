"""The ids that may be drawn, and those that end a text, as model folders say them."""

import json
from pathlib import Path

import pytest

from modeling.architecture import UnsupportedModel
from tests.tiny.tokenizer import write_tokenizer
from verify_worker.vocabulary import Vocabulary, read_vocabulary


def test_a_head_wider_than_the_tokenizer(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", 100)
    found = read_vocabulary(folder, 128)
    assert (found.size, found.end_token_ids, found.tokenizer_file) == (100, (99,), folder / "tokenizer.json")


def test_a_tokenizer_wider_than_the_head(tmp_path: Path) -> None:
    found = read_vocabulary(write_tokenizer(tmp_path / "model", 100), 98)
    assert (found.size, found.end_token_ids) == (98, ())


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert read_vocabulary(tmp_path, 128) == Vocabulary(128)


def test_ends_are_collected_from_all_files(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", 100)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 5, 100]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    assert read_vocabulary(folder, 128).end_token_ids == (3, 4, 5, 99)


def test_a_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json cannot be read"):
        read_vocabulary(tmp_path, 128)

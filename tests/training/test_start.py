"""What a training begins with: the choice of the mask token."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from server.tokenizer import Tokenizer
from tests.tiny.models import VOCAB_SIZE
from training.corpus import Corpus, CorpusSequence
from training.session import TargetFiles
from training.start import choose_mask


@pytest.fixture
def files(target_folder: Path, tmp_path: Path) -> TargetFiles:
    """The tiny target's tokenizer with special tokens: 3 ends a text and pads, 6 and 7 are free."""
    content = json.loads((target_folder / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] = [{"id": index, "content": f"t{index}", **plain} for index in (0, 3, 6, 7)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    settings = {"pad_token": {"content": "t3"}, "bos_token": "t0"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return TargetFiles(tmp_path, "", Tokenizer.load(tmp_path), "")


def corpus_of(token_ids: list[int]) -> Corpus:
    sequence = CorpusSequence(0, 0, np.array(token_ids), 1, 0.0)
    return Corpus([sequence], len(token_ids), "")


def test_an_embedding_row_without_a_token_is_the_best_mask(files: TargetFiles) -> None:
    assert choose_mask(files, corpus_of([9, 10]), VOCAB_SIZE + 5) == VOCAB_SIZE


def test_then_a_special_token_without_a_role_that_no_text_holds(files: TargetFiles) -> None:
    assert choose_mask(files, corpus_of([9, 10]), VOCAB_SIZE) == 6
    assert choose_mask(files, corpus_of([9, 6]), VOCAB_SIZE) == 7


def test_then_any_token_that_no_text_holds(files: TargetFiles) -> None:
    assert choose_mask(files, corpus_of([6, 7, 127]), VOCAB_SIZE) == 126


def test_the_end_of_the_text_is_the_last_resort(files: TargetFiles) -> None:
    assert choose_mask(files, corpus_of(list(range(VOCAB_SIZE))), VOCAB_SIZE) == 3


def test_a_target_without_settings(files: TargetFiles) -> None:
    (files.folder / "tokenizer_config.json").unlink()
    assert choose_mask(replace(files, tokenizer=Tokenizer.load(files.folder)), corpus_of([9]), VOCAB_SIZE) == 0

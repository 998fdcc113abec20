"""Tiny corpora: texts that follow the tiny target's rule."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny.models import VOCAB_SIZE, successors
from training.corpus import Corpus, StateStore

END_ID = 3
CPU = torch.device("cpu")
Command = Callable[..., int]


def last_error(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line a failed command ends with."""
    return capsys.readouterr().err.strip().splitlines()[-1]


@dataclass(frozen=True)
class States:
    corpus: Corpus
    store: StateStore


def make_texts(count: int, seed: int = 0) -> list[list[int]]:
    """Texts of different lengths: two random tokens as the prompt, then the rule, then the end of the text."""
    generator = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        prompt = generator.integers(5, VOCAB_SIZE, size=2).tolist()
        rest = [token_id for token_id in successors(prompt[-1], int(generator.integers(12, 24))) if token_id != END_ID]
        texts.append([*prompt, *rest, END_ID])
    return texts


def write_corpus_file(path: Path, texts: list[list[int]], prompt_len: int = 2, **changes: np.ndarray) -> Path:
    """A corpus file; `changes` replace arrays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        "tokens": np.concatenate([np.array(text, dtype=np.uint16) for text in texts]),
        "offsets": np.cumsum([0, *map(len, texts)]).astype(np.int64),
        "prompt_lens": np.full(len(texts), prompt_len, dtype=np.int32),
        "ids": np.array([f"tiny/{index}" for index in range(len(texts))]),
        "temperatures": np.zeros(len(texts), dtype=np.float32),
    } | changes
    np.savez_compressed(path, allow_pickle=False, **arrays)
    return path

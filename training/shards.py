"""Corpus files in the layout that `training.corpus` reads, written one shard at a time and each in one piece."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.corpus import read_archive
from training.responses import Response

PREFIX = "part"


@dataclass
class ShardWriter:
    """Collects answers and writes a shard when `size` of them are there, or when asked to."""

    folder: Path
    vocab_size: int
    tokenizer: str
    size: int

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(f"{PREFIX}.*.partial"):
            left.unlink()
        self._waiting: list[Response] = []

    def add(self, response: Response) -> None:
        """Take an answer; writes a shard when it is full."""
        self._waiting.append(response)
        if len(self._waiting) >= self.size:
            self.flush()

    def flush(self) -> None:
        """Write what waits. Raises OSError, and then keeps it."""
        if not self._waiting:
            return
        taken = [int(path.stem.split(".")[1]) for path in self.folder.glob(f"{PREFIX}.*.npz")]
        path = self.folder / f"{PREFIX}.{max(taken, default=-1) + 1:05d}.npz"
        temporary = path.with_suffix(".partial")
        try:
            with temporary.open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **self._arrays())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._waiting = []

    def _arrays(self) -> dict[str, np.ndarray]:
        texts = [response.request.prompt_token_ids + response.token_ids for response in self._waiting]
        width = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        return {
            "tokens": np.concatenate([np.array(text, dtype=width) for text in texts]),
            "offsets": np.cumsum([0, *map(len, texts)], dtype=np.int64),
            "prompt_lens": np.array([len(r.request.prompt_token_ids) for r in self._waiting], dtype=np.int32),
            "ids": np.array([response.request.prompt_id for response in self._waiting]),
            "temperatures": np.array([r.request.sampling.temperature for r in self._waiting], dtype=np.float32),
            "tokenizer": np.array(self.tokenizer),
        }


def answered_ids(folder: Path) -> set[str]:
    """Ids of the prompts whose answers the folder holds. Raises `CorpusError` for a broken file."""
    return {prompt_id for path in _archives(folder) for prompt_id in read_archive(path).ids}


def _archives(folder: Path) -> Sequence[Path]:
    return sorted(folder.glob("*.npz"))

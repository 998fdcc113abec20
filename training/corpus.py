"""Text the target wrote, and the target's states on it.

A corpus is a folder of numpy archives (`tokens`, `offsets`, `prompt_lens`, `ids`, `temperatures`). States are
computed on
first use and kept in one file on disk, so that several trainings share them. It does not know what is trained.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from modeling.layers import RotaryTable, grouped_mask, rms_norm
from modeling.target import Target


class CorpusError(ValueError):
    """A corpus cannot be used: missing, broken, or written with another tokenizer."""


@dataclass(frozen=True)
class Sequence_:
    """One prompt and response: positions before `prompt_len` are the prompt. `offset` places it in the state store."""

    index: int
    offset: int
    token_ids: np.ndarray  # int64 [length]
    prompt_len: int
    temperature: float

    @property
    def length(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Corpus:
    """All sequences of a folder, in file order."""

    sequences: list[Sequence_]
    num_tokens: int
    digest: str


REQUIRED_ARRAYS = ("tokens", "offsets", "prompt_lens", "temperatures")


def read_corpus(folder: Path, vocab_size: int) -> Corpus:
    """Read every archive of a folder; raises `CorpusError` naming the file that does not fit."""
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise CorpusError(f"{folder} holds no .npz file")
    sequences: list[Sequence_] = []
    digest, start = hashlib.sha256(), 0
    for file in files:
        try:
            with np.load(file, allow_pickle=False) as archive:
                missing = [name for name in REQUIRED_ARRAYS if name not in archive]
                if missing:
                    raise CorpusError(f"{file} lacks the arrays {', '.join(missing)}")
                tokens, offsets, prompts, temperatures = (archive[name] for name in REQUIRED_ARRAYS)
        except (OSError, ValueError, EOFError) as error:
            raise CorpusError(f"{file} is not a readable numpy archive: {error}") from error
        if offsets[-1] != len(tokens) or len(offsets) != len(prompts) + 1 or len(prompts) != len(temperatures):
            raise CorpusError(f"{file}: offsets, prompt_lens and tokens do not agree")
        if len(tokens) and int(tokens.max()) >= vocab_size:
            raise CorpusError(f"{file} holds token {int(tokens.max())}, the target has {vocab_size}: another tokenizer")
        digest.update(file.name.encode() + tokens.tobytes())
        for begin, end, prompt, temperature in zip(offsets[:-1], offsets[1:], prompts, temperatures, strict=True):
            ids = tokens[begin:end].astype(np.int64)
            sequences.append(Sequence_(len(sequences), start + int(begin), ids, int(prompt), float(temperature)))
        start += len(tokens)
    return Corpus(sequences, start, digest.hexdigest()[:16])


def frequent_tokens(corpus: Corpus, size: int, vocab_size: int, always: Sequence[int]) -> Tensor:
    """The `size` most frequent tokens of the responses, sorted by id; `always` are among them."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sequence in corpus.sequences:
        counts += np.bincount(sequence.token_ids[sequence.prompt_len :], minlength=vocab_size)
    counts[list(always)] = counts.max() + 1
    order = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(order))


@dataclass(frozen=True)
class Batch:
    """Padded sequences: token_ids [b, L], taps [b, L, taps, hidden], last [b, L, hidden] (normed), lengths and
    prompts."""

    token_ids: Tensor
    taps: Tensor
    last: Tensor
    lengths: list[int]
    prompt_lens: list[int]
    sequences: list[Sequence_]


class StateStore:
    """Tapped states and the normed last state of a corpus, bf16, in one memory-mapped file filled on first use.

    Two processes may fill it at once: both write the same numbers. A mark per sequence is set after its rows are
    written.
    """

    def __init__(self, corpus: Corpus, target: Target, tap_layers: Sequence[int], folder: Path) -> None:
        self._target = target
        self._taps = tuple(tap_layers)
        width = target.architecture.hidden_size
        key = json.dumps([corpus.digest, list(tap_layers), width, target.architecture.num_layers])
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"states-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        self._states = _memmap(path.with_suffix(".bin"), (corpus.num_tokens, len(self._taps) + 1, width), np.int16)
        self._marks = _memmap(path.with_suffix(".done"), (len(corpus.sequences),), np.uint8)
        self._rotary = RotaryTable(target.architecture, 4096, target.dtype, target.device)

    def batch(self, sequences: Sequence[Sequence_], device: torch.device) -> Batch:
        """States of some sequences, padded to the longest."""
        missing = [sequence for sequence in sequences if not self._marks[sequence.index]]
        if missing:
            self._compute(missing)
        longest = max(sequence.length for sequence in sequences)
        states = torch.zeros(len(sequences), longest, len(self._taps) + 1, self._states.shape[-1], dtype=torch.bfloat16)
        token_ids = torch.zeros(len(sequences), longest, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            stored = np.array(self._states[sequence.offset : sequence.offset + sequence.length])
            states[row, : sequence.length] = torch.from_numpy(stored).view(torch.bfloat16)
            token_ids[row, : sequence.length] = torch.from_numpy(sequence.token_ids)
        wide = states.to(device).float()
        return Batch(
            token_ids.to(device),
            wide[:, :, :-1],
            wide[:, :, -1],
            [sequence.length for sequence in sequences],
            [sequence.prompt_len for sequence in sequences],
            list(sequences),
        )

    @torch.inference_mode()
    def _compute(self, sequences: Sequence[Sequence_]) -> None:
        target, shape = self._target, self._target.architecture
        longest = max(sequence.length for sequence in sequences)
        token_ids = torch.zeros(len(sequences), longest, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            token_ids[row, : sequence.length] = torch.from_numpy(sequence.token_ids)
        hidden = torch.nn.functional.embedding(token_ids.to(target.device), target.embedding)
        rotary = self._rotary.span(0, longest)
        causal = torch.ones(longest, longest, dtype=torch.bool, device=target.device).tril()
        mask = grouped_mask(causal, shape.group_size, target.dtype)
        kept = []
        for index in range(shape.num_layers):
            hidden = full_layer(target.layer(index), hidden, rotary, mask)
            if index in self._taps:
                kept.append(hidden)
        kept.append(rms_norm(hidden, target.norm, shape.rms_eps))
        rows = torch.stack(kept, dim=2).to(torch.bfloat16).cpu().view(torch.int16).numpy()
        for row, sequence in enumerate(sequences):
            self._states[sequence.offset : sequence.offset + sequence.length] = rows[row, : sequence.length]
            self._marks[sequence.index] = 1


def full_layer(layer: object, hidden: Tensor, rotary: object, mask: Tensor) -> Tensor:
    """One layer over whole sequences [b, L, hidden] under a mask [1, group*L, L]."""
    from modeling.layers import DecoderLayer, Rotary, attend

    assert isinstance(layer, DecoderLayer) and isinstance(rotary, Rotary)
    heads = layer.project(hidden, rotary)
    attended = attend(heads.query, heads.key.transpose(-3, -2), heads.value.transpose(-3, -2), mask)
    return layer.finish(hidden, attended)


def _memmap(path: Path, shape: tuple[int, ...], dtype: type[np.generic]) -> np.memmap:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    with path.open("ab") as file:
        if os.fstat(file.fileno()).st_size < size:
            file.truncate(size)
    return np.memmap(path, dtype=dtype, mode="r+", shape=shape)


def batches(
    sequences: Sequence[Sequence_], num_tokens: int, generator: np.random.Generator
) -> Iterator[list[Sequence_]]:
    """One epoch of batches of similar response lengths, each of about `num_tokens` padded tokens, in random order."""
    noisy = sorted(sequences, key=lambda sequence: sequence.length - sequence.prompt_len + generator.uniform(0, 24))
    groups: list[list[Sequence_]] = []
    current: list[Sequence_] = []
    for sequence in noisy:
        longest = max([sequence.length, *(other.length for other in current)])
        if current and longest * (len(current) + 1) > num_tokens:
            groups.append(current)
            current = []
        current.append(sequence)
    if current:
        groups.append(current)
    for group in generator.permutation(len(groups)):
        yield groups[int(group)]

"""Text the target wrote, and the target's states on it.

A corpus is a folder of numpy archives (`tokens`, `offsets`, `prompt_lens`, `ids`, `temperatures`). States are computed
on first use and kept in one file on disk, so that several trainings share them. It does not know what is trained.
"""

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from modeling.layers import DecoderLayer, Rotary, RotaryTable, attend, grouped_mask, rms_norm
from modeling.target import Target
from training.errors import InputError


class CorpusError(InputError):
    """A corpus cannot be used: missing, broken, or written with another tokenizer."""


@dataclass(frozen=True)
class CorpusSequence:
    """One prompt and response: positions before `prompt_len` are the prompt. `offset` places it in the state store."""

    index: int
    offset: int
    token_ids: np.ndarray  # int64 [length]
    prompt_len: int
    temperature: float

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def prompt(self) -> bytes:
        """The prompt's tokens, as something to compare and to hash."""
        return self.token_ids[: self.prompt_len].tobytes()


@dataclass(frozen=True)
class Corpus:
    """All sequences of a folder, in file order."""

    sequences: list[CorpusSequence]
    num_tokens: int
    digest: str

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max((sequence.length for sequence in self.sequences), default=1)


REQUIRED_ARRAYS = ("tokens", "offsets", "prompt_lens", "temperatures")
NUM_HELD_OUT = 64
SUBSET_SEED = 20260
"""Orders the sequences for `--max-sequences`, the same for every training, so that they share computed states."""


@dataclass(frozen=True)
class Archive:
    """The arrays of one corpus file; `ids` and `tokenizer` (a hash) are empty where the file does not say."""

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_lens: np.ndarray
    temperatures: np.ndarray
    ids: list[str]
    tokenizer: str


def read_archive(file: Path) -> Archive:
    """Read one corpus file; raises `CorpusError` when it is broken, truncated or no corpus."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            missing = [name for name in REQUIRED_ARRAYS if name not in archive]
            if missing:
                raise CorpusError(f"{file} lacks the arrays {', '.join(missing)}")
            tokens, offsets, prompts, temperatures = (archive[name] for name in REQUIRED_ARRAYS)
            ids = [str(name) for name in archive["ids"]] if "ids" in archive else []
            tokenizer = str(archive["tokenizer"]) if "tokenizer" in archive else ""
    except CorpusError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CorpusError(f"{file} is not a readable numpy archive: {error}") from error
    if not len(offsets) or offsets[-1] != len(tokens) or len(offsets) != len(prompts) + 1:
        raise CorpusError(f"{file}: offsets, prompt_lens and tokens do not agree")
    lengths = np.diff(offsets)
    if len(prompts) != len(temperatures) or offsets[0] != 0 or (prompts < 1).any() or (prompts > lengths).any():
        raise CorpusError(f"{file}: offsets, prompt_lens and temperatures do not agree")
    return Archive(tokens, offsets, prompts, temperatures, ids, tokenizer)


def read_corpus(folder: Path, vocab_size: int, tokenizer: str = "", eos_token_ids: Collection[int] = ()) -> Corpus:
    """Read every archive of a folder; raises `CorpusError` naming the file that does not fit.

    `tokenizer` (a hash) and `eos_token_ids` are the target's: a corpus of another tokenizer is refused where it says
    so, where it holds ids the target lacks, and where no text ends as the target's texts end.
    """
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise CorpusError(f"{folder} holds no .npz file")
    sequences: list[CorpusSequence] = []
    digest, start = hashlib.sha256(), 0
    for file in files:
        archive = read_archive(file)
        tokens, offsets = archive.tokens, archive.offsets
        if tokenizer and archive.tokenizer and archive.tokenizer != tokenizer:
            raise CorpusError(f"{file} is of another tokenizer: {archive.tokenizer}, the target's is {tokenizer}")
        if len(tokens) and int(tokens.max()) >= vocab_size:
            raise CorpusError(f"{file} holds token {int(tokens.max())}, the target has {vocab_size}: another tokenizer")
        digest.update(file.name.encode() + tokens.tobytes())
        spans = zip(offsets[:-1], offsets[1:], archive.prompt_lens, archive.temperatures, strict=True)
        for begin, end, prompt, temperature in spans:
            ids = tokens[begin:end].astype(np.int64)
            sequences.append(CorpusSequence(len(sequences), start + int(begin), ids, int(prompt), float(temperature)))
        start += len(tokens)
    if eos_token_ids and not any(int(sequence.token_ids[-1]) in eos_token_ids for sequence in sequences):
        raise CorpusError(
            f"{folder}: none of {len(sequences)} texts ends with the target's end of text"
            f" ({', '.join(map(str, sorted(eos_token_ids)))}): another tokenizer"
        )
    return Corpus(sequences, start, digest.hexdigest()[:16])


@dataclass(frozen=True)
class Split:
    """What is trained on, and what never is."""

    training: list[CorpusSequence]
    held_out: list[CorpusSequence]


def split_corpus(corpus: Corpus, num_held_out: int = NUM_HELD_OUT) -> Split:
    """Hold out evenly spaced sequences; other answers to their prompts are not trained on either."""
    usable = [sequence for sequence in corpus.sequences if sequence.length - sequence.prompt_len >= 2]
    stride = max(1, len(usable) // num_held_out)
    held_out = usable[::stride][:num_held_out]
    prompts = {sequence.prompt for sequence in held_out}
    training = [sequence for sequence in usable if sequence.prompt not in prompts]
    if not training or not held_out:
        raise CorpusError(f"{len(usable)} sequences are too few to train on some and hold {num_held_out} out")
    return Split(training, held_out)


def choose_sequences(
    sequences: Sequence[CorpusSequence], count: int, has_states: Callable[[CorpusSequence], bool], skip: int = 0
) -> list[CorpusSequence]:
    """`count` sequences (0: all) in corpus order: those whose states are there already, then by one fixed shuffle.

    The first `skip` of the shuffle are passed over: a training that goes on can see others than the one before it.
    Raises `CorpusError` where that leaves none.
    """
    order = np.random.default_rng(SUBSET_SEED).permutation(len(sequences))[skip:]
    if not len(order):
        raise CorpusError(f"{len(sequences)} sequences are not enough to pass over {skip}")
    count = count or len(order)
    shuffled = sorted((sequences[int(index)] for index in order), key=lambda sequence: not has_states(sequence))
    return sorted(shuffled[:count], key=lambda sequence: sequence.index)


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
    sequences: list[CorpusSequence]


class StateStore:
    """Tapped states and the normed last state of a corpus, bf16, in one memory-mapped file filled on first use.

    Two processes may fill it at once: both write the same numbers. A mark per sequence is set after its rows are
    written. Rows go to the file by plain writes, so that a full disk is an OSError and not a signal. `fingerprint`
    keeps the states of targets of the same shape apart.
    """

    def __init__(
        self, corpus: Corpus, target: Target, tap_layers: Sequence[int], folder: Path, fingerprint: str = ""
    ) -> None:
        self._target = target
        self._taps = tuple(tap_layers)
        width = target.architecture.hidden_size
        fields = [corpus.digest, list(tap_layers), width, target.architecture.num_layers]
        key = json.dumps(fields + [fingerprint] * bool(fingerprint))
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"states-{hashlib.sha256(key.encode()).hexdigest()[:16]}.bin"
        self._marks_path = self.path.with_suffix(".done")
        self._states = _memmap(self.path, (corpus.num_tokens, len(self._taps) + 1, width), np.int16)
        self._marks = _memmap(self._marks_path, (len(corpus.sequences),), np.uint8)
        self._rotary = RotaryTable(target.architecture, corpus.longest, target.dtype, target.device)

    def has(self, sequence: CorpusSequence) -> bool:
        """Whether the states of a sequence are there already."""
        return bool(self._marks[sequence.index])

    def batch(self, sequences: Sequence[CorpusSequence], device: torch.device) -> Batch:
        """States of some sequences, padded to the longest."""
        missing = [sequence for sequence in sequences if not self.has(sequence)]
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
    def _compute(self, sequences: Sequence[CorpusSequence]) -> None:
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
        try:
            self._write(sequences, rows)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _write(self, sequences: Sequence[CorpusSequence], rows: np.ndarray) -> None:
        with self.path.open("r+b") as states, self._marks_path.open("r+b") as marks:
            for row, sequence in enumerate(sequences):
                states.seek(sequence.offset * self._states.strides[0])
                states.write(np.ascontiguousarray(rows[row, : sequence.length]).data)
                states.flush()
                marks.seek(sequence.index)
                marks.write(b"\x01")
                marks.flush()


def full_layer(layer: DecoderLayer, hidden: Tensor, rotary: Rotary, mask: Tensor) -> Tensor:
    """One layer over whole sequences [b, L, hidden] under a mask [1, group*L, L]."""
    heads = layer.project(hidden, rotary)
    attended = attend(heads.query, heads.key.transpose(-3, -2), heads.value.transpose(-3, -2), mask)
    return layer.finish(hidden, attended)


def _memmap(path: Path, shape: tuple[int, ...], dtype: type[np.generic]) -> np.memmap:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    with path.open("ab") as file:
        if os.fstat(file.fileno()).st_size < size:
            file.truncate(size)
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)


def batches(
    sequences: Sequence[CorpusSequence], num_tokens: int, generator: np.random.Generator
) -> Iterator[list[CorpusSequence]]:
    """One epoch of batches of similar response lengths, each of about `num_tokens` padded tokens, in random order."""
    noisy = sorted(sequences, key=lambda sequence: sequence.length - sequence.prompt_len + generator.uniform(0, 24))
    groups: list[list[CorpusSequence]] = []
    current: list[CorpusSequence] = []
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

"""What every command starts with: the target, its tokenizer, a corpus split in two, and a place to report to."""

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from modeling.runtime import choose_dtype, model_fingerprint, pin
from modeling.target import Target, load_target
from server.models import resolve
from server.tokenizer import Tokenizer
from training.corpus import Corpus, CorpusSequence, StateStore, choose_sequences, read_corpus, split_corpus
from training.errors import InputError
from training.loop import LoopConfig, read_state


@dataclass(frozen=True)
class Place:
    """Where a command computes. `threads` None: as many as torch takes by itself."""

    device: str
    core: int | None
    threads: int | None
    seed: int

    def prepare(self) -> torch.device:
        """Pin the process, seed torch, and return the device. Raises `InputError` for one that is not there."""
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise InputError(f"--device {self.device}: no such device") from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise InputError(f"--device {self.device}: torch finds no CUDA device here")
        try:
            pin(self.core, self.threads or (1 if self.core is not None else torch.get_num_threads()))
        except OSError as error:
            raise InputError(f"--core {self.core}: {error.strerror}") from error
        torch.manual_seed(self.seed)
        return device


@dataclass(frozen=True)
class TrainingOptions:
    """Flags that all trainings share."""

    corpus: Path
    output: Path
    model: str
    minutes: float
    total_minutes: float | None
    steps: int | None
    learning_rate: float
    warmup_steps: int
    batch_tokens: int
    max_sequences: int
    skip_sequences: int
    held_out: int
    states_dir: Path
    evaluate_minutes: float
    bfloat16: str
    threads: int | None
    core: int | None
    device: str
    seed: int

    @property
    def place(self) -> Place:
        return Place(self.device, self.core, self.threads, self.seed)

    def loop_config(self, device: torch.device) -> LoopConfig:
        """The loop's settings; without `--total-minutes` the cosine ends where this run ends."""
        trained_minutes = read_state(self.output).trained_s / 60
        return LoopConfig(
            minutes=self.minutes,
            total_minutes=self.total_minutes or trained_minutes + self.minutes,
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup_steps,
            evaluate_minutes=self.evaluate_minutes,
            bfloat16=wants_bfloat16(self.bfloat16, device),
            max_steps=self.steps,
        )


@dataclass(frozen=True)
class TargetFiles:
    """A resolved target: its folder, what tells it from others, its tokenizer."""

    folder: Path
    fingerprint: str
    tokenizer: Tokenizer
    tokenizer_hash: str

    def load(self, device: torch.device, dtype: str = "float32") -> Target:
        """The frozen network, in fp32 for training."""
        return load_target(self.folder, choose_dtype(dtype, device), device)


def open_target(model: str) -> TargetFiles:
    """Resolve `--model` as the server does. Raises `ModelError` or `TokenizerError`."""
    folder = resolve(model).folder
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()[:16]
    return TargetFiles(folder, model_fingerprint(folder), Tokenizer.load(folder), digest)


@dataclass(frozen=True)
class TrainingData:
    """A corpus and its states, and which sequences are for what."""

    corpus: Corpus
    store: StateStore
    training: list[CorpusSequence]
    held_out: list[CorpusSequence]


def open_corpus(folder: Path, files: TargetFiles, target: Target) -> Corpus:
    """Read a corpus and check that it is the target's. Raises `CorpusError`."""
    return read_corpus(folder, target.architecture.vocab_size, files.tokenizer_hash, files.tokenizer.eos_token_ids)


def prepare_data(
    options: TrainingOptions, corpus: Corpus, files: TargetFiles, target: Target, tap_layers: Sequence[int]
) -> TrainingData:
    """Split a corpus and open its states. Raises `CorpusError` when it is too small."""
    split = split_corpus(corpus)
    store = StateStore(corpus, target, tap_layers, options.states_dir, files.fingerprint)
    chosen = choose_sequences(split.training, options.max_sequences, store.has, options.skip_sequences)
    held_out = split.held_out[: options.held_out]
    note(f"{len(chosen)} sequences to train on, {len(held_out)} held out; states in {store.path}")
    return TrainingData(corpus, store, chosen, held_out)


def wants_bfloat16(choice: str, device: torch.device) -> bool:
    """Whether to train in bf16 autocast; `auto`: on a GPU. On a CPU the casts cost more than the products save."""
    return choice == "on" or (choice == "auto" and device.type == "cuda")


def reporter(output: Path) -> Callable[[str], None]:
    """Prints a line and keeps it in the output folder's log."""

    def report(line: str) -> None:
        print(line, flush=True)
        with (output / "log.txt").open("a", encoding="utf-8") as log:
            log.write(line + "\n")

    return report


def note(line: str) -> None:
    """Tell the user something that is no result."""
    print(line, file=sys.stderr, flush=True)

"""A tiny target with a tokenizer, a tiny corpus of its rule, and its states."""

from pathlib import Path

import pytest
import torch

from modeling.target import Target, TargetRunner, load_target
from tests.tiny.models import TAP_LAYERS, VOCAB_SIZE, TinyModels
from tests.tiny.words import add_word_tokenizer
from tests.training.texts import CPU, END_ID, Command, States, make_texts, write_corpus_file
from training.cli import main
from training.corpus import StateStore, read_corpus

TEMPLATE = "{% for message in messages %}t1 {{ message.content }} {% endfor %}t2"


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def target_folder(models_folder: TinyModels) -> Path:
    """A target that `--model` takes: token i is the word `ti`, and token 3 ends a text."""
    folder = models_folder.target()
    add_word_tokenizer(folder, TEMPLATE, END_ID)
    return folder


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Target:
    return load_target(target_folder, torch.float32, CPU)


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus_file(folder / "a.npz", make_texts(60))
    write_corpus_file(folder / "b.npz", make_texts(40, seed=1))
    return folder


@pytest.fixture(scope="session")
def states(corpus_folder: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> States:
    corpus = read_corpus(corpus_folder, VOCAB_SIZE)
    return States(corpus, StateStore(corpus, target, TAP_LAYERS, tmp_path_factory.mktemp("states")))


@pytest.fixture(scope="session")
def target_runner(target_folder: Path) -> TargetRunner:
    """A second copy of the target: a runner packs the layers it is given."""
    return TargetRunner(load_target(target_folder, torch.float32, CPU), TAP_LAYERS, 256)


@pytest.fixture
def train(target_folder: Path, corpus_folder: Path, tmp_path: Path) -> Command:
    """Runs `train NAME` with small defaults; the output is `tmp_path / NAME`."""

    def run(name: str, *flags: str, **changes: str) -> int:
        values = {
            "corpus": str(corpus_folder),
            "output": str(tmp_path / name),
            "model": str(target_folder),
            "steps": "3",
            "batch-tokens": "150",
            "held-out": "6",
            "states-dir": str(tmp_path / "states"),
        } | {key.replace("_", "-"): value for key, value in changes.items()}
        if name in ("draft", "dflash", "jetspec") and "init" not in values:
            values |= {"layers": "1", "tap-layers": "1,3", "block-size": "4", "draft-vocab": "100"} | values
        return main([name, *flags, *(part for key, value in values.items() for part in (f"--{key}", value))])

    return run

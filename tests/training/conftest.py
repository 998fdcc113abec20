"""A tiny target with a tokenizer, a tiny corpus of its rule, and its states."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from modeling.target import Target, TargetRunner, load_target
from tests.tiny.models import TAP_LAYERS, VOCAB_SIZE, TinyModels
from tests.training.texts import CPU, END_ID, States, make_texts, write_corpus_file
from training.corpus import StateStore, read_corpus

TEMPLATE = "{% for message in messages %}t1 {{ message.content }} {% endfor %}t2"


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def target_folder(models_folder: TinyModels) -> Path:
    """A target that `--model` takes: token i is the word `ti`, and token 3 ends a text."""
    folder = models_folder.target()
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCAB_SIZE)}, unk_token="t4"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_ID}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
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

"""A tiny target that `--model` takes: it has a tokenizer, a chat template, and a token that ends a text."""

import json
from pathlib import Path

import pytest

from tests.tiny.models import TinyModels
from tests.tiny.words import add_word_tokenizer

END_ID = 3
TEMPLATE = "{% for message in messages %}t{{ 1 if message.role == 'user' else 7 }} {{ message.content }} {% endfor %}t2"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("evaluated"))


@pytest.fixture(scope="session")
def target_folder(folders: TinyModels) -> Path:
    """Token i is the word `ti`."""
    folder = folders.target()
    add_word_tokenizer(folder, TEMPLATE, END_ID)
    return folder


@pytest.fixture
def prompts_folder(tmp_path: Path) -> Path:
    """Two data sets: `words` of one turn, `talk` of two."""
    folder = tmp_path / "prompts"
    folder.mkdir()
    words = [{"id": f"w/{index}", "turns": [f"t{9 + index} t{100 - index}"]} for index in range(8)]
    talk = [{"id": f"c/{index}", "turns": [f"t{30 + index}", f"t{60 + index} t9"]} for index in range(4)]
    (folder / "words.jsonl").write_text("\n".join(map(json.dumps, words)))
    (folder / "talk.jsonl").write_text("\n".join(map(json.dumps, talk)))
    return folder

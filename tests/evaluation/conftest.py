"""A tiny target that `--model` takes: it has a tokenizer, a chat template, and a token that ends a text."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.tiny.models import VOCAB_SIZE, TinyModels

END_ID = 3
TEMPLATE = "{% for message in messages %}t{{ 1 if message.role == 'user' else 7 }} {{ message.content }} {% endfor %}t2"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("evaluated"))


@pytest.fixture(scope="session")
def target_folder(folders: TinyModels) -> Path:
    """Token i is the word `ti`."""
    folder = folders.target()
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCAB_SIZE)}, unk_token="t4"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_ID}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
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

"""Prompts for training and evaluation are those that the server would send: the same tokens, the same ends."""

import json
from pathlib import Path

import pytest
from jinja2 import TemplateError

from modeling.architecture import UnsupportedModel
from modeling.chat import load_chat_format
from server.tokenizer import Tokenizer
from tests.server.fakes import make_model_folder

TEXT = "What is 12*7?\nSay it in one word."


def rewrite_settings(folder: Path, **changes: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def assert_same_as_the_server(folder: Path) -> None:
    chat, tokenizer = load_chat_format(folder), Tokenizer.load(folder)
    rendered = tokenizer.render_chat([{"role": "user", "content": TEXT}], add_generation_prompt=True)
    assert chat.encode(TEXT) == tokenizer.encode(rendered, add_special_tokens=False)
    assert chat.stop_token_ids == set(tokenizer.eos_token_ids)


def test_a_plain_template(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    assert_same_as_the_server(folder)
    assert load_chat_format(folder).decode(load_chat_format(folder).encode(TEXT)).count(TEXT) == 1


def test_what_published_templates_use(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    template = (
        "{{ bos_token }}{{ strftime_now('%Y') }}{% for message in messages %}{% if loop.index > 3 %}{% break %}"
        "{% endif %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ message['content'] }}{% endfor %}"
    )
    rewrite_settings(folder, chat_template=template, bos_token={"content": "<|endoftext|>"})
    assert_same_as_the_server(folder)
    assert load_chat_format(folder).encode(TEXT)[0] == 0


def test_the_tokenizers_own_end_counts_beside_that_of_the_generation_config(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
    assert load_chat_format(folder).stop_token_ids == {0, 2}
    assert_same_as_the_server(folder)


def test_a_template_that_refuses_says_so(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    rewrite_settings(folder, chat_template="{{ raise_exception('not like this') }}")
    with pytest.raises(TemplateError, match="not like this"):
        load_chat_format(folder).encode(TEXT)


def test_a_folder_without_a_template_is_named(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    rewrite_settings(folder, chat_template=None)
    with pytest.raises(UnsupportedModel, match="no chat template"):
        load_chat_format(folder)

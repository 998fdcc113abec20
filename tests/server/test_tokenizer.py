"""What is read from a model folder: end ids, chat template, sandbox."""

import json
import shutil
from pathlib import Path

import pytest

from server.tokenizer import Tokenizer, TokenizerError


def changed(folder: Path, target: Path, **files: object) -> Path:
    """A copy of a model folder with some JSON files replaced; None removes one."""
    shutil.copytree(folder, target)
    for name, content in files.items():
        path = target / f"{name}.json"
        if content is None:
            path.unlink()
        else:
            path.write_text(json.dumps(content))
    return target


def test_end_ids_come_from_generation_config_first(model_folder: Path, tmp_path: Path) -> None:
    assert Tokenizer.load(model_folder).eos_token_ids == (2,)
    only_config = changed(model_folder, tmp_path / "a", generation_config=None, tokenizer_config={})
    assert Tokenizer.load(only_config).eos_token_ids == (0,)
    several = changed(model_folder, tmp_path / "b", generation_config={"eos_token_id": [7, 0]})
    assert Tokenizer.load(several).eos_token_ids == (0, 2, 7)


def test_missing_or_broken_tokenizer_is_named(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    broken = changed(model_folder, tmp_path / "broken", tokenizer={"wrong": 1})
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.load(broken)


def test_template_is_sandboxed(model_folder: Path, tmp_path: Path) -> None:
    evil = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    folder = changed(model_folder, tmp_path / "evil", tokenizer_config={"chat_template": evil})
    with pytest.raises(TokenizerError, match="unsafe"):
        Tokenizer.load(folder).render_chat([{"role": "user", "content": "a"}])


def test_template_may_refuse(model_folder: Path, tmp_path: Path) -> None:
    source = "{{ raise_exception('no system please') }}"
    folder = changed(model_folder, tmp_path / "refuses", tokenizer_config={"chat_template": source})
    with pytest.raises(TokenizerError, match="no system please"):
        Tokenizer.load(folder).render_chat([{"role": "system", "content": "a"}])


def test_model_without_template(model_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(changed(model_folder, tmp_path / "plain", tokenizer_config={}))
    with pytest.raises(TokenizerError, match="no chat template"):
        tokenizer.render_chat([])


def test_template_file_and_named_templates(model_folder: Path, tmp_path: Path) -> None:
    named = [{"name": "other", "template": "x"}, {"name": "default", "template": "D{{ eos_token }}"}]
    settings = {"chat_template": named, "eos_token": "</s>"}
    folder = changed(model_folder, tmp_path / "named", tokenizer_config=settings)
    assert Tokenizer.load(folder).render_chat([]) == "D</s>"
    (folder / "chat_template.jinja").write_text("{{ messages | tojson }}")
    assert Tokenizer.load(folder).render_chat([{"a": "é"}]) == '[{"a": "é"}]'

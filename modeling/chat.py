"""Prompts as the model's chat template wants them, in token ids; for training and evaluation, which have no server.

The template comes from the model folder and runs in Jinja's sandbox.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from modeling.architecture import UnsupportedModel, read_json


@dataclass(frozen=True)
class ChatFormat:
    """A tokenizer with its chat template and the ids that end a turn."""

    tokenizer: Tokenizer
    template: str
    special_tokens: dict[str, str]
    stop_token_ids: frozenset[int]

    def encode(self, user_text: str, said: Sequence[str] = ()) -> list[int]:
        """Token ids of a conversation, ready for the answer; `said` came before, user and assistant in turn."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": datetime.now().strftime}
        roles = ("user", "assistant")
        messages = [{"role": roles[turn % 2], "content": text} for turn, text in enumerate([*said, user_text])]
        text = environment.from_string(self.template).render(
            messages=messages, add_generation_prompt=True, **self.special_tokens
        )
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """The text of some tokens, special ones left out."""
        text: str = self.tokenizer.decode(token_ids)
        return text


def load_chat_format(folder: Path) -> ChatFormat:
    """Read a model folder's tokenizer and template; raises `UnsupportedModel` naming what is missing."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise UnsupportedModel(f"{path} is missing")
    settings = read_json(folder / "tokenizer_config.json")
    template_file = folder / "chat_template.jinja"
    template = template_file.read_text(encoding="utf-8") if template_file.exists() else settings.get("chat_template")
    if not isinstance(template, str):
        raise UnsupportedModel(f"{folder} has no chat template")
    generation = folder / "generation_config.json"
    ends = read_json(generation).get("eos_token_id") if generation.exists() else None
    if ends is None:
        ends = read_json(folder / "config.json").get("eos_token_id")
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    special = {name: _token_text(settings.get(name)) for name in ("bos_token", "eos_token")}
    tokenizer = Tokenizer.from_file(str(path))
    own = tokenizer.token_to_id(special["eos_token"]) if special["eos_token"] else None
    stop_token_ids = {int(token) for token in ids} | ({own} if own is not None else set())
    return ChatFormat(tokenizer, template, special, frozenset(stop_token_ids))


def _token_text(value: object) -> str:
    """A special token is a string, or an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)

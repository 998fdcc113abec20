"""Prompts as the model's chat template wants them, in token ids; for training and evaluation, which have no server.

The template comes from the model folder and runs in Jinja's sandbox.
"""

from dataclasses import dataclass
from pathlib import Path

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

    def encode(self, user_text: str) -> list[int]:
        """Token ids of a one-turn conversation, ready for the answer."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        messages = [{"role": "user", "content": user_text}]
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
    special = {name: value for name in ("bos_token", "eos_token") if isinstance(value := settings.get(name), str)}
    return ChatFormat(Tokenizer.from_file(str(path)), template, special, frozenset(int(token) for token in ids))

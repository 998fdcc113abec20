"""How many ids a model folder's tokenizer has, and which of them end a text. No model, no text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from modeling.architecture import UnsupportedModel


@dataclass(frozen=True)
class Vocabulary:
    """The ids 0 .. size - 1 that may be drawn. `tokenizer_file` is None where the folder has no tokenizer."""

    size: int
    end_token_ids: tuple[int, ...] = ()
    tokenizer_file: Path | None = None


def read_vocabulary(folder: Path, width: int) -> Vocabulary:
    """The vocabulary of a folder whose target gives `width` logits; raises `UnsupportedModel`.

    A head may be wider than the tokenizer, padded to a round number: an id beyond the tokenizer's has no text.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return Vocabulary(width)
    try:
        tokens = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for a file it cannot read
        raise UnsupportedModel(f"{path} cannot be read: {error}") from None
    size = min(width, 1 + max(tokens.values(), default=width - 1))
    ends = {token_id for token_id in _end_token_ids(folder, tokens) if token_id < size}
    return Vocabulary(size, tuple(sorted(ends)), path)


def _end_token_ids(folder: Path, tokens: Mapping[str, int]) -> set[int]:
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = _read(folder / name).get("eos_token_id")
        found |= {item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)}
    named = _read(folder / "tokenizer_config.json").get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    if isinstance(text, str) and text in tokens:
        found.add(tokens[text])
    return found


def _read(path: Path) -> Mapping[str, Any]:
    """A JSON object, empty where there is none: the target's loader and the server complain about broken files."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}

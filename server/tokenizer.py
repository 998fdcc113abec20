"""Text to token ids and back, with the `tokenizers` library only.

Reads a model folder's tokenizer, end-of-text ids and chat template. Knows nothing of requests or of streaming; the
incremental side is `server.detokenizer`.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from server.spelling import TokenSpelling

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
HIDDEN_SETTINGS = frozenset({"name_or_path", "vocab_file", "merges_file", "tokenizer_file", "auto_map"})
TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""What transformers calls a tokenizer of this kind."""


class TokenizerError(Exception):
    """A model folder without a usable tokenizer, or a conversation its template refuses."""


@dataclass(frozen=True)
class ChatTemplate:
    """A model's own template for conversations, rendered in a sandbox."""

    template: Template
    special_tokens: Mapping[str, str]
    source: str

    def render(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        """The prompt of a conversation; raises `TokenizerError` with the template's complaint."""
        try:
            return self.template.render(messages=list(messages), **{**self.special_tokens, **options})
        except (TemplateError, TypeError, ValueError) as error:
            raise TokenizerError(f"the chat template refused the messages: {error}") from None


@dataclass(frozen=True)
class Encoded:
    """Token ids of a text, and the places of those that the tokenizer put around it (a beginning-of-text token)."""

    token_ids: list[int]
    added: frozenset[int]


class Tokenizer:
    """The tokenizer of one model folder."""

    def __init__(
        self,
        tokenizer: FastTokenizer,
        eos_token_ids: Sequence[int],
        chat_template: ChatTemplate | None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._settings = dict(settings or {})
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        self.spelling = TokenSpelling(tokenizer)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `tokenizer.json` and what stands beside it; raises `TokenizerError`."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{folder} has no tokenizer.json")
        try:
            tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception for a file it cannot read
            raise TokenizerError(f"{path} cannot be read: {error}") from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        settings = _read_json(folder / "tokenizer_config.json")
        return cls(
            tokenizer, _eos_token_ids(folder, settings, tokenizer), _load_chat_template(folder, settings), settings
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Takes time for a long one: `encode_async` keeps the event loop free."""
        return self.encode_marked(text, add_special_tokens).token_ids

    def encode_marked(self, text: str, add_special_tokens: bool = True) -> Encoded:
        """`encode`, and which tokens are none of the text's own."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        marks = encoding.special_tokens_mask if add_special_tokens else ()
        return Encoded(encoding.ids, frozenset(index for index, is_added in enumerate(marks) if is_added))

    async def encode_async(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`encode`, in a thread."""
        return await asyncio.to_thread(self.encode, text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    @property
    def puts_spaces_between_special_tokens(self) -> bool:
        """Whether decoding sets special tokens apart with spaces; the decoders of current models do not."""
        special = [token_id for token_id in self.eos_token_ids if self.token_of(token_id)][:1] * 2
        return " " in self.decode(special, skip_special_tokens=False) if special else False

    def token_of(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token."""
        return self._tokenizer.id_to_token(token_id) or ""

    @property
    def description(self) -> dict[str, Any]:
        """The folder's own `tokenizer_config.json`, in the shape of vLLM's `/tokenizer_info`: special tokens as texts,
        the chat template in use, and no file names."""
        shown = {name: value for name, value in self._settings.items() if name not in HIDDEN_SETTINGS}
        for name in SPECIAL_TOKENS:
            shown[name] = _token_text(self._settings.get(name)) or None
        template = None if self.chat_template is None else self.chat_template.source
        return shown | {"tokenizer_class": TOKENIZER_CLASS, "chat_template": template}

    def render_chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        """The prompt of a conversation; raises `TokenizerError` when the model has no template or it refuses."""
        if self.chat_template is None:
            raise TokenizerError("this model has no chat template")
        return self.chat_template.render(messages, **options)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file that may be missing."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}


def _eos_token_ids(folder: Path, settings: Mapping[str, Any], tokenizer: FastTokenizer) -> list[int]:
    """Ids that end a text: of generation_config.json, else config.json, and the tokenizer's own end token.

    Instruction-tuned checkpoints often name the base model's end in one file and the end of a turn in another.
    """
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        content = _read_json(folder / name)
        text_config = content.get("text_config")
        value = content.get("eos_token_id", text_config.get("eos_token_id") if isinstance(text_config, dict) else None)
        if value is not None:
            ids += value if isinstance(value, list) else [value]
            break
    eos_token = _token_text(settings.get("eos_token"))
    own = tokenizer.token_to_id(eos_token) if eos_token else None
    if own is not None:
        ids.append(own)
    return sorted({token_id for token_id in ids if isinstance(token_id, int)})


def _token_text(value: object) -> str:
    """A special token is a string, or an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _load_chat_template(folder: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    try:
        template = _template_environment().from_string(source)
    except TemplateError as error:
        raise TokenizerError(f"the chat template of {folder} cannot be read: {error}") from None
    return ChatTemplate(template, {name: _token_text(settings.get(name)) for name in SPECIAL_TOKENS}, source)


def _template_environment() -> ImmutableSandboxedEnvironment:
    """The names that published templates expect, and nothing else."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)

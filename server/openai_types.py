"""The bodies of the HTTP interface: what clients may send, checked field by field, and what they get back.

Numbers and booleans are strict, no float is NaN or infinite, and `null` means "not given" for every optional field.
Parameters of the OpenAI interface that this server does not offer yet are declared with the values that change nothing,
so that any other value gets an error that names it. Ranges that depend on the model are checked elsewhere.
"""

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from server.errors import ApiError, invalid, unsupported

logger = logging.getLogger("jetspec.http")

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_MESSAGES = 4096

BodyT = TypeVar("BodyT", bound="RequestBody")
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(fail_fast=True)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS)]


class RequestBody(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False, protected_namespaces=())
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Parameters that are not offered, with the values, besides null, that ask for nothing."""

    model: str | None = None


class StreamOptions(BaseModel):
    """What a stream carries besides its text."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(RequestBody):
    """The parameters that completions and chat have in common."""

    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    speculative: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int | None = None

    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    spaces_between_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None

    @property
    def stops(self) -> list[str]:
        """Stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


SAMPLING_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "response_format": ({"type": "text"},),
}


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **SAMPLING_NEUTRAL,
        "echo": (False,),
        "logprobs": (),
        "suffix": ("",),
    }

    prompt: str | TokenIds | Texts | TokenIdLists
    add_special_tokens: bool | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None


class TextPart(BaseModel):
    """A piece of a message's content. Only text is taken."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None


class TemplateOptions(BaseModel):
    """What a request may tell the chat template. Templates themselves are never taken from requests."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    enable_thinking: bool | None = None


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **SAMPLING_NEUTRAL,
        "logprobs": (False,),
        "top_logprobs": (0,),
        "tool_choice": ("none",),
        "functions": ([],),
        "continue_final_message": (False,),
        "chat_template": (),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None


class TokenizeBody(RequestBody):
    """POST /tokenize: a prompt, or a conversation."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(RequestBody):
    """POST /detokenize."""

    tokens: TokenIds


class UnknownFields:
    """Unknown fields are mentioned once each, or refused with `--strict-params`."""

    MAX_REMEMBERED: ClassVar[int] = 1000

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._seen: set[str] = set()

    def check(self, body: RequestBody) -> None:
        """Raises an error naming the field in strict mode."""
        for name in body.model_extra or {}:
            if self._strict:
                raise unsupported(name[:100], "this parameter is not known here")
            if name not in self._seen and len(self._seen) < self.MAX_REMEMBERED:
                self._seen.add(name)
                logger.warning("the unknown request field %r is ignored", name[:100])


def parse(kind: type[BodyT], data: bytes, unknown: UnknownFields) -> BodyT:
    """Check a request's JSON; raises a 400 `ApiError` that names the field at fault."""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise _describe(error, kind) from None
    for name, neutral in kind.neutral.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            allowed = " or ".join(["null", *(repr(item) for item in neutral)])
            raise unsupported(name, f"not supported by this server; only {allowed} is accepted")
    if isinstance(body, ChatBody) and body.tools and body.tool_choice != "none":
        raise unsupported("tools", 'not supported by this server; only tool_choice "none" is accepted')
    unknown.check(body)
    return body


def _describe(error: ValidationError, kind: type[RequestBody]) -> ApiError:
    """The first fault only, and never the rejected value: a small body must not get a large answer."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return invalid(None, f"The body is no valid JSON: {first['msg'][:200]}", "invalid_json")
    if not first["loc"]:
        return invalid(None, "The body must be a JSON object.", "invalid_type")
    # A field that takes several types reports one fault for each of them, with the type's name in the location.
    field = str(first["loc"][0])[:100]
    messages = {item["msg"] for item in error.errors(include_url=False, include_input=False) if item["loc"][0] == field}
    if field not in kind.model_fields:
        return invalid(None, str(first["msg"])[:200])
    return invalid(field, " or ".join(sorted(messages))[:300])

"""The bodies of the HTTP interface: what clients may send, field by field, and the ranges that no model changes.

Numbers and booleans are strict, no float is NaN or infinite, and `null` means "not given" for every optional field.
Parameters that other servers know and this one does not offer are listed with the values that change nothing, so that
any other value gets an error that names them. Ranges that depend on the model or on flags are checked in
`server.preparation`.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_MESSAGES = 4096
MAX_BIASED_TOKENS = 1024
MAX_GRAMMAR_CHARACTERS = 64 * 1024
MAX_CHOICES = 1024
MAX_CHOICE_CHARACTERS = 1024
MAX_REQUEST_ID_CHARACTERS = 128

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(fail_fast=True)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS)]
Limit = Annotated[int, Field(ge=1, lt=1 << 31)]
LimitOrZero = Annotated[int, Field(ge=0, lt=1 << 31)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
GrammarText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
ChoiceText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CHOICE_CHARACTERS)]
RequestId = Annotated[str, StringConstraints(pattern=r"^[!-~]+$", max_length=MAX_REQUEST_ID_CHARACTERS)]


class Part(BaseModel):
    """Base of an object inside a body; fields it does not know are kept, to be mentioned."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class ClosedPart(Part):
    """An object inside a body in which an unknown field is an error: it would change the answer."""

    model_config = ConfigDict(extra="forbid")


class RequestBody(Part):
    """Base of every request body."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Parameters that are not offered, with the values, besides null, that ask for nothing."""

    model: str | None = None

    def unknown_fields(self) -> Iterator[str]:
        """Names of fields that nothing here reads, those of inner objects after a dot."""
        yield from (name for name in self.model_extra or {} if name not in self.neutral)


class StreamOptions(Part):
    """What a stream carries besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    jetspec_rounds: bool | None = None


class JsonSchema(Part):
    """A named JSON schema, as in OpenAI's `response_format`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(ClosedPart):
    """The form of the answer: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(ClosedPart):
    """vLLM's form of the same, with regular expressions, choices and grammars; exactly one field is given."""

    json_: dict[str, Any] | bool | GrammarText | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: Annotated[list[ChoiceText], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = None
    grammar: GrammarText | None = None


class SamplingBody(RequestBody):
    """The parameters that completions and chat have in common."""

    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASED_TOKENS)] | None = None
    n: Limit | None = None
    prompt_logprobs: LimitOrZero | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: LimitOrZero | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    speculative: bool | None = None
    jetspec: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: RequestId | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None

    @property
    def stops(self) -> list[str]:
        """Stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def unknown_fields(self) -> Iterator[str]:
        """See the base class."""
        yield from super().unknown_fields()
        for name in self.stream_options.model_extra or {} if self.stream_options is not None else {}:
            yield f"stream_options.{name}"


SAMPLING_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # beam search
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    # filters and samplers of other servers
    "typical_p": (1,),
    "mirostat": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "stop_regex": ([],),
    # other spellings of structured_outputs
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "regex": (),
    "ebnf": (),
    "grammar": (),
    "json_schema": (),
    # other inputs and models
    "prompt_embeds": (),
    "lora_path": (),
    "documents": ([],),
}


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {**SAMPLING_NEUTRAL, "suffix": ("",)}

    prompt: str | TokenIds | Texts | TokenIdLists
    max_tokens: LimitOrZero | None = None
    max_completion_tokens: LimitOrZero | None = None
    best_of: Limit | None = None
    echo: bool | None = None
    logprobs: LimitOrZero | None = None
    suffix: str | None = None


class TextPart(BaseModel):
    """A piece of a message's content. Only text is taken."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    type: str
    text: str | None = None


class ChatMessage(Part):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


class TemplateOptions(ClosedPart):
    """What a request may tell the chat template. Templates themselves are never taken from requests."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Annotated[str, StringConstraints(pattern="^[a-z]{1,16}$")] | None = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **SAMPLING_NEUTRAL,
        "best_of": (1,),
        "echo": (False,),
        "tool_choice": ("none",),
        "functions": ([],),
        "function_call": ("none",),
        "chat_template": (),
        "reasoning_effort": (),
        "include_reasoning": (True,),
        "separate_reasoning": (False,),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "store": (False,),
        "service_tier": ("auto", "default"),
    }

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    logprobs: bool | None = None
    top_logprobs: LimitOrZero | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def unknown_fields(self) -> Iterator[str]:
        """See the base class; a field of a message that holds nothing is not mentioned."""
        yield from super().unknown_fields()
        for message in self.messages:
            yield from (f"messages.{name}" for name, value in (message.model_extra or {}).items() if value)


class TokenizeBody(RequestBody):
    """POST /tokenize: a prompt, or a conversation."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(RequestBody):
    """POST /detokenize."""

    tokens: TokenIds

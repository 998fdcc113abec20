"""What messages are made of: checked numbers and lists, and the parts that a message holds.

Knows nothing of links and of which message is sent when; that is `protocol.messages`.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MAX_PROMPT_TOKENS = 1 << 20
MAX_DRAFT_TOKENS = 64
MAX_STOP_TOKENS = 1024
MAX_BIASED_TOKENS = 1024
MAX_LOGPROBS = 20
MAX_LOGPROB_ENTRIES = 256
MAX_GRAMMAR_CHARACTERS = 64 << 10
MAX_GRAMMAR_CHOICES = 1024
MAX_CHOICE_CHARACTERS = 1024
MAX_LAYERS = 256
MAX_NAME_CHARACTERS = 512
MAX_TEXT_CHARACTERS = 2000
LOWEST_LOGPROB = -9999.0


def _shorten(value: object) -> object:
    """Cut free text to what the wire takes: the report of an error must not fail for being long or badly encoded."""
    if not isinstance(value, str):
        return value
    return value[:MAX_TEXT_CHARACTERS].encode("utf-8", "replace").decode("utf-8")


TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
PositiveCount = Annotated[int, Field(ge=1, lt=1 << 63)]
Seconds = Annotated[float, Field(ge=0.0)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
Text = Annotated[str, BeforeValidator(_shorten)]
PromptTokens = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True)]
StopTokens = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)]
DraftTokens = Annotated[list[TokenId], Field(max_length=MAX_DRAFT_TOKENS, fail_fast=True)]
CommittedTokens = Annotated[list[TokenId], Field(max_length=MAX_DRAFT_TOKENS + 1, fail_fast=True)]
LayerIndices = Annotated[list[Annotated[int, Field(ge=0, lt=MAX_LAYERS)]], Field(max_length=MAX_LAYERS, fail_fast=True)]
Logprob = Annotated[float, Field(ge=LOWEST_LOGPROB, le=0.0)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
Choice = Annotated[str, Field(min_length=1, max_length=MAX_CHOICE_CHARACTERS)]


class WireModel(BaseModel):
    """Strict, frozen, closed: no coercion, no unknown field, no NaN or infinity."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class LogitBias(WireModel):
    """Added to the logit of one token before any penalty and before the temperature."""

    token_id: TokenId
    bias: Annotated[float, Field(ge=-100.0, le=100.0)]


class SamplingFields(WireModel):
    """How the target's distribution is processed and drawn from.

    Off are: `top_k` 0, `top_p` 1, `min_p` 0, `presence_penalty` and `frequency_penalty` 0, `repetition_penalty` 1, no
    `logit_bias`. Presence and frequency count generated tokens, repetition those of the prompt too. A token that
    `logit_bias` names twice gets the sum.
    """

    temperature: Annotated[float, Field(ge=0.0)]
    top_k: Count
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]
    min_p: Annotated[float, Field(ge=0.0, le=1.0)]
    seed: Count
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0)] = 1.0
    logit_bias: Annotated[list[LogitBias], Field(max_length=MAX_BIASED_TOKENS, fail_fast=True)] = []


class JsonSchemaGrammar(WireModel):
    """The text is a JSON value that fits a JSON schema, itself given as JSON text."""

    kind: Literal["json_schema"] = "json_schema"
    schema_text: GrammarText


class JsonObjectGrammar(WireModel):
    """The text is any JSON object."""

    kind: Literal["json_object"] = "json_object"


class RegexGrammar(WireModel):
    """The whole text matches a regular expression: Rust's regex syntax, without look-around and back-references."""

    kind: Literal["regex"] = "regex"
    pattern: GrammarText


class LarkGrammar(WireModel):
    """The text is a word of a context-free grammar in llguidance's variant of Lark."""

    kind: Literal["lark"] = "lark"
    grammar_text: GrammarText


class ChoiceGrammar(WireModel):
    """The text is one of these."""

    kind: Literal["choice"] = "choice"
    choices: Annotated[list[Choice], Field(min_length=1, max_length=MAX_GRAMMAR_CHOICES, fail_fast=True)]


Grammar = Annotated[
    JsonSchemaGrammar | JsonObjectGrammar | RegexGrammar | LarkGrammar | ChoiceGrammar, Field(discriminator="kind")
]


class TopLogprob(WireModel):
    """One of the likeliest tokens at a position."""

    token_id: TokenId
    logprob: Logprob


class TokenLogprobs(WireModel):
    """What the target says of the token at one position, and of the `top` likeliest there, best first.

    Raw values: log_softmax of the target's logits before grammar, `min_tokens`, bias, penalties, temperature and
    filters (vLLM's `raw_logprobs`). `rank` is 1 + the number of likelier tokens, so `top` need not hold the token
    itself. `top` has as many entries as were asked for, fewer only for a smaller vocabulary; equals stand in the order
    of their ids. A token of probability 0 gets `LOWEST_LOGPROB`.
    """

    token_id: TokenId
    logprob: Logprob
    rank: PositiveCount
    top: Annotated[list[TopLogprob], Field(max_length=MAX_LOGPROBS, fail_fast=True)]

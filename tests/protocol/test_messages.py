"""The messages: every one survives the wire, and none accepts what the protocol forbids."""

import math
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from protocol.fields import (
    MAX_CHOICE_CHARACTERS,
    MAX_DRAFT_TOKENS,
    MAX_GRAMMAR_CHARACTERS,
    MAX_GRAMMAR_CHOICES,
    MAX_LOGPROB_ENTRIES,
    MAX_LOGPROBS,
    MAX_TEXT_CHARACTERS,
    ChoiceGrammar,
    Grammar,
    JsonObjectGrammar,
    JsonSchemaGrammar,
    LarkGrammar,
    LogitBias,
    RegexGrammar,
    SamplingFields,
    TokenLogprobs,
    TopLogprob,
)
from protocol.frames import Envelope, TensorFrame, decode, encode
from protocol.messages import (
    CONTROL_MESSAGES,
    FRONTEND_MESSAGES,
    PEER_MESSAGES,
    Abort,
    Block,
    CacheEntry,
    CachePush,
    CloseSequence,
    ContextRows,
    ControlMessage,
    Desynchronised,
    DrafterReady,
    DrafterRejected,
    DrafterStatus,
    Failed,
    Finished,
    FrontendMessage,
    OpenSequence,
    OutcomeRows,
    PeerAccepted,
    PeerHello,
    PeerMessage,
    PeerRejected,
    PhaseTiming,
    PromptLogprobs,
    RoundResult,
    Stop,
    Submit,
    VerifierReady,
    VerifierStatus,
    WireMessage,
)

RUN_ID = "0123456789abcdef" * 2
SAMPLING = SamplingFields(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, seed=(1 << 63) - 1)
CONTROLLED = SamplingFields(
    temperature=0.7,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=1,
    presence_penalty=-2.0,
    frequency_penalty=2.0,
    repetition_penalty=1.3,
    logit_bias=[LogitBias(token_id=5, bias=-100.0), LogitBias(token_id=6, bias=0.5)],
)
GRAMMARS: list[Grammar] = [
    JsonSchemaGrammar(schema_text='{"type": "object"}'),
    JsonObjectGrammar(),
    RegexGrammar(pattern="[a-z]+"),
    LarkGrammar(grammar_text='start: "a" | "b"'),
    ChoiceGrammar(choices=["yes", "no"]),
]
ENTRY = TokenLogprobs(token_id=3, logprob=-0.25, rank=1, top=[TopLogprob(token_id=3, logprob=-0.25)])
SUBMIT = Submit(
    sequence_id=7,
    prompt_token_ids=[0, 1, (1 << 31) - 1],
    max_tokens=16,
    sampling=SAMPLING,
    stop_token_ids=[2],
    min_tokens=1,
    speculative=True,
)
ROUND_RESULT = RoundResult(
    sequence_id=7,
    round=3,
    token_ids=[],
    num_drafts=8,
    num_accepted=5,
    outcome="late_hit",
    verify_s=0.031,
    exposed_s=0.0,
    num_cached=4,
    cache_version=2,
)
PROMPT_LOGPROBS = PromptLogprobs(sequence_id=7, start=1, entries=[ENTRY, ENTRY])
FRONTEND_EXAMPLES: list[WireMessage] = [
    SUBMIT,
    Abort(sequence_id=7),
    Stop(),
    VerifierReady(
        pid=12,
        model_name="demo",
        vocab_size=49152,
        max_model_len=2048,
        num_draft_tokens=8,
        dtype="bfloat16",
        num_layers=30,
        autoregressive_rows=2,
    ),
    ROUND_RESULT,
    PROMPT_LOGPROBS,
    Finished(
        sequence_id=7,
        reason="stop",
        stop_token_id=2,
        num_prompt_tokens=3,
        num_generated_tokens=6,
        queue_s=0.1,
        prefill_s=0.2,
        decode_s=0.3,
    ),
    Failed(sequence_id=7, code="invalid_request", message="no such token", parameter="logit_bias"),
    VerifierStatus(
        num_running=1,
        num_waiting=0,
        kv_tokens_used=5,
        kv_tokens_total=10,
        num_rounds=99,
        stale_messages=0,
        drafter_connected=False,
    ),
    DrafterRejected(reason="another target"),
]
PEER_EXAMPLES: list[WireMessage] = [
    PeerHello(
        role="drafter",
        pid=13,
        protocol_version=1,
        target_fingerprint="ab" * 32,
        vocab_size=49152,
        hidden_size=576,
        tap_layers=[1, 13, 25],
        decoder_layers=[26, 27],
        num_draft_tokens=8,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=4,
    ),
    PeerAccepted(),
    PeerRejected(reason="vocab_size differs"),
    OpenSequence(sequence_id=7, slot=0, prompt_token_ids=[5, 6], stop_token_ids=[]),
    ContextRows(sequence_id=7, start=0, num_rows=2),
    OutcomeRows(sequence_id=7, round=3, start=4, drafts=[], num_accepted=0, anchor=9, next_drafts=None, awaiting=True),
    CloseSequence(sequence_id=7),
    CachePush(
        sequence_id=7, round=4, version=1, entries=[CacheEntry(num_accepted=1, anchor=3, drafts=[4, 5]) for _ in "ab"]
    ),
    Block(sequence_id=7, round=4, anchor=9, drafts=[1, 2, 3], source="fallback"),
    Desynchronised(sequence_id=7, reason="rows are missing"),
]
CONTROL_EXAMPLES: list[WireMessage] = [
    DrafterReady(pid=13, plan_passes=1, plan_refreshes=1, cache_size=4),
    DrafterStatus(num_sequences=1, stale_messages=2, phases=[PhaseTiming(phase="foresight", count=3, total_s=0.5)]),
    Stop(),
]
LINKS: list[tuple[TypeAdapter[Any], list[WireMessage], Any]] = [
    (FRONTEND_MESSAGES, FRONTEND_EXAMPLES, FrontendMessage),
    (PEER_MESSAGES, PEER_EXAMPLES, PeerMessage),
    (CONTROL_MESSAGES, CONTROL_EXAMPLES, ControlMessage),
]
EVERY_MESSAGE = [
    pytest.param(adapter, message, id=f"{type(message).__name__}-{link}")
    for link, (adapter, examples, _) in enumerate(LINKS)
    for message in examples
]


def frames_for(message: WireMessage) -> list[TensorFrame]:
    """Frames as the message announces them, no two alike."""
    num_rows = message.num_frame_rows or 0
    return [
        TensorFrame("bfloat16", (num_rows, width), bytes(range(2 * num_rows * width)))
        for width in range(1, message.num_frames + 1)
    ]


@pytest.mark.parametrize(("adapter", "message"), EVERY_MESSAGE)
def test_every_message_survives_the_wire(adapter: TypeAdapter[Any], message: WireMessage) -> None:
    frames = frames_for(message)
    received = decode(encode(Envelope(RUN_ID, message), frames), adapter)
    assert received.message == message
    assert type(received.message) is type(message)
    assert received.run_id == RUN_ID
    assert [(frame.dtype, frame.shape, bytes(frame.data)) for frame in received.frames] == [
        (frame.dtype, frame.shape, bytes(frame.data)) for frame in frames
    ]


@pytest.mark.parametrize(("examples", "union"), [(examples, union) for _, examples, union in LINKS])
def test_the_examples_cover_their_union(examples: list[WireMessage], union: Any) -> None:
    assert {type(example) for example in examples} == set(get_args(get_args(union)[0]))


@pytest.mark.parametrize(("adapter", "message"), EVERY_MESSAGE)
def test_an_unknown_field_is_refused(adapter: TypeAdapter[Any], message: WireMessage) -> None:
    with pytest.raises(ValidationError, match="extra_forbidden"):
        adapter.validate_python({**message.model_dump(), "command": 1})


@pytest.mark.parametrize(("adapter", "message"), EVERY_MESSAGE)
def test_no_field_is_coerced_from_text(adapter: TypeAdapter[Any], message: WireMessage) -> None:
    fields = message.model_dump()
    for name, value in fields.items():
        if name != "kind" and not isinstance(value, str):
            with pytest.raises(ValidationError):
                adapter.validate_python({**fields, name: str(value)})


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (SUBMIT, "prompt_token_ids", []),
        (SUBMIT, "prompt_token_ids", [1, -1]),
        (SUBMIT, "prompt_token_ids", [1 << 31]),
        (SUBMIT, "prompt_token_ids", [True]),
        (SUBMIT, "max_tokens", 0),
        (SUBMIT, "sequence_id", -1),
        (SUBMIT, "sampling", {**SAMPLING.model_dump(), "temperature": math.inf}),
        (SUBMIT, "sampling", {**SAMPLING.model_dump(), "temperature": -0.1}),
        (SUBMIT, "sampling", {**SAMPLING.model_dump(), "top_p": 0.0}),
        (SUBMIT, "sampling", {**SAMPLING.model_dump(), "top_p": math.nan}),
        (SUBMIT, "sampling", {**SAMPLING.model_dump(), "min_p": 1.5}),
        (SUBMIT, "sampling", {**SAMPLING.model_dump(), "seed": 1 << 63}),
        (SUBMIT, "sampling", {**SAMPLING.model_dump(), "presence_penalty": 2.1}),
        (SUBMIT, "sampling", {**SAMPLING.model_dump(), "frequency_penalty": -2.1}),
        (SUBMIT, "sampling", {**SAMPLING.model_dump(), "repetition_penalty": 0.0}),
        (SUBMIT, "sampling", {**SAMPLING.model_dump(), "logit_bias": [{"token_id": -1, "bias": 0.0}]}),
        (SUBMIT, "sampling", {**SAMPLING.model_dump(), "logit_bias": [{"token_id": 1, "bias": 100.5}]}),
        (SUBMIT, "sampling", {**SAMPLING.model_dump(), "logit_bias": [{"token_id": 1, "bias": 1.0}] * 1025}),
        (SUBMIT, "num_logprobs", MAX_LOGPROBS + 1),
        (SUBMIT, "num_prompt_logprobs", -1),
        (SUBMIT, "grammar", "{}"),
        (SUBMIT, "grammar", {"kind": "ebnf", "grammar_text": "x"}),
        (SUBMIT, "grammar", {"kind": "json_schema"}),
        (SUBMIT, "grammar", {"kind": "regex", "pattern": ""}),
        (SUBMIT, "grammar", {"kind": "regex", "pattern": "x" * (MAX_GRAMMAR_CHARACTERS + 1)}),
        (SUBMIT, "grammar", {"kind": "choice", "choices": []}),
        (ROUND_RESULT, "round", -1),
        (ROUND_RESULT, "round", 1.0),
        (ROUND_RESULT, "outcome", "lucky"),
        (ROUND_RESULT, "verify_s", math.nan),
        (ROUND_RESULT, "verify_s", -1.0),
        (ROUND_RESULT, "token_ids", [0] * (MAX_DRAFT_TOKENS + 2)),
        (ROUND_RESULT, "logprobs", [{**ENTRY.model_dump(), "logprob": 0.1}]),
        (ROUND_RESULT, "logprobs", [{**ENTRY.model_dump(), "logprob": -math.inf}]),
        (ROUND_RESULT, "logprobs", [{**ENTRY.model_dump(), "rank": 0}]),
        (ROUND_RESULT, "logprobs", [{**ENTRY.model_dump(), "top": ENTRY.model_dump()["top"] * (MAX_LOGPROBS + 1)}]),
        (PROMPT_LOGPROBS, "start", 0),
        (PROMPT_LOGPROBS, "entries", []),
        (PROMPT_LOGPROBS, "entries", [ENTRY.model_dump()] * (MAX_LOGPROB_ENTRIES + 1)),
    ],
)
def test_a_value_out_of_range_is_refused(message: WireMessage, field: str, value: object) -> None:
    fields = message.model_dump()
    FRONTEND_MESSAGES.validate_python(fields)
    with pytest.raises(ValidationError):
        FRONTEND_MESSAGES.validate_python({**fields, field: value})


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_every_grammar_and_every_control_survives_the_wire(grammar: Grammar) -> None:
    message = SUBMIT.model_copy(
        update={"sampling": CONTROLLED, "grammar": grammar, "num_logprobs": 0, "num_prompt_logprobs": MAX_LOGPROBS}
    )
    assert decode(encode(Envelope(RUN_ID, message)), FRONTEND_MESSAGES).message == message


@pytest.mark.parametrize(
    "grammar",
    [
        RegexGrammar(pattern="\U0001f642" * MAX_GRAMMAR_CHARACTERS),
        ChoiceGrammar(choices=["\U0001f642" * MAX_CHOICE_CHARACTERS] * MAX_GRAMMAR_CHOICES),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_the_longest_grammar_fits_the_wire(grammar: Grammar) -> None:
    message = SUBMIT.model_copy(update={"grammar": grammar})
    assert decode(encode(Envelope(RUN_ID, message)), FRONTEND_MESSAGES).message == message


def test_the_most_logprobs_fit_the_wire() -> None:
    entry = ENTRY.model_copy(update={"top": ENTRY.top * MAX_LOGPROBS})
    rounds = ROUND_RESULT.model_copy(update={"logprobs": [entry] * (MAX_DRAFT_TOKENS + 1)})
    prompt = PROMPT_LOGPROBS.model_copy(update={"entries": [entry] * MAX_LOGPROB_ENTRIES})
    for message in (rounds, prompt):
        assert decode(encode(Envelope(RUN_ID, message)), FRONTEND_MESSAGES).message == message


def test_a_message_of_another_link_is_refused() -> None:
    with pytest.raises(ValidationError, match="union_tag_invalid"):
        PEER_MESSAGES.validate_python(SUBMIT.model_dump())


def test_whole_numbers_are_taken_for_fractions() -> None:
    fields = {**SAMPLING.model_dump(), "temperature": 1}
    assert SamplingFields.model_validate(fields).temperature == 1.0


def test_a_report_of_an_error_never_fails_itself() -> None:
    message = Failed(sequence_id=1, code="internal_error", message="\ud800" + "x" * 10 * MAX_TEXT_CHARACTERS)
    assert len(message.message) == MAX_TEXT_CHARACTERS
    assert decode(encode(Envelope(RUN_ID, message)), FRONTEND_MESSAGES).message == message


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Abort(sequence_id=1).sequence_id = 2  # type: ignore[misc]

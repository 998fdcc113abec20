"""The messages of the three links, as frozen models that check every field on construction and on receipt.

One union a link: `FrontendMessage` (server and verifier), `PeerMessage` (verifier and drafter), `ControlMessage`
(server and drafter). Knows nothing of bytes and sockets; tensors travel beside a message as frames (`protocol.frames`),
and a message class says only how many frames it has and how many rows they hold.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, TypeAdapter

from protocol.fields import (
    MAX_DRAFT_TOKENS,
    MAX_LOGPROB_ENTRIES,
    CommittedTokens,
    Count,
    DraftTokens,
    Grammar,
    LayerIndices,
    Name,
    NumLogprobs,
    PositiveCount,
    PromptTokens,
    Seconds,
    StopTokens,
    Text,
    TokenId,
    TokenLogprobs,
)
from protocol.fields import SamplingFields as SamplingFields
from protocol.fields import WireModel as WireModel

PROTOCOL_VERSION = 2

MAX_CACHE_ENTRIES = 1024
MAX_PHASES = 16
MAX_ROWS = 1 << 20


class WireMessage(WireModel):
    """Base of everything that is sent. Subclasses add a `kind` tag, unique within their link."""

    num_frames: ClassVar[int] = 0
    """How many tensor frames travel with the message, always."""
    any_version: ClassVar[bool] = False
    """Whether the message is read whatever the sender's protocol version, so that a refusal can give its reason."""

    @property
    def num_frame_rows(self) -> int | None:
        """Leading dimension that every frame of this message must have, or None where there are no frames."""
        return None


# --- frontend link, server to verifier


class Submit(WireMessage):
    """Start a sequence.

    `num_logprobs` asks for the log-probability of every generated token and of that many likeliest ones beside it,
    None for neither; `num_prompt_logprobs` the same for the prompt. With a `grammar` the text is one of the grammar's,
    or the beginning of one where `max_tokens`, or a stop token that is text, cuts it. A request that cannot be served
    ends in `Failed`.
    """

    kind: Literal["submit"] = "submit"
    sequence_id: Count
    prompt_token_ids: PromptTokens
    max_tokens: PositiveCount
    sampling: SamplingFields
    stop_token_ids: StopTokens
    min_tokens: Count = 0
    speculative: bool
    num_logprobs: NumLogprobs | None = None
    num_prompt_logprobs: NumLogprobs | None = None
    grammar: Grammar | None = None


class Abort(WireMessage):
    """End a sequence early; the verifier answers with `Finished` unless the sequence has ended already."""

    kind: Literal["abort"] = "abort"
    sequence_id: Count


class Stop(WireMessage):
    """End the worker at once, with exit status 0. Also on the control link."""

    kind: Literal["stop"] = "stop"


# --- frontend link, verifier to server


class VerifierReady(WireMessage):
    """The target is loaded and the verifier takes sequences."""

    kind: Literal["verifier_ready"] = "verifier_ready"
    pid: PositiveCount
    model_name: Name
    vocab_size: PositiveCount
    max_model_len: PositiveCount
    num_draft_tokens: Count
    dtype: Name
    num_layers: PositiveCount
    autoregressive_rows: PositiveCount


RoundOutcome = Literal["prefill", "hit", "late_hit", "miss", "autoregressive"]
AloneReason = Literal["switched_off", "no_drafter", "drafter_lost", "gave_up", "timeout"]
"""Why a sequence has no drafter: asked for by the request, none there when it started, lost since, the drafter lost
track of the sequence, or did not answer in time."""


class RoundResult(WireMessage):
    """What one round of one sequence committed, and how.

    `token_ids` is after the cut at a stop token or at `max_tokens`, and may be empty. `num_accepted` counts the drafts
    that were right up to an end of the text, the bonus token then, but knows no `max_tokens`.
    `exposed_s` runs from the end of the verification before to the start of this one, 0.0 for a prefill. `num_cached`
    counts the entries of the speculation cache at look-up. `logprobs` has one entry for each of `token_ids`, or is None
    where none were asked for.

    Times of the block that was verified, each measured within one process, None where they do not apply: `draft_s`,
    what the drafter took for the cache in which the block was looked up; `fallback_s`, what it took for a fallback
    block; `transport_s`, what the verifier waited for a block beyond the drafter's own time. `queue_s`, of a prefill:
    what the sequence had waited for a slot.
    """

    kind: Literal["round_result"] = "round_result"
    sequence_id: Count
    round: Count
    token_ids: CommittedTokens
    num_drafts: Count
    num_accepted: Count
    outcome: RoundOutcome
    verify_s: Seconds
    exposed_s: Seconds
    num_cached: Count
    cache_version: Count
    draft_s: Seconds | None = None
    fallback_s: Seconds | None = None
    transport_s: Seconds | None = None
    queue_s: Seconds | None = None
    alone_because: AloneReason | None = None
    logprobs: Annotated[list[TokenLogprobs], Field(max_length=MAX_DRAFT_TOKENS + 1, fail_fast=True)] | None = None


class PromptLogprobs(WireMessage):
    """Log-probabilities of the prompt tokens at the positions start .. start + len(entries) - 1.

    Sent in order and without gaps while the prompt is read, all before the first `RoundResult`. The first starts at 1:
    nothing comes before the prompt's first token.
    """

    kind: Literal["prompt_logprobs"] = "prompt_logprobs"
    sequence_id: Count
    start: PositiveCount
    entries: Annotated[list[TokenLogprobs], Field(min_length=1, max_length=MAX_LOGPROB_ENTRIES, fail_fast=True)]


class Finished(WireMessage):
    """A sequence ended as asked; nothing more about it follows."""

    kind: Literal["finished"] = "finished"
    sequence_id: Count
    reason: Literal["stop", "length", "abort"]
    stop_token_id: TokenId | None
    num_prompt_tokens: Count
    num_generated_tokens: Count
    queue_s: Seconds
    prefill_s: Seconds
    decode_s: Seconds


class Failed(WireMessage):
    """A sequence could not be started or continued; nothing more about it follows.

    `invalid_request` is a fault of the request (a token id outside the vocabulary, a grammar that cannot be compiled);
    `parameter` is then the field of `Submit` or of `SamplingFields` that it lies in.
    """

    kind: Literal["failed"] = "failed"
    sequence_id: Count
    code: Literal["context_length_exceeded", "invalid_request", "internal_error", "overloaded"]
    message: Text
    parameter: Name | None = None


class VerifierStatus(WireMessage):
    """Heartbeat of the verifier; `num_rounds` only grows and shows that work goes forward."""

    kind: Literal["verifier_status"] = "verifier_status"
    num_running: Count
    num_waiting: Count
    kv_tokens_used: Count
    kv_tokens_total: Count
    num_rounds: Count
    stale_messages: Count
    drafter_connected: bool
    num_cache_entries: Count = 0


class DrafterRejected(WireMessage):
    """The drafter does not fit the verifier: restarting it cannot help."""

    kind: Literal["drafter_rejected"] = "drafter_rejected"
    reason: Text


# --- peer link, both ways


class PeerHello(WireMessage):
    """First message of either side; the verifier compares the two and answers `PeerAccepted` or `PeerRejected`."""

    any_version: ClassVar[bool] = True
    kind: Literal["peer_hello"] = "peer_hello"
    role: Literal["verifier", "drafter"]
    pid: PositiveCount
    protocol_version: Count
    target_fingerprint: Name
    vocab_size: PositiveCount
    hidden_size: PositiveCount
    tap_layers: LayerIndices
    decoder_layers: LayerIndices
    num_draft_tokens: Count
    dtype: Name
    max_model_len: PositiveCount
    max_num_seqs: PositiveCount


# --- peer link, verifier to drafter


class PeerAccepted(WireMessage):
    """The handshake succeeded."""

    kind: Literal["peer_accepted"] = "peer_accepted"


class PeerRejected(WireMessage):
    """The handshake failed; the drafter ends."""

    any_version: ClassVar[bool] = True
    kind: Literal["peer_rejected"] = "peer_rejected"
    reason: Text


class OpenSequence(WireMessage):
    """A new sequence, to be kept in `slot`; its context rows follow."""

    kind: Literal["open_sequence"] = "open_sequence"
    sequence_id: Count
    slot: Count
    prompt_token_ids: PromptTokens
    stop_token_ids: StopTokens


class ContextRows(WireMessage):
    """True target states of the positions start .. start + num_rows - 1.

    Frames: taps [num_rows, num_taps, hidden], decoder_kv [num_rows, num_decoder_layers, 2, kv_heads, head_dim].
    """

    num_frames: ClassVar[int] = 2
    kind: Literal["context_rows"] = "context_rows"
    sequence_id: Count
    start: Count
    num_rows: Annotated[int, Field(ge=1, le=MAX_ROWS)]

    @property
    def num_frame_rows(self) -> int:
        return self.num_rows


class OutcomeRows(WireMessage):
    """How a verification ended, with the true states of the anchor and of the accepted drafts.

    `start` is the position of the verified anchor, `drafts` what was verified, `anchor` the bonus token. `next_drafts`
    is the block already started from the cache; `awaiting` says that the verifier waits for a `Block` instead.
    Frames: as for `ContextRows`, with num_accepted + 1 rows.
    """

    num_frames: ClassVar[int] = 2
    kind: Literal["outcome_rows"] = "outcome_rows"
    sequence_id: Count
    round: Count
    start: Count
    drafts: DraftTokens
    num_accepted: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)]
    anchor: TokenId
    next_drafts: DraftTokens | None
    awaiting: bool

    @property
    def num_frame_rows(self) -> int:
        return self.num_accepted + 1


class CloseSequence(WireMessage):
    """A sequence ended; its slot is free."""

    kind: Literal["close_sequence"] = "close_sequence"
    sequence_id: Count


# --- peer link, drafter to verifier


class CacheEntry(WireModel):
    """One block of the speculation cache: the drafts to verify next if the outcome is (num_accepted, anchor)."""

    num_accepted: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)]
    anchor: TokenId
    drafts: DraftTokens


class CachePush(WireMessage):
    """The speculation cache for the outcomes of `round`, the round under verification; a higher version replaces it.

    `drafting_s` runs from the start of the drafter's work on the round.
    """

    kind: Literal["cache_push"] = "cache_push"
    sequence_id: Count
    round: Count
    version: Count
    entries: Annotated[list[CacheEntry], Field(max_length=MAX_CACHE_ENTRIES, fail_fast=True)]
    drafting_s: Seconds = 0.0


class Block(WireMessage):
    """The block the verifier waits for; `round` is the round of the verification it is for.

    `drafting_s` runs from the arrival of the outcome to the sending of the block.
    """

    kind: Literal["block"] = "block"
    sequence_id: Count
    round: Count
    anchor: TokenId
    drafts: DraftTokens
    source: Literal["late_hit", "fallback"]
    drafting_s: Seconds = 0.0


class Desynchronised(WireMessage):
    """The drafter lost track of a sequence and drafts nothing more for it."""

    kind: Literal["desynchronised"] = "desynchronised"
    sequence_id: Count
    reason: Text


# --- control link, drafter to server


class DrafterReady(WireMessage):
    """The drafter is loaded and accepted by the verifier."""

    kind: Literal["drafter_ready"] = "drafter_ready"
    pid: PositiveCount
    plan_passes: Count
    plan_refreshes: Count
    cache_size: Count


class PhaseTiming(WireModel):
    """Time spent in one phase of drafting since the start of the drafter."""

    phase: Literal["install", "foresight", "draft", "refresh", "refine", "push"]
    count: Count
    total_s: Seconds


class DrafterStatus(WireMessage):
    """Heartbeat of the drafter."""

    kind: Literal["drafter_status"] = "drafter_status"
    num_sequences: Count
    stale_messages: Count
    phases: Annotated[list[PhaseTiming], Field(max_length=MAX_PHASES, fail_fast=True)]


FrontendMessage = Annotated[
    Submit
    | Abort
    | Stop
    | VerifierReady
    | RoundResult
    | PromptLogprobs
    | Finished
    | Failed
    | VerifierStatus
    | DrafterRejected,
    Field(discriminator="kind"),
]
PeerMessage = Annotated[
    PeerHello
    | PeerAccepted
    | PeerRejected
    | OpenSequence
    | ContextRows
    | OutcomeRows
    | CloseSequence
    | CachePush
    | Block
    | Desynchronised,
    Field(discriminator="kind"),
]
ControlMessage = Annotated[DrafterReady | DrafterStatus | Stop, Field(discriminator="kind")]

FRONTEND_MESSAGES: TypeAdapter[FrontendMessage] = TypeAdapter(FrontendMessage)
PEER_MESSAGES: TypeAdapter[PeerMessage] = TypeAdapter(PeerMessage)
CONTROL_MESSAGES: TypeAdapter[ControlMessage] = TypeAdapter(ControlMessage)

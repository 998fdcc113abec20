"""The drafter's loop: receive, schedule, draft one phase, report.

Sequences share the worker phase by phase: whoever waits for a block goes first, then the sequence that is least far.
It can be restarted at any time: everything it knows comes from the verifier's messages. How a block is drafted is the
method's business.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from draft_worker.block import DraftBlock, unknown_block
from draft_worker.inbox import OutcomeArrival, OutcomeInbox
from draft_worker.methods import DraftMethod, MethodSequence, OpenedSequence, Round
from draft_worker.timing import PHASES, PhaseClock, shown_phase
from modeling.tensors import from_bytes
from protocol.channel import Channel, wait_any
from protocol.frames import Received, TensorFrame
from protocol.messages import (
    Block,
    CacheEntry,
    CachePush,
    CloseSequence,
    ContextRows,
    ControlMessage,
    Desynchronised,
    DrafterReady,
    DrafterStatus,
    OpenSequence,
    OutcomeRows,
    PeerAccepted,
    PeerHello,
    PeerMessage,
    PeerRejected,
    PhaseTiming,
    Stop,
)
from protocol.trace import NO_TRACE, Trace

logger = logging.getLogger("jetspec.drafter")

IDLE_WAIT_S = 0.05
STATUS_INTERVAL_S = 0.5
HELLO_INTERVAL_S = 0.5
HELLO_AGAIN_S = 2.0


class DrafterRefused(RuntimeError):
    """The verifier rejected the handshake; the message says what differs."""


@dataclass(frozen=True)
class DrafterLimits:
    """Sizes both workers agreed on. Positions hold the longest sequence plus the blocks that may reach beyond it."""

    num_draft_tokens: int
    max_model_len: int
    max_num_seqs: int

    @property
    def num_positions(self) -> int:
        return self.max_model_len + 2 * (self.num_draft_tokens + 1)


@dataclass
class DraftedSequence:
    """One sequence and the round it is in. `remembered`: confidences of the blocks the verifier may start."""

    sequence_id: int
    slot: int
    sequence: MethodSequence
    inbox: OutcomeInbox = field(default_factory=OutcomeInbox)
    round: Round | None = None
    steps: Iterator[str] | None = None
    next_phase: str | None = None
    num_steps: int = 0
    round_began_at: float = 0.0
    block_started_at: float | None = None
    remembered: dict[tuple[int, ...], DraftBlock] = field(default_factory=dict)


class DraftWorker:
    """Drafts for all sequences the verifier opens. Channels are given; `control` may be None (tests, evaluation)."""

    def __init__(
        self,
        method: DraftMethod,
        limits: DrafterLimits,
        hello: PeerHello,
        peer: Channel[PeerMessage],
        control: Channel[ControlMessage] | None,
        trace: Trace = NO_TRACE,
    ) -> None:
        self._method = method
        self._limits = limits
        self._hello = hello
        self._peer = peer
        self._control = control
        self._sequences: dict[int, DraftedSequence] = {}
        self._clock = PhaseClock(trace)
        self._is_accepted = False
        self._is_announced = False
        self._is_stopping = False
        self._num_stale = 0
        self._reported_at = 0.0
        self._hello_at = float("-inf")

    def run(self) -> None:
        """Work until told to stop. Raises `DrafterRefused` when the verifier does not take this drafter."""
        while not self._is_stopping:
            self._greet()
            self._receive()
            self._announce()
            work = self._schedule()
            if work is None:
                wait_any([channel for channel in (self._peer, self._control) if channel is not None], IDLE_WAIT_S)
            else:
                self._advance(work)
            self._report()

    def stop(self) -> None:
        """End `run` after the current phase."""
        self._is_stopping = True

    # --- receiving

    def _greet(self) -> None:
        """Say hello until accepted, and now and then after: a verifier that lost sight of this drafter takes it
        back."""
        now = time.monotonic()
        if now - self._hello_at > (HELLO_AGAIN_S if self._is_accepted else HELLO_INTERVAL_S):
            self._hello_at = now
            self._peer.send(self._hello)

    def _receive(self) -> None:
        """Take in everything that has arrived, without waiting."""
        while self._control is not None and (command := self._control.receive(0.0)) is not None:
            if isinstance(command.message, Stop):
                self._is_stopping = True
        while (received := self._peer.receive(0.0)) is not None:
            self._take(received)
        for state in list(self._sequences.values()):
            while (arrival := state.inbox.take()) is not None:
                self._absorb(state, arrival)
            if state.inbox.is_lost:
                self._give_up(state, "an outcome is missing")

    def _take(self, received: Received[PeerMessage]) -> None:
        match received.message:
            case PeerAccepted():
                self._accept()
            case PeerRejected(reason=reason):
                raise DrafterRefused(reason)
            case OpenSequence() as message:
                self._open(message)
            case ContextRows() as message:
                self._install_context(message, received.frames)
            case OutcomeRows() as message:
                state = self._sequences.get(message.sequence_id)
                if state is None:
                    self._num_stale += 1
                else:
                    state.inbox.put(OutcomeArrival(message, tuple(received.frames), time.perf_counter()))
            case CloseSequence(sequence_id=sequence_id):
                self._forget(sequence_id)
            case _:
                self._num_stale += 1

    def _accept(self) -> None:
        if not self._is_accepted:
            logger.info("accepted; plan: %s", self._method.plan or "none")
        self._is_accepted = True

    def _announce(self) -> None:
        """Tell the server once that there is a drafter; a send before the link stands is refused, so it is repeated."""
        if self._is_announced or not self._is_accepted or self._control is None:
            return
        plan = self._method.plan
        self._is_announced = self._control.send(
            DrafterReady(
                pid=self._hello.pid,
                plan_passes=0 if plan is None else plan.num_passes,
                plan_refreshes=0 if plan is None else plan.num_refreshes,
                cache_size=0 if plan is None else plan.cache_size,
            )
        )

    def _open(self, message: OpenSequence) -> None:
        fits = message.slot < self._limits.max_num_seqs and len(message.prompt_token_ids) <= self._limits.max_model_len
        if not fits or message.sequence_id in self._sequences:
            self._num_stale += 1
            return
        for state in list(self._sequences.values()):
            if state.slot == message.slot:  # its close was lost; two sequences may not write one memory
                self._forget(state.sequence_id)
        opened = OpenedSequence(
            message.sequence_id, message.slot, message.prompt_token_ids, frozenset(message.stop_token_ids)
        )
        self._sequences[message.sequence_id] = DraftedSequence(
            message.sequence_id, message.slot, self._method.open(opened)
        )

    def _install_context(self, message: ContextRows, frames: tuple[TensorFrame, ...] | list[TensorFrame]) -> None:
        state = self._sequences.get(message.sequence_id)
        if state is None:
            self._num_stale += 1
        elif message.start == state.sequence.num_rows and state.inbox.next_round == 0:
            self._install(state, frames)
        elif message.start > state.sequence.num_rows:
            self._give_up(state, "context rows are missing")
        else:
            self._num_stale += 1

    def _install(self, state: DraftedSequence, frames: tuple[TensorFrame, ...] | list[TensorFrame]) -> None:
        device, dtype = self._method.device, self._method.dtype
        taps, decoder_kv = (from_bytes(frame.dtype, frame.shape, frame.data, device).to(dtype) for frame in frames)
        with self._clock.measure("install", sequence=state.sequence_id):
            state.sequence.install(taps, decoder_kv)

    def _absorb(self, state: DraftedSequence, arrival: OutcomeArrival) -> None:
        """A verification ended: answer if the verifier waits, take the true rows over, start on the next block."""
        message, finished = arrival.message, state.round
        if message.start != state.sequence.num_rows or len(message.drafts) < message.num_accepted:
            self._give_up(state, f"rows from {message.start} on do not follow {state.sequence.num_rows}")
            return
        if state.block_started_at is not None:
            busy = max(1, sum(other.round is not None for other in self._sequences.values()))
            self._method.observe_verification((arrival.arrived_at - state.block_started_at) / busy)
        state.round = state.steps = state.next_phase = None
        state.sequence.commit(message.drafts[: message.num_accepted], message.anchor)
        block: DraftBlock | None = None
        was_hit = True
        if message.awaiting:
            block = None if finished is None else self._late_block(message, finished)
            if block is not None:
                self._answer(state, arrival, block, is_late_hit=True)
                self._install(state, arrival.frames)
            else:
                self._install(state, arrival.frames)
                with self._clock.measure("draft", "fallback", sequence=state.sequence_id, round=message.round + 1):
                    block = state.sequence.fallback()
                self._answer(state, arrival, block, is_late_hit=False)
                was_hit = False
            state.block_started_at = time.perf_counter()
        else:
            self._install(state, arrival.frames)
            state.block_started_at = None
            if message.next_drafts is not None:
                drafts = tuple(message.next_drafts)
                block = state.remembered.get(drafts) or unknown_block(drafts)
                state.block_started_at = arrival.arrived_at
        if block is not None and block.token_ids:
            self._begin_round(state, block, was_hit=was_hit)

    def _late_block(self, message: OutcomeRows, finished: Round) -> DraftBlock | None:
        """A finished block for the outcome, or one that needs less than a fallback block."""
        num_accepted, anchor = message.num_accepted, message.anchor
        block = finished.find(num_accepted, anchor)
        if block is not None or not finished.is_begun(num_accepted, anchor):
            return block
        with self._clock.measure("draft", "rest", sequence=message.sequence_id, round=message.round + 1):
            return finished.finish(num_accepted, anchor)

    def _begin_round(self, state: DraftedSequence, block: DraftBlock, *, was_hit: bool) -> None:
        state.round = state.sequence.begin_round(block, was_hit=was_hit)
        if state.round is None:
            return
        state.steps = state.round.steps()
        state.next_phase = next(state.steps, None)
        state.num_steps = 0
        state.round_began_at = time.perf_counter()
        state.remembered = {}

    def _answer(self, state: DraftedSequence, arrival: OutcomeArrival, block: DraftBlock, *, is_late_hit: bool) -> None:
        message = arrival.message
        with self._clock.measure("push", sequence=state.sequence_id):
            self._peer.send(
                Block(
                    sequence_id=state.sequence_id,
                    round=message.round + 1,
                    anchor=message.anchor,
                    drafts=list(block.token_ids),
                    source="late_hit" if is_late_hit else "fallback",
                    drafting_s=time.perf_counter() - arrival.arrived_at,
                )
            )

    def _give_up(self, state: DraftedSequence, reason: str) -> None:
        """Stop drafting for a sequence; the verifier goes on alone."""
        logger.info("sequence %d: %s", state.sequence_id, reason)
        self._forget(state.sequence_id)
        self._peer.send(Desynchronised(sequence_id=state.sequence_id, reason=reason))

    def _forget(self, sequence_id: int) -> None:
        state = self._sequences.pop(sequence_id, None)
        if state is not None:
            self._num_stale += state.inbox.num_stale  # so that the total only grows

    # --- drafting

    def _schedule(self) -> DraftedSequence | None:
        """The sequence whose next phase is the most urgent: the least advanced one, the oldest first."""
        runnable = [state for state in self._sequences.values() if state.next_phase is not None]
        return min(runnable, key=lambda state: (state.num_steps, state.sequence_id), default=None)

    def _advance(self, state: DraftedSequence) -> None:
        """Run one phase and publish what it finished."""
        assert state.steps is not None and state.next_phase is not None and state.round is not None
        version, phase = state.round.version, state.next_phase
        started = time.perf_counter()
        round_number = state.inbox.next_round
        with self._clock.measure(phase, shown_phase(phase, version), sequence=state.sequence_id, round=round_number):
            state.next_phase = next(state.steps, None)
        self._method.observe_phase(phase, time.perf_counter() - started, state.round.plan)
        state.num_steps += 1
        if state.round.version > version:
            self._push(state, state.round)

    def _push(self, state: DraftedSequence, finished: Round) -> None:
        entries = []
        for entry in finished.prepared:
            state.remembered[entry.block.token_ids] = entry.block
            entries.append(
                CacheEntry(num_accepted=entry.num_accepted, anchor=entry.anchor, drafts=list(entry.block.token_ids))
            )
        with self._clock.measure("push", sequence=state.sequence_id):
            self._peer.send(
                CachePush(
                    sequence_id=state.sequence_id,
                    round=state.inbox.next_round,
                    version=finished.version,
                    entries=entries,
                    drafting_s=time.perf_counter() - state.round_began_at,
                )
            )

    def _report(self) -> None:
        now = time.monotonic()
        if self._control is None or now - self._reported_at < STATUS_INTERVAL_S:
            return
        self._reported_at = now
        self._control.send(
            DrafterStatus(
                num_sequences=len(self._sequences),
                stale_messages=self._num_stale
                + self._peer.num_stale
                + self._peer.num_malformed
                + sum(s.inbox.num_stale for s in self._sequences.values()),
                phases=[
                    PhaseTiming(phase=phase, count=self._clock.count[phase], total_s=self._clock.total_s[phase])
                    for phase in PHASES
                ],
            )
        )

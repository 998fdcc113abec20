"""The verifier's loop: receive, admit, prefill one chunk, verify every block that is ready, tell everybody.

The source of truth for every sequence. A lost or silent drafter costs speed only: every wait for it has a limit, then
the sequence goes on autoregressively.
"""

import logging
import os
import time
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from decoding.acceptance import Outcome
from decoding.editing import RowEditor
from decoding.logprobs import TokenReport
from modeling.cache import KeyValueCache
from modeling.target import TargetRunner
from modeling.tensors import DTYPE_NAMES, to_bytes
from protocol.channel import Channel, wait_any
from protocol.fields import MAX_LOGPROB_ENTRIES
from protocol.frames import TensorFrame
from protocol.messages import (
    Abort,
    AloneReason,
    Block,
    CachePush,
    CloseSequence,
    ContextRows,
    Desynchronised,
    DrafterRejected,
    Failed,
    Finished,
    FrontendMessage,
    OpenSequence,
    OutcomeRows,
    PeerAccepted,
    PeerHello,
    PeerMessage,
    PeerRejected,
    PromptLogprobs,
    RoundResult,
    Stop,
    Submit,
    VerifierReady,
    VerifierStatus,
)
from protocol.trace import NO_TRACE, Trace
from verify_worker.grammar import GrammarCompiler
from verify_worker.handshake import difference
from verify_worker.requests import Refused, request_from, wire_logprobs
from verify_worker.sequence import BlockTimes, Request, Sequence, Stage
from verify_worker.tracing import trace_prefill, trace_round
from verify_worker.verifier import Failure, Verdict, Verification, Verifier, guarded, without_drafts
from verify_worker.waiting import Waiting, WaitingLine

logger = logging.getLogger("jetspec.verifier")

IDLE_WAIT_S = 0.05
COMPILING_WAIT_S = 0.002
STATUS_INTERVAL_S = 0.5
MAX_SILENT_WAITS = 3
MAX_ROWS_A_MESSAGE = 64
"""Context rows sent at once: those of a large prefill chunk of a wide target would exceed the wire's limit."""


@dataclass(frozen=True)
class VerifierSettings:
    """What the loop needs to know beyond the model. `vocab_size` counts the ids that have a text."""

    model_name: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_draft_tokens: int
    prefill_chunk: int
    fallback_timeout_s: float
    autoregressive_rows: int


@dataclass
class Drafter:
    """The drafter that passed the handshake."""

    pid: int
    num_silent_waits: int = 0

    @property
    def is_responsive(self) -> bool:
        return self.num_silent_waits < MAX_SILENT_WAITS


class VerifyWorker:
    """Serves all sequences. Channels are given; `hello` None means that no drafter is ever accepted."""

    def __init__(
        self,
        runner: TargetRunner,
        verifier: Verifier,
        settings: VerifierSettings,
        hello: PeerHello | None,
        frontend: Channel[FrontendMessage],
        peer: Channel[PeerMessage],
        grammars: GrammarCompiler,
        trace: Trace = NO_TRACE,
    ) -> None:
        self._runner = runner
        self._verifier = verifier
        self._settings = settings
        self._hello = hello
        self._frontend = frontend
        self._peer = peer
        self._grammars = grammars
        self._trace = trace
        self._waiting = WaitingLine()
        self._running: dict[int, Sequence] = {}
        self._caches: list[KeyValueCache] = []
        self._free_slots = list(range(settings.max_num_seqs))[::-1]
        self._drafter: Drafter | None = None
        self._num_rounds = 0
        self._num_stale = 0
        self._reported_at = 0.0
        self._outbox: deque[FrontendMessage] = deque()
        self._is_stopping = False
        self._is_announced = False
        self._last_prefilled = -1

    def run(self) -> None:
        """Announce readiness, then work until told to stop."""
        while not self._is_stopping:
            self._announce()
            self._flush()
            self._receive()
            self._admit()
            self._expire_waits()
            prefilled = self._prefill()
            ready = [sequence for sequence in self._running.values() if sequence.stage is Stage.READY]
            if ready:
                self._verify(ready)
            elif not prefilled:
                wait_any((self._frontend, self._peer), self._idle_wait_s())
            self._report()
        self._grammars.close()

    def stop(self) -> None:
        """End `run` after the current round."""
        self._is_stopping = True

    # --- receiving

    def _receive(self) -> None:
        """Take in everything that has arrived, without waiting."""
        while (command := self._frontend.receive(0.0)) is not None:
            match command.message:
                case Submit() as message:
                    self._submit(message)
                case Abort(sequence_id=sequence_id):
                    self._abort(sequence_id)
                case Stop():
                    self._is_stopping = True
                case _:
                    self._num_stale += 1
        while (received := self._peer.receive(0.0)) is not None:
            self._take(received.message)

    def _take(self, message: PeerMessage) -> None:
        if self._drafter is not None:
            self._drafter.num_silent_waits = 0
        match message:
            case PeerHello():
                self._welcome(message)
            case CachePush():
                self._take_push(message)
            case Block():
                self._take_block(message)
            case Desynchronised(sequence_id=sequence_id, reason=reason):
                logger.info("drafter gave up sequence %d: %s", sequence_id, reason)
                sequence = self._running.get(sequence_id)
                if sequence is not None:
                    self._go_alone(sequence, "gave_up")
            case _:
                self._num_stale += 1

    def _welcome(self, theirs: PeerHello) -> None:
        reason = "this server runs without a drafter" if self._hello is None else difference(self._hello, theirs)
        if reason is not None:
            logger.error("drafter refused: %s", reason)
            self._peer.send(PeerRejected(reason=reason))
            self._frontend.send(DrafterRejected(reason=reason))
            return
        if self._drafter is None or self._drafter.pid != theirs.pid:
            self._lose_drafter()
            self._drafter = Drafter(theirs.pid)
            logger.info("drafter %d accepted", theirs.pid)
        self._peer.send(PeerAccepted())

    def _take_push(self, message: CachePush) -> None:
        sequence = self._running.get(message.sequence_id)
        wanted = self._settings.num_draft_tokens
        blocks = {(e.num_accepted, e.anchor): e.drafts for e in message.entries if self._is_valid(e.drafts, wanted)}
        if sequence is None or not sequence.speculation.take(
            message.round, message.version, blocks, message.drafting_s
        ):
            self._num_stale += 1

    def _take_block(self, message: Block) -> None:
        sequence = self._running.get(message.sequence_id)
        if (
            sequence is None
            or sequence.stage is not Stage.AWAITING
            or message.round != sequence.round
            or message.anchor != sequence.anchor
            or not self._is_valid(message.drafts, self._settings.num_draft_tokens)
        ):
            self._num_stale += 1
            return
        sequence.drafts = list(message.drafts)
        is_late_hit = message.source == "late_hit"
        sequence.source = "late_hit" if is_late_hit else "miss"
        sequence.block_times = BlockTimes(
            draft_s=sequence.block_times.draft_s,
            fallback_s=None if is_late_hit else message.drafting_s,
            transport_s=max(0.0, time.perf_counter() - sequence.awaiting_since - message.drafting_s),
        )
        sequence.stage = Stage.READY

    def _is_valid(self, drafts: list[int], num_wanted: int) -> bool:
        vocab_size = self._runner.target.architecture.vocab_size
        return len(drafts) == num_wanted and all(token_id < vocab_size for token_id in drafts)

    def _submit(self, message: Submit) -> None:
        if message.sequence_id in self._waiting or message.sequence_id in self._running:
            self._num_stale += 1
            return
        try:
            request = request_from(message, self._settings.vocab_size, self._settings.max_model_len)
        except Refused as refusal:
            self._tell(refusal.answer)
            return
        compilation = None if message.grammar is None else self._grammars.start(message.grammar)
        self._waiting.add(Waiting(request, compilation))

    def _abort(self, sequence_id: int) -> None:
        entry = self._waiting.remove(sequence_id)
        if entry is not None:
            self._tell(_aborted_while_waiting(entry.request, time.perf_counter() - entry.arrived_at))
        elif sequence_id in self._running:
            self._finish(self._running[sequence_id], "abort", None)

    # --- scheduling

    def _admit(self) -> None:
        """Give free slots to waiting requests, first come first served."""
        self._waiting.settle()
        for broken in self._waiting.take_broken():
            failure = Failure("invalid_request", f"the grammar cannot be used: {broken.problem}", "grammar")
            self._tell(_failed(broken.request.sequence_id, failure))
        while self._free_slots and (entry := self._waiting.next_ready()) is not None:
            slot = self._free_slots.pop()
            cache = self._cache_of(slot)
            if isinstance(cache, Failure):
                self._free_slots.append(slot)
                self._tell(_failed(entry.request.sequence_id, cache))
            else:
                self._start(entry, slot, cache)

    def _cache_of(self, slot: int) -> KeyValueCache | Failure:
        """The cache of a slot, allocated when first needed."""
        while slot >= len(self._caches):
            cache = guarded(self._runner.new_cache)
            if isinstance(cache, Failure):
                return cache
            self._caches.append(cache)
        return self._caches[slot]

    def _start(self, entry: Waiting, slot: int, cache: KeyValueCache) -> None:
        request = entry.request
        grammar = None if entry.grammar is None else entry.grammar.copy()
        editor = RowEditor(request.rules, request.prompt_token_ids, self._runner.target.device, grammar)
        sequence = Sequence(request, slot, cache, editor, entry.arrived_at)
        self._running[request.sequence_id] = sequence
        if not request.speculative:
            sequence.alone_because = "switched_off"
        elif self._drafter is None or not self._drafter.is_responsive:
            sequence.alone_because = "no_drafter"
        else:
            sequence.is_drafted = self._peer.send(
                OpenSequence(
                    sequence_id=request.sequence_id,
                    slot=slot,
                    prompt_token_ids=request.prompt_token_ids,
                    stop_token_ids=sorted(request.rules.stop_token_ids),
                )
            )
            if not sequence.is_drafted:
                self._lose_drafter()

    def _expire_waits(self) -> None:
        now = time.perf_counter()
        for sequence in self._running.values():
            if sequence.stage is Stage.AWAITING and now - sequence.awaiting_since > self._settings.fallback_timeout_s:
                logger.warning("no block for sequence %d in time", sequence.sequence_id)
                if self._drafter is not None:
                    self._drafter.num_silent_waits += 1
                self._go_alone(sequence, "timeout")

    def _idle_wait_s(self) -> float:
        """Until the next wait for the drafter runs out, or a grammar may be compiled; at most the usual idle time."""
        now = time.perf_counter()
        left = [
            self._settings.fallback_timeout_s - (now - sequence.awaiting_since)
            for sequence in self._running.values()
            if sequence.stage is Stage.AWAITING
        ]
        usual = COMPILING_WAIT_S if self._waiting.is_compiling else IDLE_WAIT_S
        return max(0.0, min([usual, *left]))

    def _prefill(self) -> bool:
        """One chunk of one prompt, turn by turn; whether there was one."""
        pending = [sequence for sequence in self._running.values() if sequence.stage is Stage.PREFILL]
        if not pending:
            return False
        later = [sequence for sequence in pending if sequence.sequence_id > self._last_prefilled]
        sequence = (later or pending)[0]
        self._last_prefilled = sequence.sequence_id
        started = time.perf_counter()
        start = sequence.num_rows
        rows = self._verifier.prefill(sequence, self._settings.prefill_chunk)
        self._num_rounds += 1
        if isinstance(rows, Failure):
            self._fail(sequence, rows)
            return True
        is_last = sequence.num_rows == sequence.num_prompt_tokens
        self._send_context(sequence, start, rows.taps, sequence.num_rows - is_last)
        self._tell_prompt_logprobs(sequence, start + 1, rows.reports)
        trace_prefill(self._trace, sequence, start, started)
        if is_last:
            verdict = self._verifier.first_token(sequence)
            sequence.prefilled_at = sequence.verified_at = time.perf_counter()
            sequence.num_rows -= 1  # the last prompt row is this round's verified anchor
            self._conclude(sequence, verdict, "prefill", sequence.prefilled_at - started, 0.0)
        return True

    def _tell_prompt_logprobs(self, sequence: Sequence, start: int, reports: list[TokenReport]) -> None:
        for first in range(0, len(reports), MAX_LOGPROB_ENTRIES):
            entries = wire_logprobs(reports[first : first + MAX_LOGPROB_ENTRIES])
            self._tell(PromptLogprobs(sequence_id=sequence.sequence_id, start=start + first, entries=entries))

    def _send_context(self, sequence: Sequence, start: int, taps: Tensor, stop: int) -> None:
        for first in range(start, stop, MAX_ROWS_A_MESSAGE):
            if not sequence.is_drafted:
                return
            num_rows = min(MAX_ROWS_A_MESSAGE, stop - first)
            frames = self._frames(sequence, first, taps[first - start : first - start + num_rows])
            message = ContextRows(sequence_id=sequence.sequence_id, start=first, num_rows=num_rows)
            if not self._peer.send(message, frames):
                self._lose_drafter()

    def _frames(self, sequence: Sequence, start: int, taps: Tensor) -> list[TensorFrame]:
        decoder_rows = self._verifier.decoder_rows(sequence, start, start + taps.shape[0])
        name = DTYPE_NAMES[taps.dtype]
        return [TensorFrame(name, tuple(tensor.shape), to_bytes(tensor)) for tensor in (taps, decoder_rows)]

    # --- rounds

    def _verify(self, ready: list[Sequence]) -> None:
        """One verification of every ready sequence, then the consequences of each."""
        started = time.perf_counter()
        verdicts = self._verifier.verify(ready)
        finished = time.perf_counter()
        self._receive_pushes()
        for sequence, verdict in zip(ready, verdicts, strict=True):
            exposed_s = max(0.0, started - sequence.verified_at)
            if isinstance(verdict, Verification):
                trace_round(self._trace, sequence, verdict.outcome, started, finished)
            sequence.verified_at = finished
            self._conclude(sequence, verdict, sequence.source, finished - started, exposed_s)
        self._num_rounds += 1

    def _receive_pushes(self) -> None:
        """Let versions that arrived during the verification take part in the look-up."""
        while (received := self._peer.receive(0.0)) is not None:
            self._take(received.message)

    def _conclude(self, sequence: Sequence, verdict: Verdict, source: str, verify_s: float, exposed_s: float) -> None:
        """Commit an outcome, look its next block up, tell the drafter, then the server."""
        if isinstance(verdict, Failure):
            self._fail(sequence, verdict)
            return
        outcome, reports = verdict.outcome, verdict.reports
        num_drafts = len(sequence.drafts)
        committed = sequence.commit(outcome, self._settings.max_model_len)
        cached = sequence.speculation
        num_cached, version, times = len(cached.blocks), cached.version, sequence.block_times
        if committed.reason is None:
            self._prepare_next(sequence, outcome, verdict.taps)
        self._tell(
            RoundResult(
                sequence_id=sequence.sequence_id,
                round=max(0, sequence.round - 1) if committed.reason is None else sequence.round,
                token_ids=committed.token_ids,
                num_drafts=num_drafts,
                num_accepted=outcome.num_accepted,
                outcome=source,  # type: ignore[arg-type]
                verify_s=verify_s,
                exposed_s=exposed_s,
                num_cached=num_cached,
                cache_version=version,
                logprobs=None if reports is None else wire_logprobs(reports[: len(committed.token_ids)]),
                draft_s=times.draft_s,
                fallback_s=times.fallback_s,
                transport_s=times.transport_s,
                queue_s=sequence.admitted_at - sequence.arrived_at if source == "prefill" else None,
                alone_because=sequence.alone_because if source == "autoregressive" else None,
            )
        )
        if committed.reason is not None:
            self._finish(sequence, committed.reason, committed.stop_token_id)

    def _prepare_next(self, sequence: Sequence, outcome: Outcome, taps: Tensor) -> None:
        """Advance past an outcome: start the cached block, or wait for one, or go on alone."""
        start, number, verified = sequence.num_rows, sequence.round, sequence.drafts
        sequence.num_rows += outcome.num_accepted + 1
        sequence.anchor = outcome.anchor
        sequence.round += 1
        cached = sequence.speculation
        found = cached.find(outcome) if sequence.is_drafted else None
        times = BlockTimes(draft_s=cached.drafting_s if cached.version > 0 else None)
        cached.start_round(sequence.round)
        without_drafts(sequence)
        sequence.stage = Stage.READY
        if not sequence.is_drafted:
            return
        sequence.block_times = times
        if found is not None:
            sequence.drafts, sequence.source = found, "hit"
        else:
            sequence.stage = Stage.AWAITING
            sequence.awaiting_since = time.perf_counter()
        message = OutcomeRows(
            sequence_id=sequence.sequence_id,
            round=number,
            start=start,
            drafts=verified,
            num_accepted=outcome.num_accepted,
            anchor=outcome.anchor,
            next_drafts=found,
            awaiting=found is None,
        )
        if not self._peer.send(message, self._frames(sequence, start, taps)):
            self._lose_drafter()

    # --- endings

    def _go_alone(self, sequence: Sequence, reason: AloneReason) -> None:
        """Let a sequence continue without the drafter. The first reason stays."""
        sequence.alone_because = sequence.alone_because or reason
        self._close_drafting(sequence)
        if sequence.stage is Stage.AWAITING:
            without_drafts(sequence)
            sequence.stage = Stage.READY

    def _close_drafting(self, sequence: Sequence) -> None:
        """Tell the drafter that a sequence needs no more blocks; a message that cannot leave shows that it is gone."""
        if sequence.is_drafted:
            sequence.is_drafted = False
            if not self._peer.send(CloseSequence(sequence_id=sequence.sequence_id)):
                self._lose_drafter()

    def _lose_drafter(self) -> None:
        """The drafter is gone: its sequences go on autoregressively, new ones wait for another drafter."""
        if self._drafter is not None:
            logger.warning("drafter %d lost", self._drafter.pid)
        self._drafter = None
        for sequence in self._running.values():
            sequence.is_drafted = False
            self._go_alone(sequence, "drafter_lost")

    def _finish(self, sequence: Sequence, reason: str, stop_token_id: int | None) -> None:
        now = time.perf_counter()
        self._release(sequence)
        prefilled_at = sequence.prefilled_at or now
        self._tell(
            Finished(
                sequence_id=sequence.sequence_id,
                reason=reason,  # type: ignore[arg-type]
                stop_token_id=stop_token_id,
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_generated_tokens=sequence.num_generated,
                queue_s=sequence.admitted_at - sequence.arrived_at,
                prefill_s=prefilled_at - sequence.admitted_at,
                decode_s=now - prefilled_at,
            )
        )

    def _fail(self, sequence: Sequence, failure: Failure) -> None:
        """End a sequence that cannot go on; the others do not notice."""
        logger.error("sequence %d failed: %s", sequence.sequence_id, failure.message)
        self._release(sequence)
        sequence.cache.clear()
        self._tell(_failed(sequence.sequence_id, failure))

    def _release(self, sequence: Sequence) -> None:
        self._close_drafting(sequence)
        del self._running[sequence.sequence_id]
        self._free_slots.append(sequence.slot)

    # --- telling the server

    def _tell(self, message: FrontendMessage) -> None:
        """Send what must not be lost, in order; what the link does not take now goes out later."""
        self._outbox.append(message)
        self._flush()

    def _flush(self) -> None:
        while self._outbox and self._frontend.send(self._outbox[0]):
            self._outbox.popleft()

    def _announce(self) -> None:
        """Say once that sequences can come; a send before the link stands is refused, so this is tried each time."""
        if self._is_announced:
            return
        architecture = self._runner.target.architecture
        self._is_announced = self._frontend.send(
            VerifierReady(
                pid=os.getpid(),
                model_name=self._settings.model_name,
                vocab_size=self._settings.vocab_size,
                max_model_len=self._settings.max_model_len,
                num_draft_tokens=self._settings.num_draft_tokens,
                dtype=DTYPE_NAMES[self._runner.target.dtype],
                num_layers=architecture.num_layers,
                autoregressive_rows=self._settings.autoregressive_rows,
            )
        )

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported_at < STATUS_INTERVAL_S:
            return
        self._reported_at = now
        self._frontend.send(
            VerifierStatus(
                num_running=len(self._running),
                num_waiting=len(self._waiting),
                kv_tokens_used=sum(sequence.num_rows for sequence in self._running.values()),
                kv_tokens_total=self._settings.max_num_seqs * self._settings.max_model_len,
                num_rounds=self._num_rounds,
                stale_messages=self._num_stale
                + sum(channel.num_stale + channel.num_malformed for channel in (self._peer, self._frontend)),
                drafter_connected=self._drafter is not None,
                num_cache_entries=sum(len(sequence.speculation.blocks) for sequence in self._running.values()),
            )
        )


def _failed(sequence_id: int, failure: Failure) -> Failed:
    return Failed(sequence_id=sequence_id, code=failure.code, message=failure.message, parameter=failure.parameter)


def _aborted_while_waiting(request: Request, waited_s: float) -> Finished:
    return Finished(
        sequence_id=request.sequence_id,
        reason="abort",
        stop_token_id=None,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_generated_tokens=0,
        queue_s=waited_s,
        prefill_s=0.0,
        decode_s=0.0,
    )

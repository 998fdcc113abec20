"""The server's side of the frontend link: sequences go out, their rounds come back, and every one of them ends.

Knows nothing of HTTP, text or processes: prompts and results are token ids, and the verifier is whatever answers on the
channel. A sequence ends in exactly one of: `Finished`, `RequestFailed`, `EngineDead`, or its generation being closed.
The sequences of one generation stand or fall together: they are taken all or none, and one failure ends them all.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from protocol.channel import AsyncChannel
from protocol.fields import Grammar
from protocol.messages import (
    Abort,
    DrafterRejected,
    Failed,
    Finished,
    FrontendMessage,
    PromptLogprobs,
    RoundResult,
    SamplingFields,
    Stop,
    Submit,
    VerifierReady,
    VerifierStatus,
)
from server.metrics import Metrics, OutcomeLabels

logger = logging.getLogger("jetspec.engine")

LOST_SEQUENCE_TIMEOUT_S = 5.0
RECEIVE_TIMEOUT_S = 0.25
GRACE_FOR_LAG_S = 1.0


class EngineError(Exception):
    """A request that the engine did not, or could not, complete."""


class EngineUnavailable(EngineError):
    """The engine cannot take a sequence now: it is loading, or cannot reach the verifier. Trying again may help."""


class EngineDead(EngineError):
    """The verifier is gone or the engine was stopped; nothing will be generated any more."""


class QueueFull(EngineError):
    """As many sequences run and wait as are allowed."""


class RequestFailed(EngineError):
    """The verifier refused this sequence or could not go on with it; `parameter` is the field of `Submit` at fault."""

    def __init__(self, code: str, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.parameter = parameter


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to generate, in the verifier's terms."""

    prompt_token_ids: list[int]
    sampling: SamplingFields
    max_tokens: int
    stop_token_ids: list[int]
    min_tokens: int = 0
    speculative: bool = True
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def max_num_events(self) -> int:
        """A result per prefilled piece, one per token at most, the end: more are a fault of the verifier."""
        num_pieces = len(self.prompt_token_ids) * (1 if self.num_prompt_logprobs is None else 2)
        return num_pieces + self.max_tokens + 4


EngineEvent = RoundResult | PromptLogprobs | Finished


@dataclass(frozen=True)
class SequenceEvent:
    """Something that happened to the sequence with this place in its generation."""

    index: int
    event: EngineEvent


@dataclass
class _Sequence:
    """What the engine knows of one live sequence; `events` is shared by the sequences of a generation."""

    index: int
    num_prompt_tokens: int
    last_event_at: float
    events: asyncio.Queue[SequenceEvent | EngineError]
    labels: OutcomeLabels = field(default_factory=OutcomeLabels)
    is_prefilled: bool = False

    def put(self, event: EngineEvent | EngineError) -> None:
        """Queue an event. The queue holds more events than there may be, so a full one means a broken peer."""
        try:
            self.events.put_nowait(event if isinstance(event, EngineError) else SequenceEvent(self.index, event))
        except asyncio.QueueFull:
            self.events.get_nowait()
            self.events.put_nowait(RequestFailed("internal_error", "the verifier sent more rounds than tokens"))


class Generation:
    """The events of one or more sequences as they come, until all have ended or one has failed.

    Closing it, or leaving its `async with`, aborts what still runs.
    """

    def __init__(
        self,
        sequence_ids: Sequence[int],
        events: asyncio.Queue[SequenceEvent | EngineError],
        release: Callable[[int], None],
    ) -> None:
        self._sequence_ids = list(sequence_ids)
        self._events = events
        self._release = release
        self._running = set(range(len(self._sequence_ids)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[SequenceEvent]:
        return self

    async def __anext__(self) -> SequenceEvent:
        while self._running:
            event = await self._events.get()
            if isinstance(event, EngineError):
                self.close()
                raise event
            if event.index not in self._running:
                continue  # it was ended here while this event was in the queue
            if isinstance(event.event, Finished):
                self._running.discard(event.index)
            return event
        raise StopAsyncIteration

    def end(self, index: int) -> None:
        """Abort one sequence if it has not ended; the others go on."""
        self._running.discard(index)
        self._release(self._sequence_ids[index])

    def close(self) -> None:
        """Abort every sequence that has not ended. Safe to call twice."""
        for index in range(len(self._sequence_ids)):
            self.end(index)


class Engine:
    """Submits sequences to the verifier and hands their rounds to whoever asked; notices when the verifier stops."""

    def __init__(
        self,
        channel: AsyncChannel[FrontendMessage],
        metrics: Metrics,
        *,
        max_num_seqs: int,
        max_num_queued: int,
        watchdog_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._metrics = metrics
        self._capacity = max_num_seqs + max_num_queued
        self._watchdog_timeout_s = watchdog_timeout_s
        self._clock = clock
        self._sequence_ids = itertools.count()
        self._live: dict[int, _Sequence] = {}
        self._unsent_aborts: set[int] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._last_message_at = clock()
        self._last_progress_at = clock()
        self._caught_up_at = clock()
        self._progress_mark: tuple[int, int, int] | None = None
        self.info: VerifierReady | None = None
        self.status: VerifierStatus | None = None
        self.num_statuses_without_drafter = 0
        """Heartbeats in a row in which the verifier knew no drafter."""
        self.failure: str | None = None
        self.rejection: str | None = None
        self.ready = asyncio.Event()
        self.failed = asyncio.Event()
        self.drafter_rejected = asyncio.Event()

    # --- life

    async def start(self) -> None:
        """Begin to listen. Returns at once; `wait_until_ready` waits for the verifier."""
        self._tasks = [
            asyncio.create_task(self._receive_loop(), name="engine-receive"),
            asyncio.create_task(self._watchdog_loop(), name="engine-watchdog"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    async def wait_until_ready(self, timeout_s: float) -> VerifierReady:
        """Wait for the verifier; raises `EngineDead` when it fails, or is not ready, within the time."""
        waits = [asyncio.create_task(self.ready.wait()), asyncio.create_task(self.failed.wait())]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.failure is not None:
            raise EngineDead(self.failure)
        if self.info is None:
            raise EngineDead(f"the verifier was not ready within {timeout_s:g} s")
        return self.info

    def fail(self, reason: str) -> None:
        """The verifier is lost: end every live sequence with `EngineDead` and take no more."""
        if self.failure is not None:
            return
        self.failure = reason
        for sequence in self._live.values():
            sequence.put(EngineDead(reason))
        self._live.clear()
        self._unsent_aborts.clear()
        self._metrics.verifier_lost()
        self.failed.set()

    async def stop(self, reason: str = "the server is shutting down") -> None:
        """End what runs, tell the verifier to stop, and stop listening."""
        self.fail(reason)
        self._channel.send(Stop())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- sequences

    @property
    def num_live(self) -> int:
        """Sequences submitted and not ended."""
        return len(self._live)

    @property
    def is_serving(self) -> bool:
        """Whether a sequence submitted now would be generated."""
        return self.info is not None and self.failure is None and not self.is_stuck

    @property
    def is_stuck(self) -> bool:
        """Whether the verifier has been silent, or has work and makes no progress, for the watchdog's time."""
        now = self._clock()
        silent = now - self._last_message_at > self._watchdog_timeout_s
        stalled = bool(self._live) and now - self._last_progress_at > self._watchdog_timeout_s
        return self.info is not None and (silent or stalled)

    @property
    def seconds_since_progress(self) -> float:
        """Time since the verifier last did something; while nothing runs, since it last said anything."""
        return self._clock() - (self._last_progress_at if self._live else self._last_message_at)

    @property
    def capacity(self) -> int:
        """Most sequences that may run and wait at the same time."""
        return self._capacity

    def submit(self, *requests: GenerationRequest) -> Generation:
        """Send sequences off, all or none. Raises `EngineUnavailable`, `EngineDead` or `QueueFull`; never waits."""
        if self.failure is not None:
            raise EngineDead(self.failure)
        if self.info is None:
            raise EngineUnavailable("the model is loading")
        if len(self._live) + len(requests) > self._capacity:
            raise QueueFull(f"{len(self._live)} requests are running or waiting")
        now = self._clock()
        if not self._live:
            self._last_progress_at = now
        events: asyncio.Queue[SequenceEvent | EngineError] = asyncio.Queue(
            maxsize=sum(request.max_num_events for request in requests)
        )
        sequence_ids: list[int] = []
        for index, request in enumerate(requests):
            sequence_id = next(self._sequence_ids)
            if not self._channel.send(_submission(sequence_id, request)):
                for sent in sequence_ids:
                    self._release(sent)
                raise EngineUnavailable("the link to the verifier is down")
            self._live[sequence_id] = _Sequence(index, len(request.prompt_token_ids), now, events)
            sequence_ids.append(sequence_id)
        return Generation(sequence_ids, events, self._release)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[EngineEvent]:
        """`submit` of one sequence as a generator of its events; closing the generator aborts the sequence."""
        async with self.submit(request) as generation:
            async for item in generation:
                yield item.event

    def _release(self, sequence_id: int) -> None:
        if self._live.pop(sequence_id, None) is None:
            return
        if not self._channel.send(Abort(sequence_id=sequence_id)):
            self._unsent_aborts.add(sequence_id)

    # --- messages

    async def _receive_loop(self) -> None:
        while True:
            asked_at = self._clock()
            received = await self._channel.receive(0.0)
            if received is None:
                self._caught_up_at = asked_at
                received = await self._channel.receive(RECEIVE_TIMEOUT_S)
            self._resend_aborts()
            if received is not None:
                self._handle(received.message)

    def _handle(self, message: FrontendMessage) -> None:
        self._last_message_at = self._clock()
        match message:
            case RoundResult():
                self._absorb_round(message)
            case PromptLogprobs():
                self._absorb_prompt(message)
            case Finished():
                self._metrics.sequence_finished(message)
                self._end(message.sequence_id, message)
            case Failed():
                failure = RequestFailed(message.code, message.message, message.parameter)
                self._end(message.sequence_id, failure)
            case VerifierStatus():
                self._absorb_status(message)
            case VerifierReady():
                self.info = message
                self._last_progress_at = self._clock()
                self.ready.set()
            case DrafterRejected():
                self.rejection = message.reason
                self.drafter_rejected.set()
            case Submit() | Abort() | Stop():
                logger.warning("the verifier sent %s, which only the server may send", message.kind)

    def _absorb_prompt(self, message: PromptLogprobs) -> None:
        self._last_progress_at = self._clock()
        sequence = self._live.get(message.sequence_id)
        if sequence is not None:
            sequence.last_event_at = self._clock()
            sequence.put(message)

    def _absorb_round(self, result: RoundResult) -> None:
        self._last_progress_at = self._clock()
        sequence = self._live.get(result.sequence_id)
        if sequence is None:
            return  # the client left; the verifier's answer to the abort is on its way
        sequence.last_event_at = self._clock()
        num_prepared = sequence.labels.num_prepared
        label = sequence.labels.of(result)
        if label != "prefill":
            self._metrics.round_ended(result, label, num_prepared)
        elif not sequence.is_prefilled:
            sequence.is_prefilled = True
            self._metrics.prompt_prefilled(sequence.num_prompt_tokens)
        sequence.put(result)

    def _end(self, sequence_id: int, event: Finished | RequestFailed) -> None:
        self._last_progress_at = self._clock()
        self._unsent_aborts.discard(sequence_id)
        sequence = self._live.pop(sequence_id, None)
        if sequence is not None:
            sequence.put(event)

    def _absorb_status(self, status: VerifierStatus) -> None:
        self.status = status
        self.num_statuses_without_drafter = 0 if status.drafter_connected else self.num_statuses_without_drafter + 1
        self._metrics.verifier_status(status)
        self._metrics.stale_messages("frontend", self._channel.num_stale + self._channel.num_malformed)
        # Prefill shows in the cache fill, a start in the waiting line: both are progress although no round has ended.
        mark = (status.num_rounds, status.kv_tokens_used, status.num_waiting)
        if mark != self._progress_mark:
            self._progress_mark = mark
            self._last_progress_at = self._clock()
        if status.num_running + status.num_waiting == 0:
            self._fail_lost_sequences()

    def _fail_lost_sequences(self) -> None:
        """A sequence the verifier has never heard of (its submission was lost with a connection) must still end.

        Time counts up to the moment when this process had read everything: under load a status may be read long after
        it was sent, and then says nothing about sequences submitted meanwhile.
        """
        oldest = self._caught_up_at - LOST_SEQUENCE_TIMEOUT_S
        for sequence_id, sequence in list(self._live.items()):
            if sequence.last_event_at < oldest:
                logger.error("sequence %d is unknown to the verifier", sequence_id)
                self._end(sequence_id, RequestFailed("internal_error", "the request was lost between two processes"))

    def _resend_aborts(self) -> None:
        for sequence_id in list(self._unsent_aborts):
            if self._channel.send(Abort(sequence_id=sequence_id)):
                self._unsent_aborts.discard(sequence_id)

    # --- watching

    async def _watchdog_loop(self) -> None:
        interval_s = min(0.5, self._watchdog_timeout_s / 4)
        while self.failure is None:
            before = self._clock()
            await asyncio.sleep(interval_s)
            if self._clock() - before > interval_s + GRACE_FOR_LAG_S:
                # This process was paused or overloaded: what the verifier sent meanwhile has not been read yet.
                self._last_message_at = self._last_progress_at = self._clock()
            elif self.is_stuck:
                self.fail(f"the verifier made no progress for {self._watchdog_timeout_s:g} s")

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            error = task.exception()
            if error is not None:
                logger.error("%s ended", task.get_name(), exc_info=error)
                self.fail("the server's engine loop ended")


def _submission(sequence_id: int, request: GenerationRequest) -> Submit:
    return Submit(
        sequence_id=sequence_id,
        prompt_token_ids=request.prompt_token_ids,
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        stop_token_ids=request.stop_token_ids,
        min_tokens=request.min_tokens,
        speculative=request.speculative,
        num_logprobs=request.num_logprobs,
        num_prompt_logprobs=request.num_prompt_logprobs,
        grammar=request.grammar,
    )

"""A whole engine in one process: a verifier and a drafter in threads over in-memory channels, and a client.

The verifier can be gated: a verification then ends only after the drafter has published what the round needs, which
makes
hits independent of the machine's speed. Every message of the peer link is recorded on both ends.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from decoding.calibration import Calibration
from draft_worker.foreseeing import ForesightMethod, Ranking
from draft_worker.methods import DraftMethod
from draft_worker.timing import NO_TIMES, PlanChooser
from draft_worker.worker import DrafterLimits, DraftWorker
from modeling.decoder import decoder_layer_ids
from modeling.invariance import choose_policy
from modeling.kernels.int8 import Quantization
from modeling.tensors import DTYPE_NAMES
from protocol.errors import ChannelClosed
from protocol.fields import Grammar, LogitBias, TokenLogprobs
from protocol.frames import Received, TensorFrame
from protocol.memory_channel import NO_FAULTS, FaultPlan, MemoryChannel, memory_pair
from protocol.messages import (
    FRONTEND_MESSAGES,
    PEER_MESSAGES,
    PROTOCOL_VERSION,
    Abort,
    CachePush,
    DrafterRejected,
    Failed,
    Finished,
    FrontendMessage,
    PeerAccepted,
    PeerHello,
    PeerMessage,
    PeerRejected,
    PromptLogprobs,
    RoundResult,
    SamplingFields,
    Submit,
    VerifierReady,
    VerifierStatus,
)
from protocol.trace import Trace, TraceProcess
from tests.tiny.models import NUM_LAYERS, TAP_LAYERS, VOCAB_SIZE, DraftKind, TargetKind, TinyModels
from verify_worker.grammar import GrammarCompiler
from verify_worker.sequence import Sequence as RunningSequence
from verify_worker.verifier import Verdict, Verifier
from verify_worker.vocabulary import read_vocabulary
from verify_worker.worker import VerifierSettings, VerifyWorker

RUN_ID = "0" * 32
WAIT_S = 30.0
GATE_WAIT_S = 1.0


@dataclass(frozen=True)
class Sent:
    """A message with its frames."""

    message: PeerMessage
    frames: tuple[TensorFrame, ...]


class RecordingChannel:
    """A peer channel that keeps what it sent and received, and whose other end can be exchanged."""

    def __init__(self, inner: MemoryChannel[PeerMessage]) -> None:
        self.inner = inner
        self.sent: list[Sent] = []
        self.received: list[Sent] = []
        self.changed = threading.Condition()

    @property
    def num_stale(self) -> int:
        return self.inner.num_stale

    @property
    def num_malformed(self) -> int:
        return self.inner.num_malformed

    @property
    def num_dropped(self) -> int:
        return self.inner.num_dropped

    def send(self, message: PeerMessage, frames: Sequence[TensorFrame] = ()) -> bool:
        copied = tuple(TensorFrame(frame.dtype, frame.shape, bytes(frame.data)) for frame in frames)
        sent = self.inner.send(message, frames)
        with self.changed:
            self.sent.append(Sent(message, copied))
            self.changed.notify_all()
        return sent

    def receive(self, timeout_s: float) -> Received[PeerMessage] | None:
        received = self.inner.receive(timeout_s)
        if received is not None:
            with self.changed:
                self.received.append(Sent(received.message, tuple(received.frames)))
                self.changed.notify_all()
        return received

    def poll(self, timeout_s: float = 0.0) -> bool:
        return self.inner.poll(timeout_s)

    def close(self, flush_s: float = 0.0) -> None:
        self.inner.close(flush_s)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether a condition on the records came true in time."""
        with self.changed:
            return self.changed.wait_for(condition, timeout_s)


class GatedVerifier(Verifier):
    """Ends a verification only after `gate` has let it."""

    gate: Callable[[RunningSequence], None] | None = None

    def verify(self, sequences: Sequence[RunningSequence]) -> list[Verdict]:
        verdicts = super().verify(sequences)
        for sequence in sequences:
            if self.gate is not None:
                self.gate(sequence)
        return verdicts


class Drafter(Protocol):
    """A real or a scripted drafter."""

    def run(self) -> None: ...
    def stop(self) -> None: ...


MakeDrafter = Callable[[RecordingChannel, PeerHello], Drafter]


@dataclass(frozen=True)
class Job:
    """A request."""

    prompt: tuple[int, ...] = (1, 2, 3, 9, 17)
    max_tokens: int = 32
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 7
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def submission(self, sequence_id: int, *, speculative: bool) -> Submit:
        """The message that asks for it."""
        return Submit(
            sequence_id=sequence_id,
            prompt_token_ids=list(self.prompt),
            max_tokens=self.max_tokens,
            sampling=SamplingFields(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                seed=self.seed,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                repetition_penalty=self.repetition_penalty,
                logit_bias=[LogitBias(token_id=token_id, bias=bias) for token_id, bias in self.logit_bias],
            ),
            stop_token_ids=list(self.stop_token_ids),
            min_tokens=self.min_tokens,
            speculative=speculative,
            num_logprobs=self.num_logprobs,
            num_prompt_logprobs=self.num_prompt_logprobs,
            grammar=self.grammar,
        )


@dataclass
class Text:
    """What came back for one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    rounds: list[RoundResult] = field(default_factory=list)
    finished: Finished | None = None
    failed: Failed | None = None

    @property
    def is_over(self) -> bool:
        return self.finished is not None or self.failed is not None

    @property
    def end(self) -> Finished:
        """How it finished; a failure fails the test."""
        assert self.finished is not None, self.failed
        return self.finished

    @property
    def ending(self) -> tuple[list[int], str, int | None, int]:
        """The tokens and how they end, which speculation must leave alone; the log-probabilities are another matter."""
        return self.token_ids, self.end.reason, self.end.stop_token_id, self.end.num_generated_tokens

    def outcomes(self) -> list[str]:
        """Kinds of the rounds after the prefill."""
        return [result.outcome for result in self.rounds[1:]]

    def tokens_per_round(self) -> float:
        """τ over all rounds after the prefill but the last, which may be cut."""
        kept = self.rounds[1:-1]
        return sum(result.num_accepted + 1 for result in kept) / len(kept)


@dataclass(frozen=True)
class EngineOptions:
    """Sizes and faults of an engine."""

    dtype: torch.dtype = torch.float32
    num_draft_tokens: int = 4
    max_model_len: int = 96
    max_num_seqs: int = 4
    prefill_chunk: int = 8
    num_token_ids: int = VOCAB_SIZE
    fallback_timeout_s: float = 5.0
    faults: FaultPlan = NO_FAULTS
    accepts_drafters: bool = True
    trace_path: Path | None = None
    tap_layers: tuple[int, ...] = TAP_LAYERS
    decoder_layers: tuple[int, ...] = decoder_layer_ids(TAP_LAYERS[-1], NUM_LAYERS)


class Engine:
    """Verifier thread, at most one drafter thread, and the client's side of the frontend link."""

    def __init__(self, models: TinyModels, target: TargetKind = "llama", options: EngineOptions | None = None) -> None:
        self.models, self.target = models, target
        self.options = options or EngineOptions()
        self.texts: dict[int, Text] = {}
        self.next_id = 0
        self.ready: VerifierReady | None = None
        self.status: VerifierStatus | None = None
        self.rejections: list[str] = []
        self.errors: list[BaseException] = []
        self.drafter_channel: RecordingChannel | None = None
        self._threads: list[threading.Thread] = []
        self._drafters: list[Drafter] = []
        self._traces: list[Trace] = []
        sizes = self.options
        vocabulary = read_vocabulary(models.tokenizer(sizes.num_token_ids), VOCAB_SIZE)
        num_positions = sizes.max_model_len + sizes.num_draft_tokens + 1
        self.runner = runner = models.runner(target, sizes.dtype, num_positions, sizes.tap_layers)
        policy = choose_policy(runner, sizes.num_draft_tokens, sizes.max_num_seqs)
        self.verifier = GatedVerifier(runner, policy, min(sizes.decoder_layers, default=NUM_LAYERS))
        self.frontend, worker_end = memory_pair(RUN_ID, FRONTEND_MESSAGES, capacity=100_000)
        self.peer = RecordingChannel(memory_pair(RUN_ID, PEER_MESSAGES)[0])
        self.worker = VerifyWorker(
            runner,
            self.verifier,
            VerifierSettings(
                model_name="tiny",
                vocab_size=vocabulary.size,
                max_model_len=sizes.max_model_len,
                max_num_seqs=sizes.max_num_seqs,
                num_draft_tokens=sizes.num_draft_tokens,
                prefill_chunk=sizes.prefill_chunk,
                fallback_timeout_s=sizes.fallback_timeout_s,
                autoregressive_rows=policy.autoregressive_rows,
            ),
            self.hello("verifier", 1) if sizes.accepts_drafters else None,
            worker_end,
            self.peer,
            GrammarCompiler(vocabulary, torch.device("cpu")),
            self._new_trace("verifier", 1),
        )

    def __enter__(self) -> Self:
        self._start(self.worker)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in (*self._drafters, self.worker):
            worker.stop()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a worker did not stop"
        for written in self._traces:
            written.close()
        if self.errors and error is None:
            raise self.errors[0]

    def hello(self, role: str, pid: int, changes: dict[str, object] | None = None) -> PeerHello:
        """The handshake message of a side that fits, but for `changes`."""
        sizes = self.options
        fields: dict[str, object] = {
            "role": role,
            "pid": pid,
            "protocol_version": PROTOCOL_VERSION,
            "target_fingerprint": f"tiny-{self.target}",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "tap_layers": list(sizes.tap_layers),
            "decoder_layers": list(sizes.decoder_layers),
            "num_draft_tokens": sizes.num_draft_tokens,
            "dtype": DTYPE_NAMES[sizes.dtype],
            "max_model_len": sizes.max_model_len,
            "max_num_seqs": sizes.max_num_seqs,
        }
        return PeerHello.model_validate(fields | (changes or {}))

    # --- drafters

    def attach(self, make: MakeDrafter, pid: int = 100, changes: dict[str, object] | None = None) -> Drafter:
        """Start a drafter on a fresh link, as a restarted process would; returns when the verifier has answered it."""
        theirs, ours = memory_pair(RUN_ID, PEER_MESSAGES, self.options.faults)
        channel = RecordingChannel(theirs)
        before = self._num_answers()
        self.peer.inner = ours
        drafter = make(channel, self.hello("drafter", pid, changes))
        self.drafter_channel = channel
        self._drafters.append(drafter)
        self._start(drafter)
        answered = self.peer.wait_until(lambda: self._num_answers() > before, WAIT_S)
        assert answered, "the verifier did not answer the drafter's hello"
        return drafter

    def attach_real(
        self,
        kind: DraftKind = "trained",
        *,
        passes: int = 1,
        refreshes: int = 1,
        cache_size: int = 4,
        calibration: Calibration | None = None,
        with_adapter: bool = True,
        quantization: Quantization = "none",
        pid: int = 100,
    ) -> DraftWorker:
        """Start a real drafter of `jetspec++`."""
        networks = self.models.networks(
            kind,
            self.target,
            self.options.dtype,
            self.limits.num_positions,
            with_adapter=with_adapter,
            quantization=quantization,
        )
        chooser = PlanChooser({cache_size: NO_TIMES}, cache_size, passes, refreshes)
        method = ForesightMethod(
            networks, self.options.num_draft_tokens, chooser, cache_size, Ranking(calibration, None)
        )
        return self.attach_method(method, pid=pid)

    @property
    def limits(self) -> DrafterLimits:
        """A drafter's sizes."""
        sizes = self.options
        return DrafterLimits(sizes.num_draft_tokens, sizes.max_model_len, sizes.max_num_seqs)

    def attach_method(self, method: DraftMethod, *, pid: int = 100) -> DraftWorker:
        """Start a real drafter of any method."""
        states: dict[str, object] = {
            "tap_layers": list(method.tap_layers),
            "decoder_layers": list(method.decoder_layers),
        }

        def make(channel: RecordingChannel, hello: PeerHello) -> DraftWorker:
            trace = self._new_trace("drafter", pid)
            return DraftWorker(method, self.limits, hello, channel, None, trace)

        drafter = self.attach(make, pid, states)
        assert not self.rejections, self.rejections
        assert isinstance(drafter, DraftWorker)
        return drafter

    def gate_on_version(self, version: int) -> None:
        """Let verifications end only after the drafter has published this version for the round."""

        def gate(sequence: RunningSequence) -> None:
            channel = self.drafter_channel
            if channel is None or not sequence.is_drafted or not sequence.drafts:
                return

            def published() -> bool:
                return any(
                    isinstance(sent.message, CachePush)
                    and sent.message.sequence_id == sequence.sequence_id
                    and sent.message.round == sequence.round
                    and sent.message.version >= version
                    for sent in reversed(channel.sent)
                )

            channel.wait_until(published, GATE_WAIT_S)

        self.verifier.gate = gate

    def lose_drafter(self) -> None:
        """The drafter's process dies: its end of the link closes."""
        assert self.drafter_channel is not None
        self.drafter_channel.close()

    # --- the client

    def submit(self, job: Job, *, speculative: bool = True) -> int:
        """Send a request; returns its id."""
        sequence_id, self.next_id = self.next_id, self.next_id + 1
        self.texts[sequence_id] = Text()
        self.frontend.send(job.submission(sequence_id, speculative=speculative))
        return sequence_id

    def abort(self, sequence_id: int) -> None:
        """Ask for an early end."""
        self.frontend.send(Abort(sequence_id=sequence_id))

    def collect(self, condition: Callable[[], bool]) -> None:
        """Take messages in until a condition on `texts` and the other fields holds."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if self.errors:
                raise self.errors[0]
            assert time.monotonic() < deadline, "the engine does not answer"
            received = self.frontend.receive(0.1)
            if received is not None:
                self._take(received.message)

    def finish(self, *sequence_ids: int) -> list[Text]:
        """Wait for the end of some requests."""
        self.collect(lambda: all(self.texts[sequence_id].is_over for sequence_id in sequence_ids))
        return [self.texts[sequence_id] for sequence_id in sequence_ids]

    def generate(self, job: Job) -> Text:
        """One request with speculation."""
        return self.finish(self.submit(job))[0]

    def plain(self, job: Job) -> Text:
        """One request without."""
        text = self.finish(self.submit(job, speculative=False))[0]
        assert set(text.outcomes()) <= {"autoregressive"}
        return text

    def compare(self, jobs: Sequence[Job]) -> list[Text]:
        """Run jobs one by one without and all at once with speculation; returns the latter, which must be the same."""
        expected = [self.plain(job) for job in jobs]
        found = self.finish(*[self.submit(job) for job in jobs])
        for job, ours, theirs in zip(jobs, found, expected, strict=True):
            assert ours.ending == theirs.ending, job
            assert ours.logprobs == theirs.logprobs, job
            assert ours.prompt_logprobs == theirs.prompt_logprobs, job
        return found

    def _take(self, message: FrontendMessage) -> None:
        match message:
            case RoundResult():
                text = self.texts[message.sequence_id]
                assert not text.is_over, "a round after the end"
                text.rounds.append(message)
                text.token_ids += message.token_ids
                text.logprobs += message.logprobs or []
            case PromptLogprobs():
                text = self.texts[message.sequence_id]
                assert not text.rounds and message.start == len(text.prompt_logprobs) + 1
                text.prompt_logprobs += message.entries
            case Finished() | Failed():
                text = self.texts[message.sequence_id]
                assert not text.is_over, "a request ends once"
                if isinstance(message, Finished):
                    text.finished = message
                else:
                    text.failed = message
            case VerifierReady():
                self.ready = message
            case VerifierStatus():
                self.status = message
            case DrafterRejected(reason=reason):
                self.rejections.append(reason)
            case _:
                raise AssertionError(f"a verifier does not send {message.kind}")

    def _new_trace(self, process: TraceProcess, pid: int) -> Trace:
        self._traces.append(Trace(self.options.trace_path, process, pid))
        return self._traces[-1]

    def _num_answers(self) -> int:
        return sum(isinstance(record.message, PeerAccepted | PeerRejected) for record in self.peer.sent)

    def _start(self, worker: "Drafter | VerifyWorker") -> threading.Thread:
        def run() -> None:
            torch.set_num_threads(1)
            try:
                worker.run()
            except ChannelClosed:
                return
            except BaseException as error:  # noqa: BLE001  # top of the thread: the test raises it
                self.errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread


def peer_messages(records: Sequence[Sent], kind: type[PeerMessage]) -> list[Sent]:
    """Records of one kind of message."""
    return [record for record in records if isinstance(record.message, kind)]

"""A drafter worker on the bench: the test plays the verifier, and the worker runs only when it is told to."""

from dataclasses import dataclass, field

from draft_worker.foreseeing import ForesightMethod
from draft_worker.networks import DraftNetworks
from draft_worker.timing import NO_TIMES, PlanChooser
from draft_worker.worker import DraftedSequence, DrafterLimits, DraftWorker
from modeling.tensors import to_bytes
from protocol.frames import TensorFrame
from protocol.memory_channel import memory_pair
from protocol.messages import (
    CONTROL_MESSAGES,
    PEER_MESSAGES,
    PROTOCOL_VERSION,
    Block,
    CachePush,
    ContextRows,
    Desynchronised,
    OpenSequence,
    OutcomeRows,
    PeerHello,
    PeerMessage,
)
from tests.tiny.models import TAP_LAYERS, VOCAB_SIZE, TrueRows

GAMMA = 4
RUN_ID = "1" * 32


@dataclass
class Bench:
    """`rows` are the true rows of `text`, the only text here."""

    networks: DraftNetworks
    rows: TrueRows
    text: list[int]
    cache_size: int = 4
    num_passes: int = 1
    num_refreshes: int = 1
    said: list[PeerMessage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.peer, worker_end = memory_pair(RUN_ID, PEER_MESSAGES)
        self.control, control_end = memory_pair(RUN_ID, CONTROL_MESSAGES)
        hello = PeerHello(
            role="drafter",
            pid=1,
            protocol_version=PROTOCOL_VERSION,
            target_fingerprint="tiny",
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            tap_layers=list(TAP_LAYERS),
            decoder_layers=[4, 5],
            num_draft_tokens=GAMMA,
            dtype="float32",
            max_model_len=96,
            max_num_seqs=2,
        )
        chooser = PlanChooser({self.cache_size: NO_TIMES}, self.cache_size, self.num_passes, self.num_refreshes)
        method = ForesightMethod(self.networks, GAMMA, chooser, self.cache_size)
        self.worker = DraftWorker(method, DrafterLimits(GAMMA, 96, 2), hello, worker_end, control_end)

    # --- the verifier's side

    def send_rows(self, message: ContextRows | OutcomeRows, start: int, num_rows: int) -> None:
        """A message with true rows; rows beyond the known text are repeats of its last row."""
        index = [min(start + offset, len(self.text) - 1) for offset in range(num_rows)]
        frames = [
            TensorFrame("float32", tuple(tensor.shape), to_bytes(tensor))
            for tensor in (self.rows.taps[index], self.rows.decoder_kv[index])
        ]
        assert self.peer.send(message, frames)

    def open(
        self, sequence_id: int, prompt_length: int, slot: int = 0, stop_token_ids: list[int] | None = None
    ) -> None:
        """A sequence whose prompt is the beginning of the text, with all context rows but the last prompt token's."""
        self.peer.send(
            OpenSequence(
                sequence_id=sequence_id,
                slot=slot,
                prompt_token_ids=self.text[:prompt_length],
                stop_token_ids=stop_token_ids or [],
            )
        )
        if prompt_length > 1:
            self.context(sequence_id, 0, prompt_length - 1)

    def context(self, sequence_id: int, start: int, stop: int) -> None:
        message = ContextRows(sequence_id=sequence_id, start=start, num_rows=stop - start)
        self.send_rows(message, start, stop - start)

    def outcome(
        self,
        sequence_id: int,
        number: int,
        start: int,
        drafts: list[int],
        num_accepted: int,
        anchor: int,
        next_drafts: list[int] | None = None,
    ) -> None:
        """How a round ended; without `next_drafts` the verifier waits."""
        message = OutcomeRows(
            sequence_id=sequence_id,
            round=number,
            start=start,
            drafts=drafts,
            num_accepted=num_accepted,
            anchor=anchor,
            next_drafts=next_drafts,
            awaiting=next_drafts is None,
        )
        self.send_rows(message, start, num_accepted + 1)

    # --- the worker

    def receive(self) -> None:
        """Let the worker look at its inbox."""
        self.worker._receive()
        self._listen()

    def step(self, count: int = 1) -> None:
        """Let the worker run some phases, without looking at its inbox."""
        for _ in range(count):
            work = self.worker._schedule()
            assert work is not None, "nothing to do"
            self.worker._advance(work)
        self._listen()

    def settle(self) -> None:
        """Inbox and phases until there is nothing left to do."""
        self.receive()
        while self.worker._schedule() is not None:
            self.step()

    def state(self, sequence_id: int) -> DraftedSequence:
        """The worker's memory of a sequence."""
        return self.worker._sequences[sequence_id]

    def knows(self, sequence_id: int) -> bool:
        return sequence_id in self.worker._sequences

    @property
    def num_stale(self) -> int:
        return self.worker._num_stale + sum(state.inbox.num_stale for state in self.worker._sequences.values())

    def blocks(self, sequence_id: int) -> list[Block]:
        return [m for m in self.said if isinstance(m, Block) and m.sequence_id == sequence_id]

    def pushes(self, sequence_id: int) -> list[CachePush]:
        return [m for m in self.said if isinstance(m, CachePush) and m.sequence_id == sequence_id]

    def complaints(self, sequence_id: int) -> list[str]:
        return [m.reason for m in self.said if isinstance(m, Desynchronised) and m.sequence_id == sequence_id]

    def _listen(self) -> None:
        while (received := self.peer.receive(0.0)) is not None:
            self.said.append(received.message)

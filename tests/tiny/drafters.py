"""Scripted drafters that speak the peer protocol without any network: one that is right, one that is not, one that
is silent."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from protocol.messages import (
    Block,
    CacheEntry,
    CachePush,
    CloseSequence,
    Desynchronised,
    OpenSequence,
    OutcomeRows,
    PeerAccepted,
    PeerHello,
)
from tests.tiny.engine import RecordingChannel
from tests.tiny.models import VOCAB_SIZE

RECEIVE_WAIT_S = 0.02
HELLO_EVERY = 10


class ScriptedDrafter:
    """Greets, then hands every message to a method that subclasses fill in."""

    def __init__(self, channel: RecordingChannel, hello: PeerHello) -> None:
        self.channel, self.hello = channel, hello
        self.num_draft_tokens = hello.num_draft_tokens
        self._is_stopping = False

    def run(self) -> None:
        is_accepted, waits = False, 0
        while not self._is_stopping:
            if not is_accepted and waits % HELLO_EVERY == 0:
                self.channel.send(self.hello)
            received = self.channel.receive(RECEIVE_WAIT_S)
            waits += received is None
            if received is None:
                continue
            match received.message:
                case PeerAccepted():
                    is_accepted = True
                case OpenSequence() as message:
                    self.opened(message)
                case OutcomeRows() as message:
                    self.outcome(message)
                case CloseSequence(sequence_id=sequence_id):
                    self.closed(sequence_id)
                case _:
                    pass

    def stop(self) -> None:
        self._is_stopping = True

    def opened(self, message: OpenSequence) -> None:
        """A sequence starts."""

    def outcome(self, message: OutcomeRows) -> None:
        """A verification has ended."""

    def closed(self, sequence_id: int) -> None:
        """A sequence is over."""

    def answer(self, message: OutcomeRows, drafts: list[int], source: str = "fallback") -> None:
        """The block the verifier waits for."""
        self.channel.send(
            Block.model_validate(
                {
                    "sequence_id": message.sequence_id,
                    "round": message.round + 1,
                    "anchor": message.anchor,
                    "drafts": drafts,
                    "source": source,
                }
            )
        )


@dataclass(frozen=True)
class Aim:
    """What an oracle says at one position: the drafts after the anchor there."""

    anchor: int
    drafts: list[int]


class Oracle(ScriptedDrafter):
    """Knows the texts: sequence id to prompt and continuation. Says the truth with probability `correctness`, per
    block."""

    def __init__(
        self,
        channel: RecordingChannel,
        hello: PeerHello,
        texts: Mapping[int, list[int]],
        correctness: float = 1.0,
    ) -> None:
        super().__init__(channel, hello)
        self.texts, self.correctness = texts, correctness
        self.random = random.Random(0)

    def outcome(self, message: OutcomeRows) -> None:
        text, gamma = self.texts[message.sequence_id], self.num_draft_tokens
        position = message.start + message.num_accepted + 1
        started = message.next_drafts
        if started is None:
            started = self.spoil(self._aim(text, position).drafts)
            self.answer(message, started)
        truth = self._aim(text, position).drafts
        num_accepted = next((index for index in range(gamma) if started[index] != truth[index]), gamma)
        following = self._aim(text, position + num_accepted + 1)
        self.channel.send(
            CachePush(
                sequence_id=message.sequence_id,
                round=message.round + 1,
                version=1,
                entries=[
                    CacheEntry(num_accepted=num_accepted, anchor=following.anchor, drafts=self.spoil(following.drafts))
                ],
            )
        )

    def spoil(self, drafts: list[int]) -> list[int]:
        """The drafts, or drafts with one wrong token."""
        if self.random.random() < self.correctness:
            return drafts
        index = self.random.randrange(len(drafts))
        return [(token + 1) % VOCAB_SIZE if i == index else token for i, token in enumerate(drafts)]

    def _aim(self, text: list[int], position: int) -> Aim:
        padded = text + [0] * (position + self.num_draft_tokens + 1)
        return Aim(padded[position], padded[position + 1 : position + 1 + self.num_draft_tokens])


class Adversary(ScriptedDrafter):
    """Never helps: hits with rubbish for every outcome there is, wrong lengths, ids, rounds and sequences."""

    def __init__(self, channel: RecordingChannel, hello: PeerHello, seed: int = 0) -> None:
        super().__init__(channel, hello)
        self.random = random.Random(seed)

    def outcome(self, message: OutcomeRows) -> None:
        if message.awaiting:
            for _ in range(3):
                self._block(message, honest=False)
            self.answer(message, self._rubbish(self.num_draft_tokens))
            self._block(message, honest=True)
        for _ in range(2):
            self._push(message, message.round + self.random.choice((-1, 0, 2, 7)), message.sequence_id)
            self._push(message, message.round + 1, message.sequence_id + self.random.choice((1, 5, 1 << 40)))
        self._push(message, message.round + 1, message.sequence_id, num_anchors=VOCAB_SIZE)
        self.channel.send(Desynchronised(sequence_id=message.sequence_id + 99, reason="not mine"))
        self.channel.send(PeerAccepted())

    def _rubbish(self, length: int) -> list[int]:
        limit = self.random.choice((VOCAB_SIZE, VOCAB_SIZE, 1 << 31)) if length != self.num_draft_tokens else VOCAB_SIZE
        return [self.random.randrange(limit) for _ in range(length)]

    def _bad_drafts(self) -> list[int]:
        gamma = self.num_draft_tokens
        kind = self.random.randrange(4)
        if kind == 0:
            return self._rubbish(self.random.randrange(gamma))
        if kind == 1:
            return self._rubbish(gamma + 1 + self.random.randrange(4))
        if kind == 2:
            return [*self._rubbish(gamma - 1), VOCAB_SIZE + self.random.randrange(3)]
        return [(1 << 31) - 1] * gamma

    def _block(self, message: OutcomeRows, *, honest: bool) -> None:
        wrong_round, wrong_anchor, wrong_sequence = (not honest and self.random.random() < 0.5 for _ in range(3))
        self.channel.send(
            Block(
                sequence_id=message.sequence_id + 3 * wrong_sequence,
                round=message.round + (0 if wrong_round else 1),
                anchor=(message.anchor + wrong_anchor) % VOCAB_SIZE,
                drafts=self._rubbish(self.num_draft_tokens)
                if honest or wrong_round or wrong_anchor or wrong_sequence
                else self._bad_drafts(),
                source="late_hit",
            )
        )

    def _push(self, message: OutcomeRows, number: int, sequence_id: int, num_anchors: int = 4) -> None:
        entries = [
            CacheEntry(
                num_accepted=num_accepted,
                anchor=anchor,
                drafts=self._bad_drafts() if self.random.random() < 0.2 else self._rubbish(self.num_draft_tokens),
            )
            for num_accepted in range(self.num_draft_tokens + 1)
            for anchor in range(num_anchors)
        ]
        self.channel.send(
            CachePush(
                sequence_id=sequence_id, round=max(0, number), version=1 + self.random.randrange(9), entries=entries
            )
        )


class Mute(ScriptedDrafter):
    """Answers a number of outcomes with rubbish, then never again, though its channel stays open."""

    def __init__(self, channel: RecordingChannel, hello: PeerHello, num_answers: int) -> None:
        super().__init__(channel, hello)
        self.num_answers = num_answers

    def outcome(self, message: OutcomeRows) -> None:
        if self.num_answers > 0:
            self.num_answers -= 1
            self.answer(message, [0] * self.num_draft_tokens)

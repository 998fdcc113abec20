"""A drafter may be lost, silent, replaced or refused at any time: texts stay whole and the same."""

from dataclasses import replace

import pytest

from protocol.messages import (
    Block,
    CachePush,
    Desynchronised,
    OpenSequence,
    OutcomeRows,
    PeerAccepted,
    PeerHello,
    PeerRejected,
)
from tests.tiny.drafters import Mute, ScriptedDrafter
from tests.tiny.engine import Engine, EngineOptions, Job, RecordingChannel, peer_messages
from tests.tiny.models import VOCAB_SIZE, TinyModels
from verify_worker.sequence import Sequence as RunningSequence

JOB = Job(temperature=1.0, max_tokens=40)


def test_lost_in_mid_stream_and_replaced(models: TinyModels) -> None:
    with Engine(models, options=EngineOptions(fallback_timeout_s=0.5)) as engine:
        plain = engine.plain(JOB)
        engine.attach_real("trained", pid=100)
        running = engine.submit(JOB)
        engine.collect(lambda: len(engine.texts[running].rounds) >= 3)
        engine.lose_drafter()
        (text,) = engine.finish(running)
        assert text.ending == plain.ending
        assert text.outcomes()[-1] == "autoregressive" and "autoregressive" not in text.outcomes()[:1]
        engine.collect(lambda: engine.status is not None and not engine.status.drafter_connected)
        assert engine.generate(JOB).ending == plain.ending  # nobody is there to draft
        engine.attach_real("trained", pid=101)
        again = engine.generate(JOB)
        engine.collect(lambda: engine.status is not None and engine.status.drafter_connected)
    assert again.ending == plain.ending
    assert "autoregressive" not in again.outcomes()


def test_restarted_before_the_verifier_noticed(models: TinyModels) -> None:
    """The new process' hello is the first sign that the old one is gone."""
    with Engine(models, options=EngineOptions(fallback_timeout_s=90.0)) as engine:
        plain = engine.plain(JOB)
        engine.attach(lambda channel, hello: Mute(channel, hello, num_answers=2), pid=100)
        running = engine.submit(JOB)
        engine.collect(lambda: len(engine.texts[running].rounds) == 3)
        engine.attach_real("trained", pid=101)
        (text,) = engine.finish(running)
        again = engine.generate(JOB)
    assert text.ending == again.ending == plain.ending
    assert set(text.outcomes()[2:]) == {"autoregressive"}
    assert "autoregressive" not in again.outcomes()


def test_silent_drafter_is_waited_for_a_few_times_only(models: TinyModels) -> None:
    with Engine(models, options=EngineOptions(fallback_timeout_s=0.1)) as engine:
        plain = engine.plain(JOB)
        engine.attach(lambda channel, hello: Mute(channel, hello, num_answers=1))
        texts = [engine.generate(JOB) for _ in range(5)]
        opened = peer_messages(engine.peer.sent, OpenSequence)
    assert all(text.ending == plain.ending for text in texts)
    assert texts[0].outcomes()[0] == "miss"
    assert len(opened) == 3


def test_a_sequence_that_the_drafter_gives_up_goes_on_alone(models: TinyModels) -> None:
    class Quitter(ScriptedDrafter):
        def outcome(self, message: OutcomeRows) -> None:
            if message.round < 2:
                self.answer(message, [0] * self.num_draft_tokens)
            else:
                self.channel.send(Desynchronised(sequence_id=message.sequence_id, reason="test"))

    with Engine(models, options=EngineOptions(fallback_timeout_s=20.0)) as engine:
        plain = engine.plain(JOB)
        engine.attach(Quitter)
        text = engine.generate(JOB)
        later = engine.generate(JOB)
    assert text.ending == plain.ending
    assert text.outcomes()[:2] == ["miss", "miss"] and set(text.outcomes()[2:]) == {"autoregressive"}
    assert later.outcomes()[0] == "miss"


def test_only_the_right_block_is_taken(models: TinyModels) -> None:
    """Of all blocks that arrive while the verifier waits, the one of this sequence, round and anchor, well formed."""

    class Careless(ScriptedDrafter):
        def outcome(self, message: OutcomeRows) -> None:
            right = Block(
                sequence_id=message.sequence_id,
                round=message.round + 1,
                anchor=message.anchor,
                drafts=[1] * self.num_draft_tokens,
                source="fallback",
            )
            wrong: tuple[dict[str, object], ...] = (
                {"sequence_id": message.sequence_id + 1},
                {"round": message.round},
                {"round": message.round + 2},
                {"anchor": (message.anchor + 1) % VOCAB_SIZE},
                {"drafts": [2] * (self.num_draft_tokens - 1)},
                {"drafts": [2] * (self.num_draft_tokens + 1)},
                {"drafts": [2] * (self.num_draft_tokens - 1) + [VOCAB_SIZE]},
                {"drafts": []},
            )
            for change in wrong:
                self.channel.send(Block.model_validate({**right.model_dump(), "source": "late_hit", **change}))
            self.channel.send(right)
            self.channel.send(Block.model_validate({**right.model_dump(), "source": "late_hit"}))  # too late

    with Engine(models) as engine:
        plain = engine.plain(JOB)
        engine.attach(Careless)
        text = engine.generate(JOB)
        verified = [
            record.message.drafts
            for record in peer_messages(engine.peer.sent, OutcomeRows)
            if isinstance(record.message, OutcomeRows)
        ]
    assert text.ending == plain.ending
    assert set(text.outcomes()) == {"miss"}
    assert verified[1:] and all(drafts == [1] * 4 for drafts in verified[1:])


def test_only_the_right_cache_is_looked_up(models: TinyModels) -> None:
    """Pushes of other rounds, other sequences and older versions are dropped, as are entries that no block can have."""

    class Stale(ScriptedDrafter):
        def outcome(self, message: OutcomeRows) -> None:
            self._push(message, round=message.round + 1, version=5, token=3)
            self._push(message, round=message.round + 1, version=4, token=4)  # older
            self._push(message, round=message.round + 1, version=5, token=5)  # the same again
            self._push(message, round=message.round, version=9, token=6)
            self._push(message, round=message.round + 2, version=9, token=7)
            self._push(message, round=message.round + 1, version=9, token=8, sequence_id=message.sequence_id + 1)
            if message.awaiting:
                self.answer(message, [0] * self.num_draft_tokens)
            self.channel.send(PeerAccepted())  # the test's sign that everything has been said

        def _push(
            self, message: OutcomeRows, *, round: int, version: int, token: int, sequence_id: int | None = None
        ) -> None:
            entries = [
                {"num_accepted": 0, "anchor": anchor, "drafts": [token] * self.num_draft_tokens}
                for anchor in range(VOCAB_SIZE)
            ]
            entries += [
                {"num_accepted": 1, "anchor": anchor, "drafts": [token] * (self.num_draft_tokens + 1)}
                for anchor in range(VOCAB_SIZE)
            ]
            fields = {
                "sequence_id": message.sequence_id if sequence_id is None else sequence_id,
                "round": round,
                "version": version,
                "entries": entries,
            }
            self.channel.send(CachePush.model_validate(fields))

    with Engine(models) as engine:
        plain = engine.plain(JOB)
        drafter = engine.attach(Stale)
        assert isinstance(drafter, Stale)

        def gate(sequence: RunningSequence) -> None:
            num_outcomes = len(peer_messages(engine.peer.sent, OutcomeRows))
            sent = drafter.channel.sent
            drafter.channel.wait_until(lambda: len(peer_messages(sent, PeerAccepted)) >= num_outcomes, 5.0)

        engine.verifier.gate = gate
        text = engine.generate(JOB)
        verified = [
            record.message
            for record in peer_messages(engine.peer.sent, OutcomeRows)
            if isinstance(record.message, OutcomeRows)
        ]
    assert text.ending == plain.ending
    assert "hit" in text.outcomes()
    started = [message.next_drafts for message in verified if message.next_drafts is not None]
    assert started and all(drafts == [3] * 4 for drafts in started)
    assert all(result.num_cached == VOCAB_SIZE for result in text.rounds[1:])
    assert {message.num_accepted for message in verified if message.next_drafts is None} <= {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol_version", 99),
        ("target_fingerprint", "another"),
        ("vocab_size", 129),
        ("hidden_size", 65),
        ("tap_layers", [1, 2]),
        ("decoder_layers", [5]),
        ("num_draft_tokens", 5),
        ("dtype", "bfloat16"),
        ("max_model_len", 97),
        ("max_num_seqs", 5),
        ("role", "verifier"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_by_name(models: TinyModels, field: str, value: object) -> None:
    with Engine(models) as engine:
        engine.attach(ScriptedDrafter, changes={field: value})
        engine.collect(lambda: bool(engine.rejections))
        text = engine.generate(replace(JOB, max_tokens=4))
        rejected = [record.message for record in peer_messages(engine.peer.sent, PeerRejected)]
    assert rejected and isinstance(rejected[0], PeerRejected)
    assert field.replace("role", "not a drafter") in rejected[0].reason
    assert rejected[0].reason == engine.rejections[0]
    assert set(text.outcomes()) == {"autoregressive"}


def test_a_refused_drafter_does_not_disturb_the_one_that_was_accepted(models: TinyModels) -> None:
    class Intruder(ScriptedDrafter):
        def outcome(self, message: OutcomeRows) -> None:
            self.channel.send(self.hello.model_copy(update={"pid": 666, "dtype": "float16"}))
            self.answer(message, [0] * self.num_draft_tokens)

    with Engine(models) as engine:
        engine.attach(Intruder)
        text = engine.generate(JOB)
    assert engine.rejections
    assert set(text.outcomes()) == {"miss"}


def test_a_server_without_a_drafter_takes_none(models: TinyModels) -> None:
    with Engine(models, options=EngineOptions(accepts_drafters=False)) as engine:
        engine.attach(ScriptedDrafter)
        engine.collect(lambda: bool(engine.rejections))
        text = engine.generate(replace(JOB, max_tokens=4))
    assert set(text.outcomes()) == {"autoregressive"}


def test_hello_from_the_same_process_changes_nothing(models: TinyModels) -> None:
    """The answer to a hello may get lost; asking again is no restart."""

    class Insistent(ScriptedDrafter):
        def outcome(self, message: OutcomeRows) -> None:
            self.channel.send(self.hello)
            self.answer(message, [0] * self.num_draft_tokens)

    def make(channel: RecordingChannel, hello: PeerHello) -> Insistent:
        return Insistent(channel, hello)

    with Engine(models) as engine:
        engine.attach(make)
        text = engine.generate(JOB)
    assert set(text.outcomes()) == {"miss"}

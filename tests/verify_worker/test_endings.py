"""Where a text ends: stop tokens anywhere in a block, `max_tokens` inside a block, the end of the context, aborts."""

from dataclasses import replace

import pytest

from protocol.messages import Block, CachePush, ContextRows, PeerHello
from tests.tiny.drafters import Mute, Oracle
from tests.tiny.engine import Engine, EngineOptions, Job, RecordingChannel, Text, peer_messages
from tests.tiny.models import VOCAB_SIZE, TinyModels

JOB = Job(prompt=(1, 2, 3, 9, 17), max_tokens=20)
SAMPLED = replace(JOB, temperature=1.0)


def speculate(engine: Engine, job: Job, text: Text) -> Text:
    """One request with an oracle that knows the text."""
    known = {engine.next_id: [*job.prompt, *text.token_ids]}

    def make(channel: RecordingChannel, hello: PeerHello) -> Oracle:
        return Oracle(channel, hello, known)

    engine.attach(make, pid=1000 + engine.next_id)
    engine.gate_on_version(1)
    return engine.generate(job)


# Blocks of an oracle: the prefill gives token 0, the rounds give 1..5, 6..10, 11..15; a round's last token is its
# bonus.
@pytest.mark.parametrize("index", [0, 1, 3, 5, 7, 10])
@pytest.mark.parametrize("job", [JOB, SAMPLED])
def test_a_stop_token_anywhere_in_a_block(models: TinyModels, index: int, job: Job) -> None:
    with Engine(models) as engine:
        free = engine.plain(replace(job, max_tokens=40))
        stop = free.token_ids[index]
        first = free.token_ids.index(stop)
        stopped = replace(job, stop_token_ids=(stop,))
        plain, found = engine.plain(stopped), speculate(engine, stopped, free)
    assert found.ending == plain.ending == (free.token_ids[:first], "stop", stop, first + 1)
    if job is JOB:
        assert first == index  # the greedy text does not repeat itself so early
        assert found.rounds[-1].token_ids == free.token_ids[1 if index < 6 else 6 : index] or index == 0


def test_a_stop_token_ends_the_block_as_its_bonus(models: TinyModels) -> None:
    with Engine(models) as engine:
        free = engine.plain(replace(JOB, max_tokens=40))
        stopped = replace(JOB, stop_token_ids=(free.token_ids[7],))
        last = speculate(engine, stopped, free).rounds[-1]
    assert last.token_ids == free.token_ids[6:7]
    assert (last.num_drafts, last.num_accepted) == (4, 1)


def test_the_first_of_several_stop_tokens_ends_the_text(models: TinyModels) -> None:
    with Engine(models) as engine:
        free = engine.plain(replace(JOB, max_tokens=40))
        stops = (free.token_ids[12], free.token_ids[8], free.token_ids[9], VOCAB_SIZE - 1)
        found = speculate(engine, replace(JOB, stop_token_ids=stops), free)
    assert found.end.stop_token_id == free.token_ids[8]
    assert found.token_ids == free.token_ids[:8]


@pytest.mark.parametrize("job", [JOB, SAMPLED])
def test_max_tokens_cuts_a_block_anywhere(models: TinyModels, job: Job) -> None:
    with Engine(models) as engine:
        free = engine.plain(replace(job, max_tokens=40))
        for max_tokens in range(1, 13):
            found = speculate(engine, replace(job, max_tokens=max_tokens), free)
            assert found.ending == (free.token_ids[:max_tokens], "length", None, max_tokens)
            assert sum(len(result.token_ids) for result in found.rounds) == max_tokens


@pytest.mark.parametrize("length", [1, 5, 20, 22, 23])
def test_the_end_of_the_context(models: TinyModels, length: int) -> None:
    job = Job(prompt=tuple(range(50, 50 + length)), max_tokens=1000, temperature=1.0)
    with Engine(models, options=EngineOptions(max_model_len=24)) as engine:
        plain = engine.plain(job)
        engine.attach_real("trained", passes=2, refreshes=2)
        engine.gate_on_version(3)
        found = engine.generate(job)
    assert found.ending == plain.ending
    assert found.end.reason == "length"
    assert length + len(found.token_ids) == 24


def test_a_context_that_crosses_the_key_bucket(models: TinyModels) -> None:
    """Attention keys are read in buckets of 256 rows: the text must not notice when it enters the next one."""
    job = Job(prompt=tuple(index % VOCAB_SIZE for index in range(245)), max_tokens=40, temperature=1.0)
    with Engine(models, options=EngineOptions(max_model_len=277, prefill_chunk=64)) as engine:
        engine.attach_real("trained")
        engine.gate_on_version(2)
        (found,) = engine.compare([job])
    assert found.end.reason == "length" and len(found.token_ids) == 32
    assert "hit" in found.outcomes()


def test_rows_of_a_large_prefill_chunk_travel_in_several_messages(models: TinyModels) -> None:
    """One message of a large chunk of a wide target would exceed the wire's limit, which ends the verifier."""
    job = Job(prompt=tuple(index % VOCAB_SIZE for index in range(150)), max_tokens=8)
    with Engine(models, options=EngineOptions(max_model_len=200, prefill_chunk=200)) as engine:
        engine.attach_real("trained")
        (found,) = engine.compare([job])
        rows = [record.message for record in peer_messages(engine.peer.sent, ContextRows)]
    assert [(m.start, m.num_rows) for m in rows if isinstance(m, ContextRows)] == [(0, 64), (64, 64), (128, 21)]
    assert found.outcomes()[0] == "miss"


def test_a_prompt_that_fills_the_context_is_refused(models: TinyModels) -> None:
    with Engine(models, options=EngineOptions(max_model_len=24)) as engine:
        refused = engine.generate(Job(prompt=(3,) * 24))
        served = engine.generate(Job(prompt=(3,) * 23, max_tokens=5))
    assert refused.failed is not None and refused.failed.code == "context_length_exceeded"
    assert "24" in refused.failed.message
    assert len(served.token_ids) == 1


@pytest.mark.parametrize("job", [replace(JOB, prompt=(1, VOCAB_SIZE)), replace(JOB, stop_token_ids=(VOCAB_SIZE,))])
def test_ids_outside_the_vocabulary_are_refused(models: TinyModels, job: Job) -> None:
    with Engine(models) as engine:
        refused = engine.generate(job)
    assert refused.failed is not None and refused.failed.code == "invalid_request"
    assert str(VOCAB_SIZE) in refused.failed.message


def test_min_tokens_strikes_stop_tokens_row_by_row(models: TinyModels) -> None:
    with Engine(models) as engine:
        free = engine.plain(replace(JOB, max_tokens=40))
        struck = replace(JOB, stop_token_ids=tuple(free.token_ids[2:8:2]), min_tokens=6)
        plain = engine.plain(struck)
        found = speculate(engine, struck, free)  # its drafts hold tokens that are struck
        engine.attach_real("trained", pid=7)
        again = engine.generate(struck)
    assert found.ending == plain.ending == again.ending
    assert plain.end.num_generated_tokens > 6
    assert plain.token_ids[:6] != free.token_ids[:6]


def test_min_tokens_strikes_no_row_behind_the_minimum(models: TinyModels) -> None:
    """The block of tokens 1..5 straddles a minimum of 4: its last row may end the text."""
    with Engine(models) as engine:
        free = engine.plain(replace(JOB, max_tokens=40))
        struck = replace(JOB, stop_token_ids=(free.token_ids[5],), min_tokens=4)
        found = speculate(engine, struck, free)
    assert found.ending == (free.token_ids[:5], "stop", free.token_ids[5], 6)


def test_outcomes_that_end_the_text_are_never_cached(models: TinyModels) -> None:
    stops = tuple(range(0, VOCAB_SIZE, 2))
    job = replace(JOB, temperature=1.0, max_tokens=12, min_tokens=12)
    with Engine(models) as engine:
        engine.attach_real("random")
        engine.gate_on_version(2)
        engine.generate(job)
        engine.generate(replace(job, stop_token_ids=stops))
        assert engine.drafter_channel is not None
        anchors: dict[int, set[int]] = {0: set(), 1: set()}
        for record in peer_messages(engine.drafter_channel.sent, CachePush):
            assert isinstance(record.message, CachePush)
            anchors[record.message.sequence_id] |= {entry.anchor for entry in record.message.entries}
    assert anchors[0] & set(stops)
    assert anchors[1] and not anchors[1] & set(stops)


def test_an_abort_while_waiting_running_and_stuck(models: TinyModels) -> None:
    def make(channel: RecordingChannel, hello: PeerHello) -> Mute:
        return Mute(channel, hello, num_answers=1)

    long = replace(JOB, max_tokens=10_000)
    with Engine(models, options=EngineOptions(max_num_seqs=1, max_model_len=400)) as engine:
        engine.attach(make)
        stuck = engine.submit(long)  # waits for a second block that never comes
        engine.collect(lambda: len(engine.texts[stuck].rounds) == 2)
        waiting = engine.submit(long)
        engine.abort(waiting)
        (text,) = engine.finish(waiting)
        assert (text.token_ids, text.end.reason, text.end.num_generated_tokens) == ([], "abort", 0)
        engine.abort(stuck)
        (text,) = engine.finish(stuck)
        assert text.end.reason == "abort" and text.token_ids
        running = engine.submit(long, speculative=False)
        engine.collect(lambda: len(engine.texts[running].rounds) > 3)
        engine.abort(running)
        engine.abort(running)
        engine.abort(12345)
        (text,) = engine.finish(running)
        assert text.end.reason == "abort" and text.end.num_generated_tokens == len(text.token_ids)
        assert len(engine.plain(replace(JOB, max_tokens=4)).token_ids) == 4  # the slot is free again


def test_a_late_block_for_an_aborted_request_does_not_reach_its_successor(models: TinyModels) -> None:
    def make(channel: RecordingChannel, hello: PeerHello) -> Mute:
        return Mute(channel, hello, num_answers=0)

    with Engine(models, options=EngineOptions(max_num_seqs=1, fallback_timeout_s=0.2)) as engine:
        drafter = engine.attach(make)
        assert isinstance(drafter, Mute)
        first = engine.submit(JOB)
        engine.collect(lambda: len(engine.texts[first].rounds) == 1)
        engine.abort(first)
        engine.finish(first)
        second = engine.submit(JOB)
        engine.collect(lambda: len(engine.texts[second].rounds) == 1)
        anchor = engine.texts[second].token_ids[0]
        drafter.channel.send(Block(sequence_id=first, round=1, anchor=anchor, drafts=[1, 2, 3, 4], source="fallback"))
        (text,) = engine.finish(second)
        engine.collect(lambda: engine.status is not None and engine.status.stale_messages > 0)
    assert set(text.outcomes()) == {"autoregressive"}

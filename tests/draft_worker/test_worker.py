"""The drafter's loop, message by message: order, late hits, fallbacks, losses, and what never happens twice."""

from collections.abc import Sequence

import pytest

from draft_worker.inbox import MAX_WAITING
from draft_worker.round import DraftRound
from draft_worker.sequence import DraftSequence
from draft_worker.worker import DrafterRefused
from protocol.messages import (
    Block,
    CachePush,
    CloseSequence,
    DrafterReady,
    DrafterStatus,
    OpenSequence,
    PeerAccepted,
    PeerHello,
    PeerRejected,
)
from tests.draft_worker.bench import GAMMA, Bench
from tests.draft_worker.caches import permanent
from tests.tiny.models import VOCAB_SIZE, TinyModels, drafted_sequence, successors, true_rows

TEXT = [1, *successors(1, 49)]


@pytest.fixture
def bench(models: TinyModels) -> Bench:
    return Bench(models.networks("trained"), true_rows(models.runner(), TEXT), TEXT)


def start(bench: Bench, sequence_id: int = 0, prompt_length: int = 6, slot: int = 0) -> list[int]:
    """Open a sequence and end its prefill; returns the fallback block that follows."""
    bench.open(sequence_id, prompt_length, slot)
    bench.outcome(sequence_id, 0, prompt_length - 1, [], 0, TEXT[prompt_length])
    bench.receive()
    return bench.blocks(sequence_id)[-1].drafts


def test_a_prefill_is_answered_with_a_fallback_block(bench: Bench) -> None:
    drafts = start(bench)
    (block,) = bench.blocks(0)
    assert (block.round, block.anchor, block.source) == (1, TEXT[6], "fallback")
    assert len(drafts) == GAMMA and drafts[0] == TEXT[7]
    assert bench.state(0).sequence.num_rows == 6
    assert bench.state(0).sequence.token_ids == TEXT[:7]


def test_a_prompt_of_one_token(bench: Bench) -> None:
    start(bench, prompt_length=1)
    assert bench.state(0).sequence.num_rows == 1
    bench.settle()
    assert bench.pushes(0)


def test_versions_are_pushed_as_they_are_ready_for_the_round_under_verification(bench: Bench) -> None:
    start(bench)
    bench.step(2)  # foresight, draft
    assert [(push.round, push.version) for push in bench.pushes(0)] == [(1, 1)]
    bench.settle()
    assert [(push.round, push.version) for push in bench.pushes(0)] == [(1, 1), (1, 2)]
    first, second = bench.pushes(0)
    keys = [[(entry.num_accepted, entry.anchor) for entry in push.entries] for push in (first, second)]
    assert keys[0] == keys[1] and len(keys[0]) == len(set(keys[0])) == 4
    assert first.entries != second.entries


def test_a_started_block_is_gone_on_with(bench: Bench) -> None:
    drafts = start(bench)
    bench.settle()
    entry = bench.pushes(0)[-1].entries[0]
    bench.outcome(0, 1, 6, drafts, entry.num_accepted, entry.anchor, next_drafts=entry.drafts)
    bench.receive()
    assert len(bench.blocks(0)) == 1  # nobody waits for another
    state = bench.state(0)
    assert isinstance(state.round, DraftRound) and list(state.round.block.token_ids) == entry.drafts
    assert state.round.block.confidences != (0.5,) * GAMMA  # it remembers what it pushed
    assert state.sequence.num_rows == 6 + entry.num_accepted + 1
    assert state.sequence.token_ids == [*TEXT[:7], *drafts[: entry.num_accepted], entry.anchor]
    bench.settle()
    assert {push.round for push in bench.pushes(0)[-2:]} == {2}


def test_an_outcome_in_the_works_is_a_late_hit(bench: Bench) -> None:
    drafts = start(bench)
    bench.step(2)
    entry = bench.pushes(0)[-1].entries[1]
    bench.outcome(0, 1, 6, drafts, entry.num_accepted, entry.anchor)
    bench.receive()
    block = bench.blocks(0)[-1]
    assert (block.source, block.round, block.anchor, block.drafts) == ("late_hit", 2, entry.anchor, entry.drafts)


def test_an_outcome_that_is_not_there_is_a_miss(bench: Bench) -> None:
    drafts = start(bench)
    bench.settle()
    keys = {(entry.num_accepted, entry.anchor) for entry in bench.pushes(0)[-1].entries}
    anchor = next(token for token in range(VOCAB_SIZE) if (0, token) not in keys and token != drafts[0])
    bench.outcome(0, 1, 6, drafts, 0, anchor)
    bench.receive()
    block = bench.blocks(0)[-1]
    assert (block.source, block.round, block.anchor) == ("fallback", 2, anchor)
    assert block.drafts[0] == successors(anchor, 1)[0]


def test_only_finished_blocks_are_late_hits(bench: Bench) -> None:
    drafts = start(bench)
    bench.step(1)  # foresight: outcomes are chosen, nothing is drafted
    state = bench.state(0)
    assert isinstance(state.round, DraftRound)
    num_accepted, anchor = state.round.outcomes[0]
    bench.outcome(0, 1, 6, drafts, num_accepted, anchor)
    bench.receive()
    assert bench.blocks(0)[-1].source == "fallback"


def test_a_double_outcome_is_installed_once(bench: Bench) -> None:
    drafts = start(bench)
    for _ in range(2):
        bench.outcome(0, 1, 6, drafts, 1, 33)
    bench.receive()
    bench.outcome(0, 1, 6, drafts, 1, 33)
    bench.outcome(0, 0, 5, [], 0, TEXT[6])
    bench.settle()
    assert bench.state(0).sequence.num_rows == 8
    assert len(bench.blocks(0)) == 2
    assert bench.num_stale == 3


def test_outcomes_out_of_order_are_installed_in_order(bench: Bench) -> None:
    drafts = start(bench)
    bench.outcome(0, 2, 8, [4, 5, 6, 7], 2, 9, next_drafts=[1, 2, 3, 4])
    bench.receive()
    assert bench.state(0).sequence.num_rows == 6
    bench.outcome(0, 1, 6, drafts, 1, 33, next_drafts=[4, 5, 6, 7])
    bench.receive()
    assert bench.state(0).sequence.num_rows == 11
    assert bench.state(0).sequence.token_ids[7:] == [drafts[0], 33, 4, 5, 9]


def test_a_missing_outcome_ends_the_drafting(bench: Bench) -> None:
    start(bench)
    for number in range(2, 2 + MAX_WAITING):
        bench.outcome(0, number, 6 + number, [1, 2, 3, 4], 0, 9)
    bench.receive()
    assert bench.knows(0)
    bench.outcome(0, 2 + MAX_WAITING, 20, [1, 2, 3, 4], 0, 9)
    bench.receive()
    assert not bench.knows(0)
    assert bench.complaints(0) == ["an outcome is missing"]


@pytest.mark.parametrize("start_position", [5, 7])
def test_rows_that_do_not_follow_end_the_drafting(bench: Bench, start_position: int) -> None:
    drafts = start(bench)
    num_answers = len(bench.blocks(0))
    bench.outcome(0, 1, start_position, drafts, 1, 33)
    bench.receive()
    assert not bench.knows(0)
    assert len(bench.complaints(0)) == 1
    assert len(bench.blocks(0)) == num_answers


def test_missing_context_rows_end_the_drafting_and_double_ones_do_not(bench: Bench) -> None:
    bench.open(0, 4)
    bench.context(0, 0, 3)
    bench.receive()
    assert bench.state(0).sequence.num_rows == 3
    assert bench.num_stale == 1
    bench.context(0, 5, 8)
    bench.receive()
    assert not bench.knows(0)
    assert bench.complaints(0) == ["context rows are missing"]


def test_messages_about_unknown_sequences_are_counted(bench: Bench) -> None:
    bench.outcome(5, 0, 0, [], 0, 3)
    bench.context(5, 0, 2)
    bench.peer.send(OpenSequence(sequence_id=6, slot=2, prompt_token_ids=[1], stop_token_ids=[]))  # two slots only
    bench.peer.send(OpenSequence(sequence_id=7, slot=0, prompt_token_ids=[1] * 97, stop_token_ids=[]))
    bench.receive()
    assert bench.num_stale == 4
    assert not bench.said


def test_a_miss_of_one_sequence_never_makes_another_redraft(bench: Bench) -> None:
    first = start(bench, 0, 6, slot=0)
    start(bench, 1, 9, slot=1)
    bench.step(4)  # foresight and draft of both
    other = bench.state(1).round
    assert other is not None and other.version == 1
    bench.outcome(0, 1, 6, first, 0, 77)
    bench.receive()
    assert bench.blocks(0)[-1].source == "fallback"
    assert bench.state(1).round is other and other.version == 1
    assert bench.state(0).round is not other
    bench.settle()
    assert [push.version for push in bench.pushes(1)] == [1, 2]
    assert len(bench.blocks(1)) == 1


def test_sequences_take_turns_and_do_not_disturb_each_other(models: TinyModels) -> None:
    def prepared(together: bool) -> list[list[list[int]]]:
        bench = Bench(models.networks("trained"), true_rows(models.runner(), TEXT), TEXT)
        start(bench, 0, 6, slot=0)
        if not together:
            bench.settle()
        start(bench, 1, 9, slot=1)
        if together:
            bench.step(2)
            states = [bench.state(0), bench.state(1)]
            assert [state.num_steps for state in states] == [1, 1]
        bench.settle()
        return [[entry.drafts for entry in bench.pushes(number)[-1].entries] for number in (0, 1)]

    assert prepared(together=True) == prepared(together=False)


def test_who_waits_is_served_before_any_further_phase(bench: Bench) -> None:
    first = start(bench, 0, 6, slot=0)
    start(bench, 1, 9, slot=1)
    bench.step(2)
    bench.outcome(0, 1, 6, first, 0, 77)
    num_steps = bench.state(1).num_steps
    bench.receive()
    assert len(bench.blocks(0)) == 2
    assert bench.state(1).num_steps == num_steps


def test_a_slot_is_reused_without_traces(models: TinyModels) -> None:
    networks, rows = models.networks("trained"), true_rows(models.runner(), TEXT)
    used = Bench(networks, rows, TEXT)
    start(used, 0, 30)
    used.settle()
    used.peer.send(CloseSequence(sequence_id=0))
    start(used, 1, 6)
    used.settle()
    fresh = Bench(networks, rows, TEXT)
    start(fresh, 1, 6)
    fresh.settle()
    assert not used.knows(0)
    assert untimed(used.blocks(1)) == untimed(fresh.blocks(1))
    assert untimed(used.pushes(1)) == untimed(fresh.pushes(1))


def untimed(messages: Sequence[Block | CachePush]) -> list[Block | CachePush]:
    """The messages without the time they took, which must have been told."""
    assert all(message.drafting_s > 0.0 for message in messages)
    return [message.model_copy(update={"drafting_s": 0.0}) for message in messages]


def test_a_slot_has_one_sequence(bench: Bench) -> None:
    """The close of a sequence got lost: the next one in its slot replaces it, or both would write the same memory."""
    start(bench, 0, 6)
    start(bench, 1, 9)
    assert not bench.knows(0)
    bench.settle()
    assert not bench.pushes(0)
    assert [push.version for push in bench.pushes(1)] == [1, 2]


def test_a_second_open_of_a_live_sequence_is_ignored(bench: Bench) -> None:
    start(bench, 0, 6)
    bench.peer.send(OpenSequence(sequence_id=0, slot=0, prompt_token_ids=TEXT[:6], stop_token_ids=[]))
    bench.receive()
    assert bench.state(0).sequence.num_rows == 6
    assert bench.num_stale == 1


def test_a_closed_sequence_is_worked_on_no_more(bench: Bench) -> None:
    start(bench)
    bench.peer.send(CloseSequence(sequence_id=0))
    bench.receive()
    assert bench.worker._schedule() is None
    assert not bench.knows(0)


def test_outcomes_that_end_the_text_are_never_cached(models: TinyModels) -> None:
    networks, rows = models.networks("trained"), true_rows(models.runner(), TEXT)
    free = Bench(networks, rows, TEXT)
    start(free)
    free.settle()
    anchors = {entry.anchor for entry in free.pushes(0)[-1].entries}
    bound = Bench(networks, rows, TEXT)
    bound.open(0, 6, stop_token_ids=sorted(anchors))
    bound.outcome(0, 0, 5, [], 0, TEXT[6])
    bound.settle()
    entries = bound.pushes(0)[-1].entries
    assert len(entries) == 4
    assert not anchors & {entry.anchor for entry in entries}


def test_noise_does_not_depend_on_how_the_request_is_sampled() -> None:
    """The drafter never learns seed and temperature, so nothing it does can depend on the draws that verify it."""
    assert set(OpenSequence.model_fields) == {"kind", "sequence_id", "slot", "prompt_token_ids", "stop_token_ids"}


def test_caches_hold_true_rows_after_a_run(bench: Bench) -> None:
    drafts = start(bench)
    position, number = 6, 1
    for num_accepted in (2, 0, 4, 1):
        bench.settle()
        following = TEXT[position + num_accepted + 1]
        verified = [*TEXT[position + 1 : position + 1 + num_accepted], *drafts[num_accepted:]]
        bench.outcome(0, number, position, verified, num_accepted, following)
        position, number = position + num_accepted + 1, number + 1
    bench.settle()
    sequence = bench.state(0).sequence
    assert isinstance(sequence, DraftSequence)
    assert sequence.num_rows == position
    assert sequence.token_ids == TEXT[: position + 1]
    fresh = drafted_sequence(bench.networks, bench.rows, TEXT[: position + 1])
    for (name, ours), (_, theirs) in zip(permanent(sequence.memory), permanent(fresh.memory), strict=True):
        shared = min(ours.shape[2], theirs.shape[2])
        assert ours[:, :, :shared].allclose(theirs[:, :, :shared], atol=1e-5), name


def test_handshake(bench: Bench) -> None:
    bench.worker._greet()
    bench.worker._greet()
    bench._listen()
    assert [type(message) for message in bench.said] == [PeerHello]
    bench.peer.send(PeerAccepted())
    bench.peer.send(PeerAccepted())
    bench.receive()
    for _ in range(2):
        bench.worker._announce()
    ready = bench.control.receive(0.0)
    assert ready is not None and isinstance(ready.message, DrafterReady)
    assert (ready.message.plan_passes, ready.message.plan_refreshes, ready.message.cache_size) == (1, 1, 4)
    assert bench.control.receive(0.0) is None
    bench.worker._report()
    status = bench.control.receive(0.0)
    assert status is not None and isinstance(status.message, DrafterStatus)
    bench.peer.send(PeerRejected(reason="dtype differs"))
    with pytest.raises(DrafterRefused, match="dtype differs"):
        bench.receive()

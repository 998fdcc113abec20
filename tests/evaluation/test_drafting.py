"""Blocks drafted together are what the drafter makes of each alone."""

from collections.abc import Sequence

import pytest
import torch

from decoding.uniforms import noise_generator
from draft_worker.foresight import foresee, foresee_blocks
from draft_worker.refinement import Drafts, begin, refine, refresh
from draft_worker.sequence import DraftSequence, new_memory
from evaluation.drafting import Demand, DraftingOptions, Refresh, draft_blocks, lay_copies
from evaluation.rounds import Replacement
from modeling.layers import Heads
from tests.tiny.models import TinyModels, drafted_sequence, true_rows

GAMMA, SLOTS = 5, 2
TOKENS = [1, 9, 20, 2, 31, 77, 15]
BLOCK = [TOKENS[-1], 8, 43, 90, 69, 92]
OPTIONS = DraftingOptions(GAMMA, SLOTS, 0, lambda position: noise_generator(3, position))


@pytest.fixture(scope="module")
def sequence(models: TinyModels) -> DraftSequence:
    """With foresight rows of `BLOCK` in place."""
    rows = true_rows(models.runner(), TOKENS)
    found = drafted_sequence(models.networks("trained"), rows, TOKENS, num_draft_tokens=GAMMA, max_cache_size=12)
    foresee(found, BLOCK, with_refresh=True)
    return found


def plain(sequence: DraftSequence, demand: Demand) -> Drafts:
    """One row, one pass after another, as the drafter runs them."""
    place = sequence.num_rows + demand.num_accepted + 1
    drafts = begin(sequence, [demand.num_accepted], [demand.anchor], GAMMA, OPTIONS.noise(place))
    for number in range(1, demand.num_passes + 1):
        if demand.refresh == "replace":
            refresh(sequence, drafts, number * SLOTS)
        refine(sequence, drafts)
    return drafts


def demands(outcomes: Sequence[tuple[int, int]], kinds: Sequence[Refresh]) -> list[Demand]:
    return [Demand(*outcome, passes, kind) for outcome in outcomes for kind in kinds for passes in range(4)]


def test_blocks_of_a_packed_batch_are_those_of_each_row_alone(sequence: DraftSequence) -> None:
    """More outcomes than a batch holds, in plans of different lengths."""
    outcomes = [(-1, TOKENS[-1]), (0, 50), (1, 51), (2, 52), (4, 53), (5, 54)]
    wanted = [*demands(outcomes, ["none", "replace"]), Demand(3, 60, 2, "replace"), Demand(3, 60, 1, "none")]
    found = draft_blocks(sequence, wanted, OPTIONS)
    assert set(found) == set(wanted)
    for demand, block in found.items():
        alone = plain(sequence, demand)
        assert block.block.token_ids == tuple(alone.token_ids[0].tolist()), demand
        assert block.block.confidences == pytest.approx(alone.confidences[0].tolist(), rel=1e-3)
    assert any(block.replacements for block in found.values())


def test_replacements_say_what_the_decoder_wrote(sequence: DraftSequence) -> None:
    written = 0
    for outcome in [(0, 50), (1, 51), (2, 52), (4, 53)]:
        demand = Demand(*outcome, 1, "replace")
        drafts = plain(sequence, Demand(*outcome, 0, "none"))
        before = drafts.token_ids[0].tolist()
        refresh(sequence, drafts, SLOTS)
        after = drafts.token_ids[0].tolist()
        expected = tuple(Replacement(i, b, a) for i, (b, a) in enumerate(zip(before, after, strict=True), 1) if b != a)
        assert draft_blocks(sequence, [demand], OPTIONS)[demand].replacements == expected
        written += len(expected)
    assert written


def test_a_refresh_alone_writes_nothing_and_keeps_what_the_decoder_agrees_with(sequence: DraftSequence) -> None:
    """The pass after it redrafts from the first disagreement on; before it, the drafts of J0 stand."""
    found_one = False
    for outcome in [(0, 50), (1, 51), (2, 52), (4, 53)]:
        demand = Demand(*outcome, 1, "alone")
        initial = plain(sequence, Demand(*outcome, 0, "none"))
        before = initial.token_ids[0].tolist()
        refresh(sequence, initial, SLOTS)
        first = next(
            (i for i, (b, a) in enumerate(zip(before, initial.token_ids[0].tolist(), strict=True)) if b != a), None
        )
        block = draft_blocks(sequence, [demand], OPTIONS)[demand]
        assert block.replacements == ()
        if first is not None:
            assert list(block.block.token_ids[:first]) == before[:first]
            found_one = True
            # As if the last agreed draft were the anchor, with the rows before it as context.
            again = plain(sequence, Demand(*outcome, 0, "none"))
            again.feature = initial.feature
            again.num_frozen = torch.tensor([first])
            refine(sequence, again)
            assert block.block.token_ids == tuple(again.token_ids[0].tolist())
    assert found_one


def test_smaller_blocks_are_beginnings_of_larger_ones(sequence: DraftSequence) -> None:
    wanted = demands([(0, 50), (2, 52)], ["none", "replace", "alone"])
    large = draft_blocks(sequence, wanted, OPTIONS)
    small = draft_blocks(sequence, wanted, DraftingOptions(3, SLOTS, 0, OPTIONS.noise))
    for demand in wanted:
        assert large[demand].first(3).token_ids == small[demand].block.token_ids, demand


def test_candidates_are_each_drafts_likeliest_columns(sequence: DraftSequence) -> None:
    demand = Demand(1, 51, 1, "none")
    block = draft_blocks(sequence, [demand], DraftingOptions(GAMMA, SLOTS, 6, OPTIONS.noise))[demand]
    assert block.candidates is not None and block.candidates.shape == (GAMMA, 6)
    assert block.candidates[:, 0].tolist() == sequence.networks.to_columns(block.block.token_ids)


def test_several_blocks_are_foreseen_as_each_alone(models: TinyModels) -> None:
    rows = true_rows(models.runner(), TOKENS)
    networks = models.networks("trained")
    others = [[BLOCK[0], *[(token + 1) % 128 for token in BLOCK[1:]]], [BLOCK[0], 8, 43, 1, 2, 3]]
    together = drafted_sequence(networks, rows, TOKENS, num_draft_tokens=GAMMA, max_cache_size=12)
    log_p = foresee_blocks(together, [BLOCK, *others], with_refresh=True).log_p.unflatten(0, (3, GAMMA + 1))
    for found, block in zip(log_p, [BLOCK, *others], strict=True):
        alone = drafted_sequence(networks, rows, TOKENS, num_draft_tokens=GAMMA, max_cache_size=12)
        torch.testing.assert_close(found, foresee(alone, block, with_refresh=True).log_p, rtol=1e-4, atol=1e-4)
    # The shared rows are those of the first block.
    alone = drafted_sequence(networks, rows, TOKENS, num_draft_tokens=GAMMA, max_cache_size=12)
    foresee(alone, BLOCK, with_refresh=True)
    wanted = demands([(2, 52), (5, 54)], ["replace"])
    ours, theirs = draft_blocks(together, wanted, OPTIONS), draft_blocks(alone, wanted, OPTIONS)
    assert [ours[demand].block.token_ids for demand in wanted] == [theirs[demand].block.token_ids for demand in wanted]


def test_copied_states_are_the_last_verified_one_at_other_positions(models: TinyModels) -> None:
    """The draft model's rows are what it would have laid for true states that had not changed since."""
    rows = true_rows(models.runner(), TOKENS)
    networks = models.networks("trained")
    sequence = drafted_sequence(networks, rows, TOKENS, num_draft_tokens=GAMMA)
    n = sequence.num_rows
    lay_copies(sequence, rows.taps[n - 1], GAMMA + 1)
    expected = DraftSequence(networks, new_memory(networks, 64, GAMMA, 1), TOKENS)
    copies = rows.taps[n - 1 : n].expand(GAMMA + 1, -1, -1)
    kv = rows.decoder_kv[n - 1 : n].expand(GAMMA + 1, -1, -1, -1, -1)
    expected.install(torch.cat((rows.taps[:n], copies)), torch.cat((rows.decoder_kv[:n], kv)))

    def laid(memory_rows: slice, of: DraftSequence) -> list[Heads]:
        cache = of.memory.draft
        layers = range(cache.key.shape[0])
        return [
            Heads(cache.key[i][:, :0], cache.key[i][:, memory_rows], cache.value[i][:, memory_rows]) for i in layers
        ]

    scratch = expected.memory.draft.num_scratch
    ours = laid(slice(0, GAMMA + 1), sequence)
    theirs = laid(slice(scratch + n, scratch + n + GAMMA + 1), expected)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.key, other.key)
        torch.testing.assert_close(mine.value, other.value)

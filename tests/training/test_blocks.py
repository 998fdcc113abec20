"""Blocks of a batch: what a row sees, where it stands, which rows count."""

import numpy as np
import pytest
import torch

from tests.training.texts import CPU, States
from training.blocks import Blocks, ForeseenRows, gather_rows, make_blocks, random_anchors, tiled_anchors
from training.corpus import Batch

NUM_SLOTS = 4
GROUP = 2


@pytest.fixture(scope="module")
def batch(states: States) -> Batch:
    return states.store.batch(states.corpus.sequences[:3], CPU)


@pytest.fixture(scope="module")
def blocks(batch: Batch) -> Blocks:
    anchors, valid = random_anchors(batch, 5, np.random.default_rng(0))
    return make_blocks(batch, anchors, valid, NUM_SLOTS, GROUP)


def test_mask_against_a_naive_construction(batch: Batch, blocks: Blocks) -> None:
    length = batch.token_ids.shape[1]
    num_rows = blocks.positions.shape[1]
    for row in range(3):
        for query in range(num_rows):
            anchor = int(blocks.anchors[row, query // NUM_SLOTS])
            seen = set(torch.isfinite(blocks.mask[row, 0, query]).nonzero().flatten().tolist())
            context = set(range(anchor))  # strictly before the anchor
            first = query - query % NUM_SLOTS
            own = {length + key for key in range(first, query + 1)}  # causal, and nothing of other blocks
            assert seen == context | own


def test_mask_where_states_are_foreseen(batch: Batch) -> None:
    """True keys before a block's start, predicted ones from there to its anchor, and no padding."""
    length = batch.token_ids.shape[1]
    anchors, starts = torch.tensor([[6, 9, 7]]).expand(3, -1), torch.tensor([[4, 9, 5]]).expand(3, -1)
    positions = torch.tensor([[4, 5, 6, 7, 8, 5]]).expand(3, -1)
    is_row = torch.tensor([[True] * 5 + [False]]).expand(3, -1)
    foreseen = ForeseenRows(torch.zeros(3, 6, 2, 4), positions, is_row, starts)
    made = make_blocks(batch, anchors, torch.ones(3, 3, dtype=torch.bool), NUM_SLOTS, GROUP, foreseen=foreseen)
    predicted = [{4, 5}, set(), {5, 6}]
    for query in range(3 * NUM_SLOTS):
        block = query // NUM_SLOTS
        seen = set(torch.isfinite(made.mask[1, 0, query]).nonzero().flatten().tolist())
        context = set(range(int(starts[0, block])))
        own = {length + 6 + key for key in range(block * NUM_SLOTS, query + 1)}
        assert seen == context | {length + place - 4 for place in predicted[block]} | own


def test_mask_is_the_same_for_every_head_of_a_group(blocks: Blocks) -> None:
    rows = blocks.positions.shape[1]
    assert torch.equal(blocks.mask[:, :, :rows], blocks.mask[:, :, rows:])


def test_positions_and_validity(batch: Batch, blocks: Blocks) -> None:
    for row, length in enumerate(batch.lengths):
        for index in range(blocks.positions.shape[1]):
            wanted = int(blocks.anchors[row, index // NUM_SLOTS]) + index % NUM_SLOTS
            if wanted < length:
                assert int(blocks.positions[row, index]) == wanted
            assert bool(blocks.valid[row, index]) == (wanted < length)


def test_padding_blocks_are_not_valid(batch: Batch) -> None:
    anchors = torch.full((3, 2), 5)
    valid = torch.tensor([[True, False], [True, True], [False, False]])
    made = make_blocks(batch, anchors, valid, NUM_SLOTS, GROUP)
    assert torch.equal(made.valid.view(3, 2, NUM_SLOTS).any(-1), valid)


def test_random_anchors_are_distinct_response_positions(batch: Batch) -> None:
    anchors, valid = random_anchors(batch, 6, np.random.default_rng(1))
    for row, (prompt, length) in enumerate(zip(batch.prompt_lens, batch.lengths, strict=True)):
        chosen = anchors[row][valid[row]].tolist()
        assert len(chosen) == len(set(chosen)) == 6
        assert all(prompt <= anchor < length - 1 for anchor in chosen)


def test_tiled_anchors_cover_every_response_token_once(batch: Batch) -> None:
    anchors, valid = tiled_anchors(batch, NUM_SLOTS, np.random.default_rng(2))
    for row, (prompt, length) in enumerate(zip(batch.prompt_lens, batch.lengths, strict=True)):
        starts = anchors[row][valid[row]].tolist()
        covered = [start + slot for start in starts for slot in range(NUM_SLOTS)]
        assert len(covered) == len(set(covered))
        assert set(range(prompt + NUM_SLOTS, length)) <= set(covered)


def test_gather_rows() -> None:
    values = torch.arange(2 * 5 * 3).view(2, 5, 3)
    gathered = gather_rows(values, torch.tensor([[4, 0], [2, 2]]))
    assert torch.equal(gathered, torch.stack((values[0, [4, 0]], values[1, [2, 2]])))

"""States as a drafter has them: which of them are predicted, and from what."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from modeling.layers import RotaryTable
from modeling.target import Target
from tests.tiny.models import make_adapter
from tests.training.texts import CPU, States
from training.blocks import gather_rows, random_anchors
from training.corpus import Batch
from training.foreseen import NUM_FORESEEN, SHARE, StatePredictor, foresee


@pytest.fixture(scope="module")
def predictor(target: Target) -> StatePredictor:
    rotary = RotaryTable(target.architecture, 64, torch.float32, CPU)
    return StatePredictor(make_adapter(target.architecture).requires_grad_(False), target, rotary)


@pytest.fixture(scope="module")
def batch(states: States) -> Batch:
    return states.store.batch(states.corpus.sequences[:4], CPU)


def test_blocks_start_right_before_their_anchors(predictor: StatePredictor, batch: Batch) -> None:
    anchors, _ = random_anchors(batch, 8, np.random.default_rng(0))
    rows = foresee(predictor, batch, anchors, np.random.default_rng(1), share=1.0)
    runs = anchors - rows.starts
    assert int(runs.min()) >= 0
    assert set(range(1, NUM_FORESEEN + 1)) <= set(runs.flatten().tolist())
    for row in range(4):
        there = set(rows.positions[row][rows.valid[row]].tolist())
        for anchor, start in zip(anchors[row].tolist(), rows.starts[row].tolist(), strict=True):
            assert set(range(start, anchor)) <= there, "every state between start and anchor is predicted"
            assert anchor - start <= NUM_FORESEEN


def test_a_share_of_the_blocks_reads_true_states(predictor: StatePredictor, batch: Batch) -> None:
    anchors, _ = random_anchors(batch, 8, np.random.default_rng(0))
    counts = []
    for seed in range(40):
        starts = foresee(predictor, batch, anchors, np.random.default_rng(seed)).starts
        counts.append((starts < anchors).float().mean().item())
    everything = foresee(predictor, batch, anchors, np.random.default_rng(1), share=1.0).starts < anchors
    assert np.mean(counts) == pytest.approx(SHARE * everything.float().mean().item(), abs=0.07)
    assert torch.equal(foresee(predictor, batch, anchors, np.random.default_rng(0), share=0.0).starts, anchors)


def test_predictions_read_no_state_of_their_own_tile(predictor: StatePredictor, batch: Batch) -> None:
    """Where the true states from a tile's first position on change, its own predictions stay, and later ones do not."""
    anchors, _ = random_anchors(batch, 8, np.random.default_rng(0))
    rows = foresee(predictor, batch, anchors, np.random.default_rng(1), share=1.0)
    first = int(rows.starts[0][rows.starts[0] < anchors[0]].min())
    changed = batch.taps.clone()
    changed[0, first:] += 3.0
    again = foresee(predictor, replace(batch, taps=changed), anchors, np.random.default_rng(1), share=1.0)
    is_later = rows.positions[0] >= first + NUM_FORESEEN
    torch.testing.assert_close(again.taps[0][~is_later], rows.taps[0][~is_later])
    assert (again.taps[0] - rows.taps[0])[is_later & rows.valid[0]].abs().amax(-1).min() > 1e-4
    true = gather_rows(batch.taps, rows.positions)
    assert not torch.allclose(rows.taps[rows.valid], true[rows.valid], atol=1e-2)

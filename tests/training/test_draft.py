"""Training of draft models: inputs, teachers, schedules, and that it learns."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from modeling.draft_model import Slots
from modeling.layers import RotaryTable
from modeling.target import Target
from modeling.vocabulary import DraftHead
from tests.tiny.models import VOCAB_SIZE, DraftKind, make_draft_model
from tests.training.texts import CPU, States
from training.blocks import make_blocks, random_anchors
from training.draft import (
    REACH_FLOOR,
    DraftRun,
    PrefixSchedule,
    SlotWeights,
    block_hidden,
    clean_lengths,
    draft_batches,
    draft_loss,
    evaluate_draft,
    noised_inputs,
)
from training.losses import reach_weights

NUM_SLOTS = 4


def make_run(
    target: Target, kind: DraftKind = "random", slots: Slots | None = None, vocabulary: torch.Tensor | None = None
) -> DraftRun:
    model = make_draft_model(kind, target.architecture)
    model.config = replace(model.config, slots=slots or model.config.slots)
    rotary = RotaryTable(model.config.architecture, 64, torch.float32, CPU)
    return DraftRun(model, target, DraftHead(target.head, vocabulary), rotary, NUM_SLOTS, 3, "half_zero")


def test_half_of_the_clean_prefixes_are_empty_and_the_rest_uniform() -> None:
    lengths = clean_lengths("half_zero", 20_000, 8, np.random.default_rng(0))
    counts = np.bincount(lengths, minlength=8) / 20_000
    assert counts[0] == pytest.approx(0.5, abs=0.02)
    assert counts[1:] == pytest.approx(np.full(7, 0.5 / 7), abs=0.01)


def test_geometric_clean_prefixes() -> None:
    counts = np.bincount(clean_lengths("geometric", 40_000, 4, np.random.default_rng(0)), minlength=4)
    assert counts[1:] / counts[:-1] == pytest.approx(np.full(3, 0.8), abs=0.05)


@pytest.mark.parametrize("schedule", get_args(PrefixSchedule))
def test_clean_prefixes_fit_the_block(schedule: PrefixSchedule) -> None:
    for num_slots in (1, 5):
        lengths = clean_lengths(schedule, 500, num_slots, np.random.default_rng(0))
        assert lengths.min() >= 0
        assert lengths.max() <= (0 if schedule == "noise" else num_slots - 1)


def test_inputs_are_true_tokens_then_noise_from_before_the_anchor(states: States, target: Target) -> None:
    run = make_run(target)
    batch = states.store.batch(states.corpus.sequences[:3], CPU)
    # Every position its own id, so that a token tells where it was taken from.
    batch = replace(batch, token_ids=torch.arange(batch.token_ids.shape[1]).expand(3, -1).contiguous())
    anchors, valid = random_anchors(batch, 5, np.random.default_rng(0))
    blocks = make_blocks(batch, anchors, valid, NUM_SLOTS, 2)
    clean = torch.arange(15).view(3, 5) % NUM_SLOTS
    inputs = noised_inputs(run, batch, blocks, clean, np.random.default_rng(1)).view(3, 5, NUM_SLOTS)
    positions = blocks.positions.view(3, 5, NUM_SLOTS)
    seen_noise = set()
    for row in range(3):
        for block in range(5):
            num_true = int(clean[row, block]) + 1  # the anchor and m tokens
            assert torch.equal(inputs[row, block, :num_true], positions[row, block, :num_true])
            noise = inputs[row, block, num_true:].tolist()
            assert all(0 <= place < int(anchors[row, block]) for place in noise)
            seen_noise |= set(noise)
    assert len(seen_noise) > 5


def test_mask_inputs(states: States, target: Target) -> None:
    run = make_run(target, "bidirectional")
    batch = states.store.batch(states.corpus.sequences[:1], CPU)
    blocks = make_blocks(batch, torch.tensor([[6]]), torch.tensor([[True]]), NUM_SLOTS, 2)
    inputs = noised_inputs(run, batch, blocks, torch.tensor([[1]]), np.random.default_rng(0))
    mask = run.model.config.mask_token_id
    assert inputs[0].tolist() == [*batch.token_ids[0, 6:8].tolist(), mask, mask]


@pytest.mark.parametrize("slots", get_args(Slots))
@pytest.mark.parametrize("is_trimmed", [False, True])
@pytest.mark.parametrize("slot_weights", get_args(SlotWeights))
def test_every_slot_is_taught_by_the_right_row(
    states: States, target: Target, slots: Slots, is_trimmed: bool, slot_weights: SlotWeights
) -> None:
    """The loss against a loop over slots, whose teachers come from the clean text by position."""
    vocabulary = torch.arange(0, VOCAB_SIZE, 2) if is_trimmed else None
    run = replace(make_run(target, slots=slots, vocabulary=vocabulary), slot_weights=slot_weights)
    columns = torch.arange(VOCAB_SIZE) if vocabulary is None else vocabulary
    batch = states.store.batch(states.corpus.sequences[:3], CPU)
    anchors, valid = random_anchors(batch, 4, np.random.default_rng(0))
    blocks = make_blocks(batch, anchors, valid, NUM_SLOTS, 2)
    loss = draft_loss(run, batch, blocks, np.random.default_rng(5))

    generator = np.random.default_rng(5)
    clean = torch.from_numpy(clean_lengths("half_zero", 12, NUM_SLOTS, generator)).view(3, 4)
    hidden = block_hidden(run, batch, blocks, noised_inputs(run, batch, blocks, clean, generator))
    losses, weights = [], []
    for row, length in enumerate(batch.lengths):
        for block in range(4):
            block_weights: list[float] = []
            reach = 1.0  # the drafter's own probability of the text's tokens before the draft, given ones apart
            for slot in range(NUM_SLOTS):
                here = int(anchors[row, block]) + slot
                taught_by = here if slots == "shifted" else here - 1  # the row whose next token the slot predicts
                if here >= length or (slots == "in_place" and slot == 0):
                    continue
                teacher = F.linear(batch.last[row, taught_by], target.head[columns]).softmax(-1)
                student = F.linear(hidden[row, block * NUM_SLOTS + slot], target.head[columns]).log_softmax(-1)
                losses.append((teacher * (teacher.log() - student)).sum())
                block_weights.append(1.0 if slot_weights == "uniform" else REACH_FLOOR + (1 - REACH_FLOOR) * reach)
                drafted = taught_by + 1
                if drafted < length and drafted - int(anchors[row, block]) > int(clean[row, block]):
                    column = (columns == batch.token_ids[row, drafted]).nonzero()
                    reach *= student[column[0, 0]].exp().item() if len(column) else 0.0
            total = 1.0 if slot_weights == "uniform" else sum(block_weights)  # by reach every block counts the same
            weights += [weight / total for weight in block_weights]
    wanted = (torch.stack(losses) * torch.tensor(weights)).sum() / sum(weights)
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-5)


def test_a_slot_weighs_as_much_as_a_round_gets_so_far() -> None:
    chosen = torch.tensor([[0.5, 0.5, 0.0, 0.9]]).expand(3, -1)
    weights = reach_weights(chosen, torch.tensor([0, 1, 3]), floor=0.0)
    assert weights.tolist() == [[1, 0.5, 0.25, 0], [1, 1, 0.5, 0], [1, 1, 1, 1]]
    assert reach_weights(chosen, torch.tensor([0, 1, 3]), floor=0.2)[0].tolist() == pytest.approx([1, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("slots", get_args(Slots))
def test_training_lowers_the_loss_and_raises_the_acceptance(states: States, target: Target, slots: Slots) -> None:
    torch.manual_seed(0)
    run = make_run(target, slots=slots)
    before = evaluate_draft(run, states.store, states.corpus.sequences[:20])
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=3e-3)
    generator = np.random.default_rng(0)
    losses = []
    for _, (batch, blocks) in zip(
        range(60), draft_batches(run, states.store, states.corpus.sequences[20:], 200, 0), strict=False
    ):
        loss = draft_loss(run, batch, blocks, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])
    after = evaluate_draft(run, states.store, states.corpus.sequences[:20])
    # In place, a block learns to copy its inputs before it learns to predict: a minute is too short for its acceptance.
    assert after.tau[1] > before.tau[1] + (0.3 if slots == "shifted" else 0.0)


def test_acceptance_counts_the_bonus_and_stops_at_the_first_error(states: States, target: Target) -> None:
    """A drafter of the rule: the texts follow it up to their end, so nearly every block is right to its last slot."""
    rule = evaluate_draft(make_run(target, "trained"), states.store, states.corpus.sequences[:20])
    assert len(rule.tau) == 4
    assert rule.tau == sorted(rule.tau)
    assert 1.8 < rule.tau[0] <= 5
    assert rule.tau[3] > 4
    assert "J0" in rule.line() and "J3" in rule.line()
    # Taught in place, the same network is always a token behind.
    behind = evaluate_draft(make_run(target, "trained", "in_place"), states.store, states.corpus.sequences[:20])
    assert behind.tau[0] < 1.2

"""Losses of DFlash, DSpark and Domino against plain loops, what a block sees, and that all of them learn."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.draft_model import Slots
from modeling.heads import CorrectionHead, GruConfig, HeadConfig, MarkovConfig, SlotCorrector
from modeling.layers import RotaryTable
from modeling.target import Target
from modeling.vocabulary import DraftHead
from tests.tiny.models import VOCAB_SIZE, make_draft_model
from tests.training.texts import CPU, States
from training.baselines import (
    LabelRule,
    Labels,
    default_slot_decay,
    dflash_loss,
    domino_loss,
    dspark_loss,
    evaluate_head,
)
from training.blocks import Blocks, make_blocks, random_anchors
from training.corpus import Batch
from training.draft import (
    DraftRun,
    block_hidden,
    draft_batches,
    draft_loss,
    evaluate_draft,
    held_out_blocks,
    noised_inputs,
)
from training.losses import slot_weights
from training.train_head import new_head

NUM_SLOTS = 4
DECAY = 2.5
KEPT = torch.arange(0, VOCAB_SIZE, 2)
HEADS: list[HeadConfig] = [MarkovConfig(rank=6), GruConfig(state_size=10, bottleneck=8)]


def make_run(target: Target, slots: Slots = "shifted", vocabulary: Tensor | None = None) -> DraftRun:
    model = make_draft_model("bidirectional", target.architecture)
    model.config = replace(model.config, slots=slots, block_size=NUM_SLOTS)
    rotary = RotaryTable(model.config.architecture, 64, torch.float32, CPU)
    return DraftRun(model, target, DraftHead(target.head, vocabulary), rotary, NUM_SLOTS, 3, "noise")


def make_corrector(run: DraftRun, config: HeadConfig, *, is_new: bool = False) -> SlotCorrector:
    torch.manual_seed(2)
    head: CorrectionHead = new_head(config, run.head.token_ids.numel(), run.target.architecture.hidden_size)
    for parameter in [] if is_new else head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return SlotCorrector(head, run.head, run.target.embedding)


def some_blocks(run: DraftRun, states: States) -> tuple[Batch, Blocks]:
    """Blocks of which some reach beyond the end of their text, and some are padding."""
    batch = states.store.batch(states.corpus.sequences[:3], CPU)
    anchors, valid = random_anchors(batch, 7, np.random.default_rng(0))
    anchors[0, -1] = batch.lengths[0] - 2
    valid[1, 2] = False
    config = run.model.config
    return batch, make_blocks(batch, anchors, valid, NUM_SLOTS, 2, causal=config.causal)


def plain_terms(
    run: DraftRun, batch: Batch, blocks: Blocks, labels: Labels, corrector: SlotCorrector | None
) -> dict[str, float]:
    """Weighted means over all drafts, one at a time: cross-entropy of base and corrected rows, L1 of the latter."""
    inputs = noised_inputs(run, batch, blocks, torch.zeros_like(blocks.anchors), np.random.default_rng(0))
    hidden = block_hidden(run, batch, blocks, inputs)
    first = 0 if run.model.config.slots == "shifted" else 1
    known = {int(token): column for column, token in enumerate(run.head.token_ids)}
    sums = {"base": 0.0, "final": 0.0, "labels": 0.0, "l1": 0.0, "slots": 0.0}
    for row, length in enumerate(batch.lengths):
        for block in range(blocks.anchors.shape[1]):
            anchor = int(blocks.anchors[row, block])
            if not blocks.valid[row, block * NUM_SLOTS]:
                continue
            state = None if corrector is None else corrector.begin(1)
            for draft in range(NUM_SLOTS - first):
                here = anchor + draft  # the token before the draft
                z = hidden[row, block * NUM_SLOTS + first + draft]
                base = F.linear(z, run.target.head[run.head.token_ids])
                final = base
                if corrector is not None and here < length:
                    assert state is not None
                    corrected = corrector.correct(draft, base[None], z[None], batch.token_ids[row, here][None], state)
                    final, state = corrected.logits[0], corrected.state
                if here + 1 >= length:
                    continue
                weight = float(np.exp(-draft / DECAY))
                teacher = F.linear(batch.last[row, here], run.target.head[run.head.token_ids])
                sums["l1"] += weight * float((final.softmax(-1) - teacher.softmax(-1)).abs().sum())
                sums["slots"] += weight
                token = int(batch.token_ids[row, here + 1])
                column = int(teacher.argmax()) if labels == "greedy" else known.get(token)
                if column is not None:
                    sums["base"] -= weight * float(base.log_softmax(-1)[column])
                    sums["final"] -= weight * float(final.log_softmax(-1)[column])
                    sums["labels"] += weight
    return {
        "base": sums["base"] / sums["labels"],
        "final": sums["final"] / sums["labels"],
        "l1": sums["l1"] / sums["slots"],
    }


@pytest.mark.parametrize("slots", get_args(Slots))
@pytest.mark.parametrize("labels", get_args(Labels))
@pytest.mark.parametrize("vocabulary", [None, KEPT], ids=["full", "trimmed"])
def test_losses_against_plain_loops(
    states: States, target: Target, slots: Slots, labels: Labels, vocabulary: Tensor | None
) -> None:
    run = make_run(target, slots, vocabulary)
    batch, blocks = some_blocks(run, states)
    rule = LabelRule(labels, DECAY)
    with torch.no_grad():
        plain = plain_terms(run, batch, blocks, labels, None)
        assert dflash_loss(run, batch, blocks, rule).item() == pytest.approx(plain["base"], rel=1e-4)
        for config in HEADS:
            corrector = make_corrector(run, config)
            plain = plain_terms(run, batch, blocks, labels, corrector)
            dspark = dspark_loss(run, corrector, batch, blocks, rule).item()
            assert dspark == pytest.approx(0.1 * plain["final"] + 0.9 * plain["l1"], rel=1e-4)
            domino = domino_loss(run, corrector, batch, blocks, rule, 0.25).item()
            assert domino == pytest.approx(0.75 * plain["final"] + 0.25 * plain["base"], rel=1e-4)
            assert abs(plain["final"] - plain["base"]) > 0.01, "the head matters in this test"


def test_slot_weights_fall_by_e_in_as_many_drafts_as_the_decay(target: Target) -> None:
    weights = slot_weights(9, 4.0, CPU)
    assert weights[0] == 1
    assert weights[4].item() == pytest.approx(np.exp(-1))
    config = make_draft_model("bidirectional", target.architecture).config
    assert [default_slot_decay(replace(config, block_size=size)) for size in (16, 10, 8, 4)] == [7, 5, 4, 4]


@pytest.mark.parametrize("causal", [False, True])
def test_a_bidirectional_block_sees_its_later_slots(states: States, target: Target, causal: bool) -> None:
    run = make_run(target)
    run.model.config = replace(run.model.config, causal=causal)
    batch, blocks = some_blocks(run, states)
    inputs = noised_inputs(run, batch, blocks, torch.zeros_like(blocks.anchors), np.random.default_rng(0))
    changed = inputs.clone()
    changed[:, NUM_SLOTS - 1] += 1  # the last slot of every row's first block
    with torch.no_grad():
        before = block_hidden(run, batch, blocks, inputs)
        after = block_hidden(run, batch, blocks, changed)
    earlier = slice(0, NUM_SLOTS - 1)
    assert torch.equal(before[:, earlier], after[:, earlier]) == causal
    assert torch.equal(before[:, NUM_SLOTS:], after[:, NUM_SLOTS:]), "other blocks see nothing of it"
    assert not torch.equal(before[:, NUM_SLOTS - 1], after[:, NUM_SLOTS - 1])


@pytest.mark.parametrize("config", HEADS)
@pytest.mark.parametrize("slots", get_args(Slots))
def test_the_examination_is_what_drafting_left_to_right_gives(
    states: States, target: Target, slots: Slots, config: HeadConfig
) -> None:
    run = make_run(target, slots)
    corrector = make_corrector(run, config)
    held_out = states.corpus.sequences[:12]
    report = evaluate_head(run, corrector, states.store, held_out)
    committed, count = 0.0, 0
    first = 0 if slots == "shifted" else 1
    with torch.no_grad():
        for case in held_out_blocks(run.model.config, NUM_SLOTS, states.store, held_out, CPU):
            b, n, num_drafts = case.wanted.shape
            inputs = noised_inputs(
                run, case.batch, case.blocks, torch.zeros(b, n, dtype=torch.long), np.random.default_rng()
            )
            hidden = block_hidden(run, case.batch, case.blocks, inputs).view(b * n, NUM_SLOTS, -1)[:, first:]
            logits = run.head.logits(hidden)
            tokens = torch.gather(case.batch.token_ids, 1, case.blocks.anchors).flatten()
            state, drafts = corrector.begin(b * n), []
            for index in range(num_drafts):
                corrected = corrector.correct(index, logits[:, index], hidden[:, index], tokens, state)
                state, tokens = corrected.state, run.head.token_ids[corrected.logits.argmax(-1)]
                drafts.append(tokens)
            committed += case.num_committed(torch.stack(drafts, dim=1).view(b, n, -1))
            count += int(case.is_whole.sum())
    assert report.tau == pytest.approx(committed / count)
    assert report.tau >= 1
    assert report.line() == f"tau J0 {report.tau:.3f} backbone {report.backbone_tau:.3f}"


def test_training_dflash_and_jetspec_raises_the_acceptance(states: States, target: Target) -> None:
    rule = LabelRule("corpus", DECAY)
    for causal in (False, True):
        torch.manual_seed(0)
        run = make_run(target)
        run.model.config = replace(run.model.config, causal=causal)
        before = evaluate_draft(run, states.store, states.corpus.sequences[:20], max_passes=0)
        optimizer = torch.optim.AdamW(run.model.parameters(), lr=3e-3)
        losses = []
        pairs = draft_batches(run, states.store, states.corpus.sequences[20:], 200, 0)
        for _, (batch, blocks) in zip(range(60), pairs, strict=False):
            generator = np.random.default_rng(0)
            loss = draft_loss(run, batch, blocks, generator) if causal else dflash_loss(run, batch, blocks, rule)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
        after = evaluate_draft(run, states.store, states.corpus.sequences[:20], max_passes=0)
        assert len(after.tau) == 1
        assert after.tau[0] > before.tau[0] + 0.3


@pytest.mark.parametrize("config", HEADS)
def test_a_head_learns_over_a_frozen_backbone(states: States, target: Target, config: HeadConfig) -> None:
    run = make_run(target)
    run.model.requires_grad_(False)
    corrector = make_corrector(run, config, is_new=True)
    before = evaluate_head(run, corrector, states.store, states.corpus.sequences[:20])
    assert before.tau == before.backbone_tau
    optimizer = torch.optim.AdamW(corrector.head.parameters(), lr=2e-2)
    rule = LabelRule("corpus", DECAY)
    losses = []
    pairs = draft_batches(run, states.store, states.corpus.sequences[20:], 200, 0)
    for _, (batch, blocks) in zip(range(60), pairs, strict=False):
        if isinstance(config, MarkovConfig):
            loss = dspark_loss(run, corrector, batch, blocks, rule)
        else:
            loss = domino_loss(run, corrector, batch, blocks, rule, 0.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:10])
    after = evaluate_head(run, corrector, states.store, states.corpus.sequences[:20])
    assert after.backbone_tau == before.backbone_tau
    # Domino's first draft stays the backbone's, here a random one's: what comes behind it hardly ever counts.
    assert after.tau >= before.tau + (0.3 if isinstance(config, MarkovConfig) else 0.0)

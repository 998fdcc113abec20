"""What DFlash, DSpark and Domino learn (facts.md, section 2), and how their drafts are examined.

All read the anchor and masks in one pass of a draft model; DSpark and Domino add a head, which is taught with the true
tokens before each slot. It does not know where networks and texts come from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from modeling.draft_model import DraftConfig
from modeling.heads import SlotCorrector
from training.blocks import Blocks, gather_rows
from training.corpus import Batch, CorpusSequence, StateStore
from training.draft import (
    DraftRun,
    block_hidden,
    draft_slots,
    held_out_blocks,
    noised_inputs,
)
from training.losses import absolute_difference, cross_entropy, slot_weights

Labels = Literal["corpus", "greedy"]


def default_slot_decay(config: DraftConfig) -> float:
    """γ_w of published DFlash and Domino trainings for a block size: 7 at 16, 5 at 10, 4 at 8 and below."""
    if config.block_size >= 16:
        return 7.0
    return 5.0 if config.block_size >= 10 else 4.0


@dataclass(frozen=True)
class LabelRule:
    """Which token a draft should be, and how fast the weight of later drafts falls.

    corpus: the text's token. greedy: the target's most likely one, which differs in texts that were sampled.
    """

    labels: Labels
    slot_decay: float


@dataclass(frozen=True)
class TaughtBlocks:
    """R blocks of D drafts. hidden [R, D, hidden]: the backbone's normed rows. previous [R, D]: true tokens before.

    columns [R, D]: the label's column, -1 where the draft vocabulary or the text lacks it. is_taught [R, D]: there is a
    label, in the vocabulary or not. teacher [R, D, hidden]: the target's normed rows. weights [R, D].
    """

    hidden: Tensor
    previous: Tensor
    columns: Tensor
    is_taught: Tensor
    teacher: Tensor
    weights: Tensor


def taught_blocks(run: DraftRun, batch: Batch, blocks: Blocks, rule: LabelRule) -> TaughtBlocks:
    """One backbone pass over all blocks of a batch, with what each draft should say."""
    b, n = blocks.anchors.shape
    slots = draft_slots(run.model.config, batch, blocks)
    hidden = block_hidden(run, batch, blocks, _masked_inputs(run, batch, blocks))
    hidden = hidden.view(b * n, run.num_slots, -1)[:, slots.first :]
    before = slots.before.flatten(1)
    teacher = gather_rows(batch.last, before).view_as(hidden)
    if rule.labels == "greedy":
        columns = run.head.logits(teacher).argmax(-1)
    else:
        columns = run.head.columns[slots.text(batch)].view(b * n, -1)
    is_taught = slots.has_token.flatten(0, 1)
    return TaughtBlocks(
        hidden=hidden,
        previous=gather_rows(batch.token_ids, before).view(b * n, -1),
        columns=columns.where(is_taught, -1),
        is_taught=is_taught,
        teacher=teacher,
        weights=slot_weights(before.shape[1] // n, rule.slot_decay, hidden.device).expand(b * n, -1),
    )


def _masked_inputs(run: DraftRun, batch: Batch, blocks: Blocks) -> Tensor:
    """The anchor, then masks."""
    no_clean = torch.zeros_like(blocks.anchors)
    return noised_inputs(run, batch, blocks, no_clean, np.random.default_rng(0))


def dflash_loss(run: DraftRun, batch: Batch, blocks: Blocks, rule: LabelRule) -> Tensor:
    """Cross-entropy with hard labels, weights falling along the block."""
    taught = taught_blocks(run, batch, blocks, rule)
    keep = taught.columns >= 0
    return cross_entropy(run.head.logits(taught.hidden[keep]), taught.columns[keep], taught.weights[keep])


def dspark_loss(run: DraftRun, corrector: SlotCorrector, batch: Batch, blocks: Blocks, rule: LabelRule) -> Tensor:
    """.1 · cross-entropy + .9 · ‖p - q‖₁ of the corrected slots, without the confidence head's term."""
    taught = taught_blocks(run, batch, blocks, rule)
    logits = corrector.correct_all(run.head.logits(taught.hidden), taught.hidden, taught.previous)
    keep, known = taught.is_taught, taught.columns >= 0
    label_loss = cross_entropy(logits[known], taught.columns[known], taught.weights[known])
    teacher = run.head.logits(taught.teacher[keep])
    return 0.1 * label_loss + 0.9 * absolute_difference(logits[keep], teacher, taught.weights[keep])


def domino_loss(
    run: DraftRun, corrector: SlotCorrector, batch: Batch, blocks: Blocks, rule: LabelRule, base_weight: float
) -> Tensor:
    """(1 - λ) · cross-entropy of the corrected slots + λ · that of the backbone's own, λ = `base_weight`."""
    taught = taught_blocks(run, batch, blocks, rule)
    keep = taught.columns >= 0
    columns, weights = taught.columns[keep], taught.weights[keep]
    base = run.head.logits(taught.hidden)
    final = corrector.correct_all(base, taught.hidden, taught.previous)
    final_loss = cross_entropy(final[keep], columns, weights)
    return (1 - base_weight) * final_loss + base_weight * cross_entropy(base[keep], columns, weights)


@dataclass(frozen=True)
class HeadReport:
    """Tokens a round on held-out greedy text with true states, bonus included, with the head and without."""

    tau: float
    backbone_tau: float

    def line(self) -> str:
        return f"tau J0 {self.tau:.3f} backbone {self.backbone_tau:.3f}"


@torch.no_grad()
def evaluate_head(
    run: DraftRun, corrector: SlotCorrector, store: StateStore, held_out: Sequence[CorpusSequence]
) -> HeadReport:
    """Drafting left to right: up to the first wrong draft the tokens before a slot are the true ones, and what follows
    it does not count, so that one taught pass says how far each draft goes."""
    with_head, without, count = 0.0, 0.0, 0
    for case in held_out_blocks(run.model.config, run.num_slots, store, held_out, run.target.device):
        taught = taught_blocks(run, case.batch, case.blocks, LabelRule("corpus", 1.0))
        base = run.head.logits(taught.hidden)
        corrected = corrector.correct_all(base, taught.hidden, taught.previous)
        without += case.num_committed(run.head.token_ids[base.argmax(-1)].view_as(case.wanted))
        with_head += case.num_committed(run.head.token_ids[corrected.argmax(-1)].view_as(case.wanted))
        count += int(case.is_whole.sum())
    return HeadReport(with_head / max(count, 1), without / max(count, 1))

"""Blocks of `dspark` and `domino`: the backbone's one pass, then a small head that fixes one draft after the other."""

import torch

from draft_worker.block import DraftBlock
from draft_worker.refinement import opened, slot_rows
from draft_worker.sequence import DraftSequence
from modeling.heads import SlotCorrector


@torch.inference_mode()
def corrected_block(
    sequence: DraftSequence,
    corrector: SlotCorrector,
    anchor: int,
    num_draft_tokens: int,
    generator: torch.Generator,
) -> DraftBlock:
    """A block for the verified anchor: each draft is the argmax of its slot's logits, corrected by the tokens before.

    The published implementations sample here at temperatures above 0; see `draft_worker.methods` for why we do not.
    """
    networks = sequence.networks
    hidden = slot_rows(sequence, opened(sequence, [-1], [anchor], num_draft_tokens, generator))[0]  # [γ, hidden]
    logits = networks.head.logits(hidden)
    previous = torch.tensor([anchor], device=networks.device)
    state = corrector.begin(1)
    token_ids, confidences = [], []
    for index in range(num_draft_tokens):
        slot = slice(index, index + 1)
        corrected = corrector.correct(index, logits[slot], hidden[slot], previous, state)
        state, row = corrected.state, corrected.logits.float()
        top, column = row.max(dim=-1)
        previous = networks.to_token_ids(column)
        token_ids.append(int(previous))
        confidences.append(float((top - row.logsumexp(-1)).exp()))
    return DraftBlock(tuple(token_ids), tuple(confidences))

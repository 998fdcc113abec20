"""Blocks for several outcomes at once: initial draft J0, Jacobi passes, context refresh with anchor replacement.

Rows are independent; all of them share one packed pass. A row's slots before its anchor slot are frozen: fixed
tokens whose
keys come from refreshed features (section 4.3).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draft_worker.foresight import predict
from draft_worker.packing import Packing, pack_outcomes
from draft_worker.sequence import DraftSequence
from modeling.kernels.likeliest import likeliest
from modeling.stack import FrozenRows


@dataclass
class Drafts:
    """R blocks in the making.

    anchors [R]; token_ids [R, γ] drafts d_1..d_γ; confidences [R, γ] the probability each had when it was chosen;
    num_frozen [R]: slots that are context; slot num_frozen holds the row's current anchor. candidates [R, γ, C]: each
    draft's likeliest columns in the pass that chose it, best first, where `num_candidates` asks for them. logits
    [R, γ, W]: of the last pass in which each slot was open, kept where foresight's opinion will be pooled with them.
    """

    packing: Packing
    anchors: Tensor
    token_ids: Tensor
    confidences: Tensor
    num_frozen: Tensor
    feature: Tensor | None = None
    num_candidates: int = 0
    candidates: Tensor | None = None
    logits: Tensor | None = None


@torch.inference_mode()
def begin(
    sequence: DraftSequence,
    num_accepted: Sequence[int],
    anchors: Sequence[int],
    num_draft_tokens: int,
    generator: torch.Generator,
) -> Drafts:
    """J0: one pass over `opened` blocks."""
    drafts = opened(sequence, num_accepted, anchors, num_draft_tokens, generator)
    refine(sequence, drafts)
    return drafts


@torch.inference_mode()
def opened(
    sequence: DraftSequence,
    num_accepted: Sequence[int],
    anchors: Sequence[int],
    num_draft_tokens: int,
    generator: torch.Generator,
) -> Drafts:
    """Blocks before any pass: anchors followed by noise drawn from the verified tokens, or by masks."""
    networks, config = sequence.networks, sequence.networks.config
    num_slots = config.num_slots(num_draft_tokens)
    rows = len(anchors)
    packing = pack_outcomes(sequence, num_accepted, num_slots, config.causal)
    if config.inputs == "mask":
        assert config.mask_token_id is not None
        noise = torch.full((rows, num_draft_tokens), config.mask_token_id, device=networks.device)
    else:
        verified = torch.tensor(sequence.token_ids)
        drawn = torch.randint(len(verified), (rows, num_draft_tokens), generator=generator)
        noise = verified[drawn].to(networks.device)
    return Drafts(
        packing=packing,
        anchors=torch.tensor(anchors, device=networks.device),
        token_ids=noise,
        confidences=torch.zeros(rows, num_draft_tokens, device=networks.device),
        num_frozen=torch.zeros(rows, dtype=torch.long, device=networks.device),
    )


@torch.inference_mode()
def slot_rows(sequence: DraftSequence, drafts: Drafts) -> Tensor:
    """The draft model's pass over blocks: rows [R, γ, hidden] that the head turns into the logits of d_1..d_γ."""
    networks, memory, packing = sequence.networks, sequence.memory, drafts.packing
    model = networks.model
    hidden = networks.embed(_slot_tokens(drafts).flatten())
    rotary = networks.draft_rotary.at(packing.positions)
    mask = packing.mask(model.config.architecture.group_size, networks.dtype)
    run = networks.stacks.draft.run(hidden, rotary, mask, memory.draft, packing.first_row, _frozen(drafts))
    hidden = model.final(run.hidden).unflatten(0, (packing.num_rows, packing.num_slots))
    first = 0 if networks.config.slots == "shifted" else 1
    drafted: Tensor = hidden[:, first:]
    return drafted


@torch.inference_mode()
def refine(sequence: DraftSequence, drafts: Drafts) -> None:
    """One Jacobi pass over the slots after each row's anchor slot (equation 8)."""
    networks = sequence.networks
    logits = networks.head.logits(slot_rows(sequence, drafts))
    best = likeliest(logits)
    draft_number = torch.arange(1, drafts.token_ids.shape[1] + 1, device=networks.device)
    is_open = draft_number[None, :] > drafts.num_frozen[:, None]
    drafts.token_ids = torch.where(is_open, networks.to_token_ids(best.column), drafts.token_ids)
    drafts.confidences = torch.where(is_open, best.log_p.exp(), drafts.confidences)
    if networks.stacks.adapter is not None:
        drafts.logits = logits if drafts.logits is None else torch.where(is_open[..., None], logits, drafts.logits)
    if drafts.num_candidates:
        several = logits.float().topk(min(drafts.num_candidates, logits.shape[-1])).indices
        before = several if drafts.candidates is None else drafts.candidates
        drafts.candidates = torch.where(is_open[..., None], several, before)


@torch.inference_mode()
def refresh(sequence: DraftSequence, drafts: Drafts, max_slots: int | None = None) -> None:
    """Re-predict the states of every row's draft, and replace its anchor at the first slot the decoder disagrees with.

    Causality makes the rows of frozen slots come out as before, so the first disagreement lies behind them. It usually
    comes early: with `max_slots` only so many slots are predicted, and a row that agrees that far is frozen that far.
    """
    networks = sequence.networks
    num_drafts = drafts.token_ids.shape[1]
    num_slots = drafts.packing.num_slots if max_slots is None else min(max_slots, drafts.packing.num_slots)
    packing = drafts.packing.first_slots(num_slots)
    predicted = predict(sequence, packing, _slot_tokens(drafts)[:, :num_slots].flatten())
    feature = networks.model.feature(predicted.taps).unflatten(0, (packing.num_rows, num_slots))
    drafts.feature = F.pad(feature, (0, 0, 0, drafts.packing.num_slots - num_slots)).flatten(0, 1)
    num_checked = min(num_slots, num_drafts)
    best = likeliest(predicted.logits.unflatten(0, (packing.num_rows, num_slots))[:, :num_checked])
    decoded = networks.to_token_ids(best.column)
    draft_number = torch.arange(1, num_checked + 1, device=networks.device)
    checked = drafts.token_ids[:, :num_checked]
    differs = (decoded != checked) & (draft_number[None, :] > drafts.num_frozen[:, None])
    agreed = num_drafts + 1 if num_checked == num_drafts else num_slots
    first = torch.where(differs, draft_number[None, :], agreed).amin(dim=1)  # [R]
    replaced = differs & (draft_number[None, :] == first[:, None])
    drafts.token_ids[:, :num_checked] = torch.where(replaced, decoded, checked)
    drafts.confidences[:, :num_checked] = torch.where(replaced, best.log_p.exp(), drafts.confidences[:, :num_checked])
    drafts.num_frozen = torch.maximum(first, drafts.num_frozen)


def _slot_tokens(drafts: Drafts) -> Tensor:
    """Input tokens [R, S]: the anchor, then as many drafts as there are slots left."""
    return torch.cat((drafts.anchors[:, None], drafts.token_ids[:, : drafts.packing.num_slots - 1]), dim=1)


def _frozen(drafts: Drafts) -> FrozenRows | None:
    if drafts.feature is None:
        return None
    slot = torch.arange(drafts.packing.num_slots, device=drafts.num_frozen.device)
    is_frozen = slot[None, :] < drafts.num_frozen[:, None]
    return FrozenRows(is_frozen.flatten(), drafts.feature)

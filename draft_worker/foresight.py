"""Foresight (section 4.2): predicted target states of tokens that have not been verified, and what they say comes
next."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_worker.packing import Packing, pack_foresight
from draft_worker.sequence import DraftSequence


@dataclass(frozen=True)
class Foresight:
    """Predicted tapped states [rows, taps, hidden] and log-probabilities [rows, W] of the token after every row."""

    taps: Tensor
    log_p: Tensor


@torch.inference_mode()
def predict(sequence: DraftSequence, packing: Packing, token_ids: Tensor) -> Foresight:
    """Adapter, then decoder, over packed tokens [R*S]; leaves the decoder's keys of these rows in its scratch area."""
    networks, memory = sequence.networks, sequence.memory
    stacks = networks.stacks
    assert stacks.adapter is not None and memory.adapter is not None, "foresight needs an adapter"
    rotary = networks.rotary.at(packing.positions)
    mask = packing.mask(networks.target.group_size, networks.dtype)
    hidden = networks.embed(token_ids)
    predicted = stacks.adapter.run(hidden, rotary, mask, memory.adapter, packing.first_row)
    decoded = stacks.decoder.run(predicted.hidden, rotary, mask, memory.decoder, packing.first_row)
    return Foresight(predicted.taps, networks.decoder.logits(decoded.hidden).float().log_softmax(-1))


@torch.inference_mode()
def foresee(sequence: DraftSequence, block: Sequence[int], *, with_refresh: bool) -> Foresight:
    """Foresight on the block under verification [y0, d_1..d_γ]; its rows become the shared foresight rows of all
    outcomes.

    `with_refresh` also lays down the adapter's context keys of the predicted rows, which only a refresh reads.
    """
    networks, memory, stacks = sequence.networks, sequence.memory, sequence.networks.stacks
    packing = pack_foresight(sequence, len(block))
    foresight = predict(sequence, packing, torch.tensor(block, device=networks.device))
    feature = networks.model.feature(foresight.taps)
    rotary = networks.draft_rotary.at(packing.positions)
    stacks.draft.lay_scratch(feature, rotary, memory.draft, 0)
    if with_refresh:
        assert stacks.adapter is not None and memory.adapter is not None
        stacks.adapter.lay_scratch(foresight.taps, networks.rotary.at(packing.positions), memory.adapter, 0)
    return foresight

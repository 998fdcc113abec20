"""Foresight (section 4.2): predicted target states of tokens that have not been verified, and what they say comes
next."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_worker.packing import Packing, pack_foresight, packed_layer
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
    assert networks.adapter is not None and memory.adapter is not None, "foresight needs an adapter"
    rotary = networks.rotary.at(packing.positions)
    mask = packing.mask(networks.target.group_size, networks.dtype)
    hidden = networks.embed(token_ids)
    taps = []
    for index, placed in enumerate(networks.adapter.placed_layers()):
        hidden = packed_layer(placed.layer, index, memory.adapter, packing, mask, hidden, rotary)
        if placed.is_last:
            taps.append(hidden)
    for index, layer in networks.decoder.placed_layers():
        hidden = packed_layer(layer, index, memory.decoder, packing, mask, hidden, rotary)
    return Foresight(torch.stack(taps, dim=1), networks.decoder.logits(hidden).float().log_softmax(-1))


@torch.inference_mode()
def foresee(sequence: DraftSequence, block: Sequence[int], *, with_refresh: bool) -> Foresight:
    """Foresight on the block under verification [y0, d_1..d_γ]; its rows become the shared foresight rows of all
    outcomes.

    `with_refresh` also lays down the adapter's context keys of the predicted rows, which only a refresh reads.
    """
    networks, memory = sequence.networks, sequence.memory
    packing = pack_foresight(sequence, len(block))
    foresight = predict(sequence, packing, torch.tensor(block, device=networks.device))
    feature = networks.model.feature(foresight.taps)
    rotary = networks.draft_rotary.at(packing.positions)
    for index, layer in enumerate(networks.model.decoder_layers()):
        memory.draft.write_scratch(index, 0, networks.model.context(layer, feature, rotary))
    if with_refresh:
        assert networks.adapter is not None and memory.adapter is not None
        rotary = networks.rotary.at(packing.positions)
        for index, placed in enumerate(networks.adapter.placed_layers()):
            memory.adapter.write_scratch(index, 0, networks.adapter.context(placed, foresight.taps, rotary))
    return foresight

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


@dataclass(frozen=True)
class PredictedRows:
    """Predicted tapped states [rows, taps, hidden], and logits [rows, W] of the token after every row."""

    taps: Tensor
    logits: Tensor


@torch.inference_mode()
def predict(sequence: DraftSequence, packing: Packing, token_ids: Tensor) -> PredictedRows:
    """Adapter, then decoder, over packed tokens [R*S]; leaves the decoder's keys of these rows in its scratch area."""
    networks, memory = sequence.networks, sequence.memory
    stacks = networks.stacks
    assert stacks.adapter is not None and memory.adapter is not None, "foresight needs an adapter"
    rotary = networks.rotary.at(packing.positions)
    mask = packing.mask(networks.target.group_size, networks.dtype)
    hidden = networks.embed(token_ids)
    predicted = stacks.adapter.run(hidden, rotary, mask, memory.adapter, packing.first_row)
    decoded = stacks.decoder.run(predicted.hidden, rotary, mask, memory.decoder, packing.first_row)
    return PredictedRows(predicted.taps, networks.decoder.logits(decoded.hidden))


def foresee(sequence: DraftSequence, block: Sequence[int], *, with_refresh: bool) -> Foresight:
    """Foresight on the block under verification [y0, d_1..d_γ]; its rows become the shared foresight rows of all
    outcomes.

    `with_refresh` also lays down the adapter's context keys of the predicted rows, which only a refresh reads.
    """
    return foresee_blocks(sequence, [block], with_refresh=with_refresh)


@torch.inference_mode()
def foresee_blocks(sequence: DraftSequence, blocks: Sequence[Sequence[int]], *, with_refresh: bool) -> Foresight:
    """Foresight on blocks of one length that might be verified at the same place, one after another in its rows.

    The rows of the first block become the shared foresight rows.
    """
    networks, memory, stacks = sequence.networks, sequence.memory, sequence.networks.stacks
    num_slots = len(blocks[0])
    packing = pack_foresight(sequence, num_slots, len(blocks))
    predicted = predict(sequence, packing, torch.tensor(blocks, device=networks.device).flatten())
    taps, positions = predicted.taps[:num_slots], packing.positions[:num_slots]
    stacks.draft.lay_scratch(networks.model.feature(taps), networks.draft_rotary.at(positions), memory.draft, 0)
    if with_refresh:
        assert stacks.adapter is not None and memory.adapter is not None
        stacks.adapter.lay_scratch(taps, networks.rotary.at(positions), memory.adapter, 0)
    return Foresight(predicted.taps, predicted.logits.float().log_softmax(-1))

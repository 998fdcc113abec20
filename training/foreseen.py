"""States as a drafter has them: true ones up to the block under verification, from there on those an adapter predicts.

A draft model that was only trained on true states meets others when it drafts for an outcome that is not verified yet
(design.md, section 4: row (k, a) reads true features < n, then predicted features n..n+k).
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.adapter import Adapter
from modeling.layers import RotaryTable, block_layer
from modeling.target import Target
from training.blocks import Blocks, ForeseenRows, make_blocks, tiled_anchors
from training.corpus import Batch

NUM_FORESEEN = 5
"""Longest run of predicted states before an anchor: k + 1 for up to 4 accepted drafts, about what rounds accept."""
SHARE = 0.7
"""Of blocks that read predicted states; the rest are as the fallback blocks of misses."""


@dataclass(frozen=True)
class StatePredictor:
    """What predicts states: a frozen adapter, in bf16 autocast where the training is."""

    adapter: Adapter
    target: Target
    rotary: RotaryTable
    bfloat16: bool = False


def predicted_states(adapter: Adapter, target: Target, rotary: RotaryTable, batch: Batch, blocks: Blocks) -> Tensor:
    """States [b, rows, taps, hidden] of blocks' rows, each tap from the prediction of the one below (equation 5)."""
    block_rotary = rotary.at(blocks.positions)
    context_rotary = rotary.span(0, batch.token_ids.shape[1])
    hidden = F.embedding(torch.gather(batch.token_ids, 1, blocks.positions), target.embedding)
    predicted = []
    for placed in adapter.placed_layers():
        context = adapter.context(placed, batch.taps, context_rotary)
        hidden = block_layer(placed.layer, hidden, block_rotary, context, blocks.mask)
        if placed.is_last:
            predicted.append(hidden)
    return torch.stack(predicted, dim=2)


@torch.no_grad()
def foresee(
    predictor: StatePredictor, batch: Batch, anchors: Tensor, generator: np.random.Generator, share: float = SHARE
) -> ForeseenRows:
    """Predictions over the responses, and which of the blocks at `anchors` [b, N] read them: a random `share`, of those
    that lie right behind a tile of foreseen rows."""
    group = predictor.target.architecture.group_size
    tiles = make_blocks(batch, *tiled_anchors(batch, NUM_FORESEEN, generator), NUM_FORESEEN, group)
    with torch.autocast(anchors.device.type, torch.bfloat16, enabled=predictor.bfloat16):
        taps = predicted_states(predictor.adapter, predictor.target, predictor.rotary, batch, tiles)
    is_tile = tiles.valid.unflatten(1, (-1, NUM_FORESEEN))[:, None, :, 0]
    starts = tiles.anchors[:, None, :].where(is_tile & (tiles.anchors[:, None, :] < anchors[:, :, None]), -1).amax(-1)
    is_behind = (starts >= 0) & (anchors - starts <= NUM_FORESEEN)
    is_chosen = torch.from_numpy(generator.random(anchors.shape) < share).to(anchors.device)
    return ForeseenRows(taps.float(), tiles.positions, tiles.valid, starts.where(is_behind & is_chosen, anchors))

"""Blocks of a batch in one packed pass: which rows exist, what they may see, and where their targets are.

Every block row sees the context strictly before its block's anchor and its own block, causally or whole (design.md
section 3).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modeling.layers import grouped_mask
from training.corpus import Batch


@dataclass(frozen=True)
class ForeseenRows:
    """Predicted states of R positions in each sequence, and from where on each block reads them for the true ones.

    taps [b, R, taps, hidden]; positions [b, R]; valid [b, R]: the position exists. starts [b, N]: a block sees true
    states before its start, predicted ones from there to its anchor; none where its start is its anchor.
    """

    taps: Tensor
    positions: Tensor
    valid: Tensor
    starts: Tensor


@dataclass(frozen=True)
class Blocks:
    """N blocks of T slots in each of b sequences, flattened to rows [b, N*T].

    positions: absolute position of each slot. valid: the slot's position exists. mask: additive; true context keys
    first, then those of `foreseen` rows.
    """

    anchors: Tensor  # [b, N]
    positions: Tensor  # [b, N*T], clamped to the sequence where invalid
    valid: Tensor  # [b, N*T]
    mask: Tensor  # [b, 1, group*N*T, L + R + N*T]
    num_slots: int
    foreseen: ForeseenRows | None = None


def make_blocks(
    batch: Batch,
    anchors: Tensor,
    anchor_valid: Tensor,
    num_slots: int,
    group: int,
    *,
    causal: bool = True,
    foreseen: ForeseenRows | None = None,
) -> Blocks:
    """Blocks at `anchors` [b, N]; `anchor_valid` marks the ones that are not padding.

    A slot sees its block's slots up to itself, or all of them where the block is not `causal`; of the context the true
    states before its anchor, unless some of them are `foreseen`.
    """
    device = batch.taps.device
    b, n = anchors.shape
    length = batch.token_ids.shape[1]
    slots = torch.arange(num_slots, device=device)
    positions = (anchors[:, :, None] + slots).reshape(b, n * num_slots)
    lengths = torch.tensor(batch.lengths, device=device)[:, None]
    valid = (positions < lengths) & anchor_valid.repeat_interleave(num_slots, dim=1)
    positions = positions.clamp(max=length - 1)
    row_anchor = anchors.repeat_interleave(num_slots, dim=1)[:, :, None]
    if foreseen is None:
        context = torch.arange(length, device=device) < row_anchor
    else:
        row_start = foreseen.starts.repeat_interleave(num_slots, dim=1)[:, :, None]
        at = foreseen.positions[:, None, :]
        predicted = (at >= row_start) & (at < row_anchor) & foreseen.valid[:, None, :]
        context = torch.cat((torch.arange(length, device=device) < row_start, predicted), dim=-1)
    block = torch.arange(n, device=device).repeat_interleave(num_slots)
    offset = slots.repeat(n)
    own = block[:, None] == block[None, :]
    if causal:
        own = own & (offset[:, None] >= offset[None, :])
    visible = torch.cat((context, own.expand(b, -1, -1)), dim=-1)
    return Blocks(anchors, positions, valid, grouped_mask(visible, group, batch.taps.dtype), num_slots, foreseen)


def tiled_anchors(batch: Batch, num_slots: int, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Anchors that tile every response from a random offset, so that a row is spent on each token once."""
    starts = [int(generator.integers(0, num_slots)) for _ in batch.lengths]
    ranges = [
        np.arange(max(1, prompt + start - num_slots // 2), length, num_slots)
        for prompt, start, length in zip(batch.prompt_lens, starts, batch.lengths, strict=True)
    ]
    return _padded(ranges, batch)


def random_anchors(batch: Batch, count: int, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """`count` random response positions per sequence, at most one block per possible position."""
    ranges = [
        np.sort(
            generator.choice(np.arange(prompt, length - 1), size=min(count, max(1, length - 1 - prompt)), replace=False)
        )
        if length - 1 > prompt
        else np.array([max(1, length - 2)])
        for prompt, length in zip(batch.prompt_lens, batch.lengths, strict=True)
    ]
    return _padded(ranges, batch)


def _padded(ranges: list[np.ndarray], batch: Batch) -> tuple[Tensor, Tensor]:
    widest = max(1, *(len(r) for r in ranges))
    anchors = torch.ones(len(ranges), widest, dtype=torch.long)
    valid = torch.zeros(len(ranges), widest, dtype=torch.bool)
    for row, values in enumerate(ranges):
        anchors[row, : len(values)] = torch.from_numpy(values)
        valid[row, : len(values)] = True
    return anchors.to(batch.taps.device), valid.to(batch.taps.device)


def gather_rows(values: Tensor, positions: Tensor) -> Tensor:
    """values [b, L, ...] at positions [b, rows]: [b, rows, ...]."""
    index = positions.reshape(*positions.shape, *([1] * (values.dim() - 2))).expand(*positions.shape, *values.shape[2:])
    return torch.gather(values, 1, index)

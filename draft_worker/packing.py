"""A packed batch: rows of slots that share the verified prefix, in one attention call a layer.

Keys are laid out as [foresight rows | packed slots | verified prefix]. A slot of row r sees the foresight rows up to
k_r,
the verified prefix, and its own row's slots up to itself. The same mask serves draft model, adapter and decoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_worker.sequence import DraftSequence
from modeling.cache import KeyMask


@dataclass(frozen=True)
class Packing:
    """Where the slots of R rows of S slots stand and what they see.

    first_row: scratch row of the first slot. positions [R*S]. visible [R*S, scratch + num_keys].
    """

    num_rows: int
    num_slots: int
    first_row: int
    num_keys: int
    positions: Tensor
    visible: Tensor

    def first_slots(self, num_slots: int) -> "Packing":
        """The same rows cut to their first slots, which see what they saw."""
        if num_slots == self.num_slots:
            return self
        cut = self.visible.unflatten(0, (self.num_rows, self.num_slots))[:, :num_slots]
        visible = cut.clone()
        for row in range(self.num_rows):
            before, now = self.first_row + row * self.num_slots, self.first_row + row * num_slots
            own = cut[row, :, before : before + num_slots]
            visible[row, :, self.first_row : self.first_row + self.num_rows * self.num_slots] = False
            visible[row, :, now : now + num_slots] = own
        positions = self.positions.unflatten(0, (self.num_rows, self.num_slots))[:, :num_slots].flatten()
        return Packing(self.num_rows, num_slots, self.first_row, self.num_keys, positions, visible.flatten(0, 1))

    def mask(self, group: int, dtype: torch.dtype) -> KeyMask:
        """The mask for a stack whose key heads serve `group` query heads each."""
        return KeyMask(self.visible, group, dtype)


def pack_foresight(sequence: DraftSequence, num_slots: int, num_blocks: int = 1) -> Packing:
    """Blocks under verification: rows of `num_slots` slots from position n on, the first in the foresight rows."""
    positions = (torch.arange(num_slots, device=sequence.networks.device) + sequence.num_rows).repeat(num_blocks)
    return _pack(sequence, [-1] * num_blocks, positions, num_slots, first_row=0, causal=True)


def pack_outcomes(sequence: DraftSequence, num_accepted: Sequence[int], num_slots: int, causal: bool) -> Packing:
    """One row for each outcome (k, a): its anchor at n + k + 1, its context the true rows and foresight rows 0..k.

    An entry of -1 stands for the verified anchor at n, which sees true rows only (fallback block).
    """
    starts = torch.tensor(num_accepted, device=sequence.networks.device) + 1 + sequence.num_rows
    positions = (starts[:, None] + torch.arange(num_slots, device=starts.device)).flatten()
    return _pack(sequence, num_accepted, positions, num_slots, sequence.memory.num_foresight_rows, causal)


def _pack(
    sequence: DraftSequence,
    num_accepted: Sequence[int],
    positions: Tensor,
    num_slots: int,
    first_row: int,
    causal: bool,
) -> Packing:
    memory, num_keys, device = sequence.memory, sequence.num_keys, positions.device
    num_scratch, rows = memory.draft.num_scratch, len(num_accepted)
    visible = torch.zeros(rows, num_slots, num_scratch + num_keys, dtype=torch.bool, device=device)
    accepted = torch.tensor(num_accepted, device=device)
    visible[:, :, : memory.num_foresight_rows] = (
        torch.arange(memory.num_foresight_rows, device=device)[None, None, :] <= accepted[:, None, None]
    )
    own = torch.ones(num_slots, num_slots, dtype=torch.bool, device=device)
    if causal:
        own = own.tril()
    for row in range(rows):
        start = first_row + row * num_slots
        visible[row, :, start : start + num_slots] = own
    visible[:, :, num_scratch : num_scratch + sequence.num_rows] = True
    return Packing(rows, num_slots, first_row, num_keys, positions, visible.flatten(0, 1))

"""Static key/value memory of one sequence for one stack of layers.

Rows of verified positions live behind a fixed scratch area: predicted rows and rows of blocks being drafted go to the
scratch area only, so a prediction can never enter the permanent part. Rejected rows need no erasing: a mask built
from the
length hides them and the next block overwrites them.
"""

from functools import cached_property

import torch
from torch import Tensor

from modeling.architecture import Architecture
from modeling.kernels.attention import CacheKernel, PackedMask
from modeling.kernels.packed import can_pack
from modeling.layers import Heads, attend, attend_in_blocks, grouped_mask

ATTENTION_BLOCK = 256
"""Keys that torch attends to at once on a CPU without kernels of our own; callers offer whole blocks."""


class KeyMask:
    """Which keys of a cache (scratch area, then positions) each row sees, laid out once for all layers that ask.

    visible [rows, keys]; `group` query heads share a key head.
    """

    def __init__(self, visible: Tensor, group: int, dtype: torch.dtype) -> None:
        self._visible = visible
        self._group = group
        self._dtype = dtype

    @property
    def num_keys(self) -> int:
        return self._visible.shape[-1]

    @cached_property
    def packed(self) -> PackedMask:
        """For the kernel."""
        return PackedMask(self._visible)

    @cached_property
    def additive(self) -> Tensor:
        """For torch: [1, group*rows, keys] of 0 and -inf."""
        return grouped_mask(self._visible, self._group, self._dtype)


class KeyValueCache:
    """Keys and values [layers, kv_heads, scratch + positions, head_dim] of one sequence, addresses fixed for life."""

    def __init__(
        self,
        architecture: Architecture,
        num_layers: int,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        num_scratch: int = 0,
    ) -> None:
        shape = (num_layers, architecture.num_kv_heads, num_scratch + num_positions, architecture.head_dim)
        self.num_scratch = num_scratch
        self.num_positions = num_positions
        self.key = torch.zeros(shape, dtype=dtype, device=device)
        self.value = torch.zeros(shape, dtype=dtype, device=device)
        self.kernel = CacheKernel(self.key, self.value) if can_pack(self.key) else None

    def attend(self, layer: int, query: Tensor, mask: KeyMask) -> Tensor:
        """Attention [rows, heads*dim] of query rows [rows, heads, dim] over the keys that the mask lets them see."""
        if self.kernel is not None:
            return self.kernel.attend(layer, query, mask.packed)
        num_positions = mask.num_keys - self.num_scratch
        keys, values = self.keys(layer, num_positions), self.values(layer, num_positions)
        if query.device.type == "cpu":
            return attend_in_blocks(query, keys, values, mask.additive, ATTENTION_BLOCK)
        return attend(query, keys, values, mask.additive)

    def write(self, layer: int, position: int, heads: Heads) -> None:
        """Store rows [rows, kv_heads, dim] of verified positions from `position` on."""
        self.check_verified(position, heads.key.shape[0])
        self.store(layer, self.num_scratch + position, heads)

    def write_scratch(self, layer: int, row: int, heads: Heads) -> None:
        """Store predicted or drafted rows in the scratch area from `row` on."""
        self.check_scratch(row, heads.key.shape[0])
        self.store(layer, row, heads)

    def keep_scratch(self, row: int, position: int, num_rows: int) -> None:
        """Copy scratch rows from `row` on to positions from `position` on: their tokens turned out to be the text."""
        self.check_scratch(row, num_rows)
        self.check_verified(position, num_rows)
        to = self.num_scratch + position
        for rows in (self.key, self.value):
            rows[:, :, to : to + num_rows] = rows[:, :, row : row + num_rows]

    def check_verified(self, position: int, num_rows: int) -> None:
        """That rows of verified positions have room."""
        assert 0 <= position <= self.num_positions - num_rows, "the rows have room behind the scratch area"

    def check_scratch(self, row: int, num_rows: int) -> None:
        """That predicted rows stay where they belong."""
        assert 0 <= row <= self.num_scratch - num_rows, "scratch rows may not reach the verified ones"

    def store(self, layer: int, row: int, heads: Heads) -> None:
        """Rows of either kind, by their row of the whole cache; for callers that have checked which."""
        if self.kernel is not None:
            self.kernel.store(layer, row, heads.key, heads.value)
            return
        stop = row + heads.key.shape[0]
        self.key[layer, :, row:stop] = heads.key.transpose(0, 1)
        self.value[layer, :, row:stop] = heads.value.transpose(0, 1)

    def clear(self) -> None:
        """Forget everything. Needed only after numbers that are none: a mask hides them, but 0 times NaN is NaN."""
        self.key.zero_()
        self.value.zero_()

    def keys(self, layer: int, num_positions: int) -> Tensor:
        """Scratch area and the first positions: [kv_heads, scratch + num_positions, dim], a view."""
        return self.key[layer, :, : self.num_scratch + num_positions]

    def values(self, layer: int, num_positions: int) -> Tensor:
        return self.value[layer, :, : self.num_scratch + num_positions]


def bucket(num_positions: int, size: int, limit: int) -> int:
    """Smallest multiple of `size` that holds `num_positions`, at most `limit`: few shapes instead of one per length."""
    return min(-(-num_positions // size) * size, limit)

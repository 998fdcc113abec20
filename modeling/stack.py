"""Layers that run one after the other over packed rows, each against its layer of one cache: the form drafting uses.

One call where the kernels are, layer by layer elsewhere. Knows no sequences and no tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.cache import KeyMask, KeyValueCache
from modeling.kernels.stack import FusedPlace, FusedStack, PlacedRows
from modeling.layers import DecoderLayer, Heads, Rotary


@dataclass(frozen=True)
class StackedLayer:
    """A layer with its place: the tap it works for, and whether its output is that tap's prediction."""

    layer: DecoderLayer
    tap: int = 0
    is_last: bool = False


@dataclass(frozen=True)
class FrozenRows:
    """Rows that are context: is_frozen [rows]; their keys and values come from feature [rows, hidden]."""

    is_frozen: Tensor
    feature: Tensor


@dataclass(frozen=True)
class StackOutput:
    """Rows behind the last layer [rows, hidden], and behind the last layer of each tap [rows, taps, hidden]."""

    hidden: Tensor
    taps: Tensor


class LayerStack:
    """Frozen layers; build it when they are packed. `normalise_context`: context rows pass the layers' input norm."""

    def __init__(self, layers: Sequence[StackedLayer], *, normalise_context: bool) -> None:
        self._layers = tuple(layers)
        self._normalise_context = normalise_context
        self._num_taps = sum(placed.is_last for placed in layers)
        self._fused = self._fuse()

    def run(
        self,
        hidden: Tensor,
        rotary: Rotary,
        mask: KeyMask,
        cache: KeyValueCache,
        first_row: int,
        frozen: FrozenRows | None = None,
    ) -> StackOutput:
        """Rows [rows, hidden] through all layers; their keys and values go to the scratch area from `first_row` on."""
        cache.check_scratch(first_row, hidden.shape[0])
        taps = hidden.new_empty(hidden.shape[0], self._num_taps, hidden.shape[1])
        if self._fused is None or cache.kernel is None:
            return StackOutput(self._run_each(hidden, rotary, mask, cache, first_row, frozen, taps), taps)
        rows = PlacedRows(
            rotary.cos,
            rotary.sin,
            first_row,
            mask.packed,
            taps if self._num_taps else None,
            None if frozen is None else frozen.feature.contiguous(),
            None if frozen is None else frozen.is_frozen.contiguous(),
        )
        return StackOutput(self._fused.run(hidden, rows, cache.kernel), taps)

    def lay_verified(self, states: Tensor, rotary: Rotary, cache: KeyValueCache, position: int) -> None:
        """Keys and values of true rows at positions from `position` on: states [rows, taps, hidden] of which each layer
        reads its own tap, or [rows, hidden] for all."""
        cache.check_verified(position, states.shape[0])
        self._lay_context(states, rotary, cache, cache.num_scratch + position)

    def lay_scratch(self, states: Tensor, rotary: Rotary, cache: KeyValueCache, first_row: int) -> None:
        """The same for predicted rows, in the scratch area."""
        cache.check_scratch(first_row, states.shape[0])
        self._lay_context(states, rotary, cache, first_row)

    def _lay_context(self, states: Tensor, rotary: Rotary, cache: KeyValueCache, row: int) -> None:
        if self._fused is not None and cache.kernel is not None:
            states = states.contiguous()
            has_taps = states.dim() == 3
            rows = PlacedRows(
                rotary.cos,
                rotary.sin,
                row,
                taps=states if has_taps else None,
                feature=None if has_taps else states,
            )
            self._fused.lay_context(rows, cache.kernel)
            return
        for index, placed in enumerate(self._layers):
            own = states[:, placed.tap] if states.dim() == 3 else states
            cache.store(index, row, placed.layer.context(own, rotary, normalise=self._normalise_context))

    def _run_each(
        self,
        hidden: Tensor,
        rotary: Rotary,
        mask: KeyMask,
        cache: KeyValueCache,
        first_row: int,
        frozen: FrozenRows | None,
        taps: Tensor,
    ) -> Tensor:
        for index, placed in enumerate(self._layers):
            heads = placed.layer.project(hidden, rotary)
            stored = heads if frozen is None else self._with_frozen(placed.layer, heads, rotary, frozen)
            cache.store(index, first_row, stored)
            hidden = placed.layer.finish(hidden, cache.attend(index, heads.query, mask))
            if placed.is_last:
                taps[:, placed.tap] = hidden
        return hidden

    def _with_frozen(self, layer: DecoderLayer, heads: Heads, rotary: Rotary, frozen: FrozenRows) -> Heads:
        context = layer.context(frozen.feature, rotary, normalise=self._normalise_context)
        is_frozen = frozen.is_frozen[:, None, None]
        return Heads(
            heads.query,
            torch.where(is_frozen, context.key, heads.key),
            torch.where(is_frozen, context.value, heads.value),
        )

    def _fuse(self) -> FusedStack | None:
        places = []
        for placed in self._layers:
            halves = placed.layer.fused
            if halves is None:
                return None
            context = halves.normed_context if self._normalise_context else halves.plain_context
            places.append(FusedPlace(halves.whole, context, placed.tap, placed.is_last))
        return FusedStack(places, self._num_taps) if places else None

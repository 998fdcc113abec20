"""Several fused layers over packed rows as one call into the C library.

Between two calls Python needs about as long as a layer with weights of eight bits takes for a few rows.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.kernels.attention import CacheKernel, PackedMask
from modeling.kernels.build import load_kernels
from modeling.kernels.fused import FusedLayer


class _StackLayer(ctypes.Structure):
    """Mirrors `stack_layer` in linear.c."""

    _fields_ = [
        ("whole", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("tap", ctypes.c_long),
        ("is_last", ctypes.c_long),
    ]


class _StackRows(ctypes.Structure):
    """Mirrors `stack_rows` in linear.c."""

    _fields_ = [
        *[(name, ctypes.c_long) for name in ("rows", "first", "num_taps")],
        *[(name, ctypes.c_void_p) for name in ("cos", "sin", "mask", "taps", "is_frozen", "feature")],
    ]


@dataclass(frozen=True)
class FusedPlace:
    """A layer of a stack: whole, for context rows, the tap it works for, and whether its output is that tap's."""

    whole: FusedLayer
    context: FusedLayer
    tap: int
    is_last: bool


@dataclass(frozen=True)
class PlacedRows:
    """Rows on their way through a stack: their rotation cos, sin [rows, 1, dim] and their first row in the cache.

    `mask`: what they see. `taps` [rows, taps, hidden]: filled by a run, read by `lay_context`. `feature` [rows,
    hidden]: where keys and values come from, of all rows for `lay_context`, of those in `is_frozen` [rows] for a run.
    """

    cos: Tensor
    sin: Tensor
    first: int
    mask: PackedMask | None = None
    taps: Tensor | None = None
    feature: Tensor | None = None
    is_frozen: Tensor | None = None


class FusedStack:
    """Runs layers one after the other; layer i keeps its keys and values in layer i of a cache."""

    def __init__(self, places: Sequence[FusedPlace], num_taps: int) -> None:
        library = load_kernels()
        assert library is not None and places, "a stack is fused only where the kernel exists"
        kernel = places[0].whole.kernel
        assert all(p.whole.kernel == kernel == p.context.kernel for p in places), "the layers share their layout"
        self._run = getattr(library, f"jetspec_stack_{kernel}")
        self._lay_context = getattr(library, f"jetspec_stack_context_{kernel}")
        self._places = tuple(places)  # keeps the weights alive
        entries = [_StackLayer(p.whole.address, p.context.address, p.tap, p.is_last) for p in places]
        self._layers = (_StackLayer * len(entries))(*entries)
        self._num_taps = num_taps
        self._cache_layout = places[0].whole.cache_layout

    def run(self, hidden: Tensor, rows: PlacedRows, cache: CacheKernel) -> Tensor:
        """Rows [rows, hidden] behind the last layer; their keys and values are in the cache then."""
        assert rows.mask is not None and rows.mask.num_rows == len(hidden), "the mask is for these rows"
        assert rows.mask.num_keys <= cache.num_keys, "the mask is for this cache"
        hidden = hidden.clone(memory_format=torch.contiguous_format)
        self._check(cache, rows.first, len(hidden))
        arguments = _Arguments(rows, len(hidden), self._num_taps)
        if len(hidden) and self._run(
            self._layers, cache.pointer, len(self._layers), arguments.pointer, hidden.data_ptr()
        ):
            raise MemoryError("no memory for a stack of layers")
        return hidden

    def lay_context(self, rows: PlacedRows, cache: CacheKernel) -> None:
        """Put keys and values of context rows into the cache: of each layer's own tap, or of one feature for all."""
        num_rows = len(rows.cos)
        self._check(cache, rows.first, num_rows)
        arguments = _Arguments(rows, num_rows, self._num_taps)
        if num_rows and self._lay_context(self._layers, cache.pointer, len(self._layers), arguments.pointer):
            raise MemoryError("no memory for a stack of layers")

    def _check(self, cache: CacheKernel, first: int, num_rows: int) -> None:
        assert cache.num_layers == len(self._layers), "the cache has a layer for each of the stack"
        assert cache.layout == self._cache_layout, "the cache's heads are the layers'"
        cache.check_room(first, num_rows)


class _Arguments:
    """The C structure of some rows, and the tensors it points to."""

    def __init__(self, rows: PlacedRows, num_rows: int, num_taps: int) -> None:
        cos, sin = rows.cos.contiguous(), rows.sin.contiguous()
        tensors = (cos, sin, rows.taps, rows.is_frozen, rows.feature)
        assert all(t is None or (t.is_contiguous() and len(t) == num_rows) for t in tensors), "plain rows, one for each"
        assert rows.taps is None or rows.taps.shape[1] == num_taps, "taps are the stack's"
        structure = _StackRows(
            rows=num_rows,
            first=rows.first,
            num_taps=num_taps,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            mask=None if rows.mask is None else rows.mask.address,
            taps=_address(rows.taps),
            is_frozen=_address(rows.is_frozen),
            feature=_address(rows.feature),
        )
        self._kept = (tensors, rows.mask, structure)
        self.pointer = ctypes.byref(structure)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

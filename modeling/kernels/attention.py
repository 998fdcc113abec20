"""Attention against a static key/value cache, and writing to it, as calls into the C library."""

import ctypes

import torch
from torch import Tensor

from modeling.kernels.build import load_kernels

BLOCK = 32


class _CacheLayer(ctypes.Structure):
    """Mirrors `cache_layer` in attention.h."""

    _fields_ = [
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        *[(name, ctypes.c_long) for name in ("head_stride", "kv_heads", "dim", "element_bytes")],
    ]


class _RowMask(ctypes.Structure):
    """Mirrors `row_mask` in attention.h."""

    _fields_ = [("bits", ctypes.c_void_p), ("rows", ctypes.c_long), ("num_keys", ctypes.c_long)]


class PackedMask:
    """Which keys each row sees, visible [rows, keys], as 32 bits for each row and block of 32 keys."""

    def __init__(self, visible: Tensor) -> None:
        library = load_kernels()
        assert library is not None, "a mask is packed only where the kernel exists"
        rows, self.num_keys = visible.shape
        visible = visible.contiguous()
        self._bits = torch.empty(rows, -(-self.num_keys // BLOCK), dtype=torch.int32)
        library.jetspec_pack_mask(visible.data_ptr(), rows, self.num_keys, self._bits.data_ptr())
        self.num_rows = rows
        self._structure = _RowMask(self._bits.data_ptr(), rows, self.num_keys)
        self.address = ctypes.addressof(self._structure)
        self.pointer = ctypes.byref(self._structure)


class CacheKernel:
    """C calls on the keys and values [layers, kv_heads, positions, dim] of one cache, whose addresses never change.

    A row's result depends on the keys it sees and on nothing else: the same bits whatever rows come along, whatever
    the other keys hold, however many there are.
    """

    def __init__(self, key: Tensor, value: Tensor) -> None:
        library = load_kernels()
        assert library is not None, "a cache has a kernel only where it exists"
        suffix = "bf16" if key.dtype == torch.bfloat16 else "fp32"
        self._attend = getattr(library, f"jetspec_attend_{suffix}")
        self._store = library.jetspec_store
        self._dtype = key.dtype
        self._kv_heads, self.num_keys, self._dim = key.shape[1:]
        self.layout = (key.dtype, self._kv_heads, self._dim)
        shape = (self.num_keys * self._dim, self._kv_heads, self._dim, key.element_size())
        entries = [_CacheLayer(k.data_ptr(), v.data_ptr(), *shape) for k, v in zip(key, value, strict=True)]
        array = (_CacheLayer * len(entries))(*entries)
        self._layers = [ctypes.byref(entry) for entry in array]
        self.pointer = ctypes.byref(array)  # all layers, one after the other
        self.num_layers = len(entries)

    def store(self, layer: int, first: int, key: Tensor, value: Tensor) -> None:
        """Write rows [rows, kv_heads, dim] from cache row `first` on."""
        key, value = self._plain(key), self._plain(value)
        assert key.shape == value.shape and key.shape[1:] == (self._kv_heads, self._dim), "rows fit the cache"
        rows = key.shape[0]
        self.check_room(first, rows)
        self._store(self._layers[layer], first, rows, key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0))

    def check_room(self, first: int, num_rows: int) -> None:
        """That rows from `first` on lie within the cache: C does not ask."""
        assert 0 <= first <= self.num_keys - num_rows, "rows have room in the cache"

    def attend(self, layer: int, query: Tensor, mask: PackedMask) -> Tensor:
        """Attention [rows, heads * dim] of query rows [rows, heads, dim] over the mask's keys; zeros for a row that
        sees none."""
        query = self._plain(query)
        rows, heads, dim = query.shape
        assert rows == mask.num_rows and mask.num_keys <= self.num_keys, "the mask is for these rows and this cache"
        assert dim == self._dim and heads % self._kv_heads == 0, "query heads are groups of the cache's heads"
        out = torch.empty(rows, heads * dim, dtype=self._dtype)
        if rows and self._attend(
            self._layers[layer], mask.pointer, query.data_ptr(), query.stride(0), heads, out.data_ptr()
        ):
            raise MemoryError("no memory for attention")
        return out

    def _plain(self, heads: Tensor) -> Tensor:
        """Rows [rows, heads, dim] whose heads lie side by side, as they come out of a projection; copied if not."""
        assert heads.dtype == self._dtype, "rows and cache have one dtype"
        return heads if heads.stride()[1:] == (self._dim, 1) else heads.contiguous()

"""The two halves of a decoder layer as single calls into the C library: everything before attention, everything after.

Saves the twenty small tensor operations a layer otherwise costs, which at a few rows take as long as a third of the
weights.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.kernels.build import load_kernels
from modeling.kernels.packed import PackedWeight


class _LayerWeights(ctypes.Structure):
    """Mirrors `layer_weights` in linear.c."""

    _fields_ = [
        *[
            (name, ctypes.c_void_p)
            for name in (
                "input_norm",
                "qkv",
                "qkv_bias",
                "q_norm",
                "k_norm",
                "out",
                "post_norm",
                "gate_up",
                "down",
            )
        ],
        *[(name, ctypes.c_long) for name in ("hidden", "intermediate", "heads", "kv_heads", "dim", "query_width")],
        ("eps", ctypes.c_float),
    ]


@dataclass(frozen=True)
class LayerParts:
    """What a fused half needs; matrices it does not use, and absent vectors, are None."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    dim: int
    query_width: int
    eps: float
    qkv: PackedWeight
    input_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    out: PackedWeight | None = None
    post_norm: Tensor | None = None
    gate_up: PackedWeight | None = None
    down: PackedWeight | None = None


class FusedLayer:
    """Calls the C halves for one layer's frozen weights; bit-identical for a row whatever rows come along."""

    def __init__(self, parts: LayerParts) -> None:
        library = load_kernels()
        assert library is not None, "a layer is fused only where the kernel exists"
        kernel = parts.qkv.kernel
        matrices = (parts.out, parts.gate_up, parts.down)
        assert all(part is None or part.kernel == kernel for part in matrices), "a layer's matrices share their layout"
        self._project = getattr(library, f"jetspec_project_{kernel}")
        self._finish = getattr(library, f"jetspec_finish_{kernel}")
        self._parts = parts  # keeps the tensors alive
        self._dtype = parts.qkv.dtype
        self._weights = _LayerWeights(
            **{
                name: _address(getattr(parts, name))
                for name in ("input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "post_norm", "gate_up", "down")
            },
            hidden=parts.hidden,
            intermediate=parts.intermediate,
            heads=parts.heads,
            kv_heads=parts.kv_heads,
            dim=parts.dim,
            query_width=parts.query_width,
            eps=parts.eps,
        )
        self._pointer = ctypes.byref(self._weights)
        self.address = ctypes.addressof(self._weights)
        self.kernel = kernel
        self.cache_layout = (self._dtype, parts.kv_heads, parts.dim)

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turned heads and values [rows, heads + 2 kv_heads, dim] of rows [rows, hidden]; cos, sin [rows, 1, dim]."""
        assert hidden.dim() == 2, "fused layers take flat rows"
        parts, rows = self._parts, hidden.shape[0]
        hidden, cos, sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
        out = torch.empty(rows, parts.heads + 2 * parts.kv_heads, parts.dim, dtype=self._dtype)
        if rows and self._project(
            self._pointer, hidden.data_ptr(), rows, cos.data_ptr(), sin.data_ptr(), out.data_ptr()
        ):
            raise MemoryError("no memory for a layer")
        return out

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Rows [rows, hidden] after output projection, MLP and both residuals; attended [rows, heads * dim]."""
        rows = residual.shape[0]
        residual, attended = residual.contiguous(), attended.contiguous()
        out = torch.empty_like(residual)
        if rows and self._finish(self._pointer, residual.data_ptr(), attended.data_ptr(), rows, out.data_ptr()):
            raise MemoryError("no memory for a layer")
        return out


def _address(part: Tensor | PackedWeight | None) -> int | None:
    if part is None:
        return None
    return part.pointer if isinstance(part, PackedWeight) else part.data_ptr()

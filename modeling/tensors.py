"""Tensors as raw bytes and back, for whoever carries them; no serializer that could run code."""

from typing import Literal

import torch
from torch import Tensor

DtypeName = Literal["float32", "bfloat16", "float16", "int64", "int32", "uint8"]

DTYPE_NAMES: dict[torch.dtype, DtypeName] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.uint8: "uint8",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def to_bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements in row-major order; a view of a CPU tensor where it is contiguous."""
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def from_bytes(
    dtype: str, shape: tuple[int, ...], data: bytes | bytearray | memoryview, device: torch.device
) -> Tensor:
    """The inverse of `to_bytes`, in memory of its own. The length must fit the shape; raises ValueError otherwise."""
    tensor = torch.empty(shape, dtype=DTYPES[dtype])
    if len(data) != tensor.numel() * tensor.element_size():
        raise ValueError(f"{len(data)} bytes are no {dtype} tensor of shape {shape}")
    if len(data):
        tensor.view(-1).view(torch.uint8).numpy().data[:] = memoryview(data).cast("B")
    return tensor.to(device)

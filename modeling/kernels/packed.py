"""A weight matrix laid out for the row-independent kernel, and the one place where a linear map chooses its kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling.kernels.build import PANEL, load_kernels
from modeling.kernels.int8 import Quantization, int8_panels


def kernel_name(dtype: torch.dtype, quantization: Quantization) -> str:
    """What the C functions for rows of a dtype and such weights are called."""
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    return name if quantization == "none" else f"{name}_{quantization}"


class PackedWeight:
    """A frozen [outputs, depth] matrix in panels of 32 outputs; calling it maps rows [..., depth] to [..., outputs].

    `dtype` is that of the rows; `panels` [panels, ...] hold the elements as the kernel reads them.
    """

    def __init__(self, panels: Tensor, shape: torch.Size, dtype: torch.dtype, quantization: Quantization) -> None:
        library = load_kernels()
        assert library is not None, "a weight is packed only where the kernel exists"
        self.kernel = kernel_name(dtype, quantization)
        self._function = getattr(library, f"jetspec_linear_{self.kernel}")
        self._panels = panels
        self._quantization = quantization
        self.pointer = panels.data_ptr()
        self.shape = shape
        self.dtype = dtype

    def __call__(self, rows: Tensor) -> Tensor:
        outputs, depth = self.shape
        flat = rows.reshape(-1, depth).contiguous()
        assert flat.dtype == self.dtype, "rows and weight have one dtype"
        out = torch.empty(flat.shape[0], outputs, dtype=self.dtype)
        if flat.shape[0] and self._function(
            flat.data_ptr(), flat.shape[0], depth, self.pointer, outputs, out.data_ptr(), outputs
        ):
            raise MemoryError("no memory for a matrix product")
        return out.view(*rows.shape[:-1], outputs)

    def rows_from(self, start: int) -> "PackedWeight | None":
        """The outputs from `start` on, sharing memory; None where a panel would have to be cut."""
        outputs, depth = self.shape
        if start % PANEL:
            return None
        shape = torch.Size((outputs - start, depth))
        return PackedWeight(self._panels[start // PANEL :], shape, self.dtype, self._quantization)


Weight = nn.Parameter | Tensor | PackedWeight


def linear(rows: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """rows [..., depth] times a weight [outputs, depth], packed or not."""
    if isinstance(weight, PackedWeight):
        out = weight(rows)
        return out if bias is None else out + bias
    return F.linear(rows, weight, bias)


def can_pack(weight: Tensor) -> bool:
    """Whether the kernel exists here for this weight's device and dtype."""
    return (
        weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float32) and load_kernels() is not None
    )


def pack(weight: Tensor, quantization: Quantization = "none") -> PackedWeight:
    """Lay a weight out in panels: [panels, depth, 32], bf16 outputs i and 16 + i side by side, or quantise it."""
    if quantization == "int8":
        return PackedWeight(int8_panels(weight), weight.shape, weight.dtype, quantization)
    outputs, depth = weight.shape
    padded = F.pad(weight.detach(), (0, 0, 0, -outputs % PANEL))
    panels = padded.view(-1, PANEL, depth).transpose(1, 2)  # [panels, depth, 32]
    if weight.dtype == torch.bfloat16:
        panels = panels.reshape(-1, depth, 2, PANEL // 2).transpose(2, 3)
    return PackedWeight(panels.contiguous(), weight.shape, weight.dtype, quantization)


def unpacked(weight: Weight) -> Tensor:
    """The plain matrix behind a weight that has not been packed."""
    assert isinstance(weight, Tensor), "a packed weight cannot be read back"
    return weight


def pack_parameters(module: nn.Module, names: tuple[str, ...], quantization: Quantization = "none") -> None:
    """Replace parameters of a module by their packed form, freeing the plain ones."""
    for name in names:
        packed = pack(getattr(module, name), quantization)
        delattr(module, name)
        setattr(module, name, packed)

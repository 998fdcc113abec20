"""Weights of eight bits for networks whose output may be a little off: what drafts can never change a token.

One scale an output; rows are quantised inside the kernel, in groups of 64 values. Knows nothing of files: a checkpoint
stays as it was published, and is quantised when it is packed.
"""

import logging
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.kernels.build import PANEL, load_kernels

logger = logging.getLogger("jetspec.kernels")

Quantization = Literal["none", "int8"]
"""How the elements of a packed weight are stored: as in the checkpoint, or quantised."""

QuantizationChoice = Literal["auto", "none", "int8"]

GROUP = 64
QUAD = 4
LEVELS = 127
OFFSET = 128


def has_int8() -> bool:
    """Whether there is a kernel for weights of eight bits here: it needs VNNI instructions."""
    return hasattr(load_kernels(), "jetspec_linear_fp32_int8")


def choose_quantization(name: QuantizationChoice, device: torch.device) -> Quantization:
    """`auto`: int8 where it makes drafting faster. Where the kernel is missing, int8 falls back to none."""
    if name != "none" and device.type == "cpu" and has_int8():
        return "int8"
    if name == "int8":
        logger.warning("int8 weights need a CPU with AVX-512 VNNI and a C compiler; drafting with unquantised ones")
    return "none"


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes [outputs, depth] and scales [outputs] with weight ≈ scale * (byte - 128)."""
    wide = weight.detach().float()
    scale = wide.abs().amax(dim=1) / LEVELS
    levels = (wide / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round()
    return (levels + OFFSET).to(torch.uint8), scale


def int8_panels(weight: Tensor) -> Tensor:
    """A weight [outputs, depth], quantised, as panels of bytes: [groups][16][32 outputs][4], then 32 fp32 scales."""
    outputs, depth = weight.shape
    levels, scale = quantise(weight)
    levels = F.pad(levels, (0, -depth % GROUP, 0, -outputs % PANEL))
    panels = levels.view(-1, PANEL, levels.shape[1] // QUAD, QUAD).transpose(1, 2).flatten(1)
    scales = F.pad(scale, (0, -outputs % PANEL)).view(-1, PANEL).view(torch.uint8)
    return torch.cat((panels, scales), dim=1)

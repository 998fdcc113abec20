"""The likeliest token of rows of logits with its probability, in one reading of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.kernels.build import load_kernels


@dataclass(frozen=True)
class Likeliest:
    """column [...] of the largest logit, the first of equals, and its log-probability log_p [...] in fp32."""

    column: Tensor
    log_p: Tensor


def likeliest(logits: Tensor) -> Likeliest:
    """Of logits [..., W]."""
    library = load_kernels()
    if library is None or logits.device.type != "cpu" or logits.dtype not in (torch.bfloat16, torch.float32):
        wide = logits.float()
        top, column = wide.max(dim=-1)
        return Likeliest(column, top - wide.logsumexp(-1))
    logits = logits.contiguous()
    width = logits.shape[-1]
    column = torch.empty(logits.shape[:-1], dtype=torch.int64)
    log_p = torch.empty(logits.shape[:-1], dtype=torch.float32)
    suffix = "bf16" if logits.dtype == torch.bfloat16 else "fp32"
    function = getattr(library, f"jetspec_likeliest_{suffix}")
    function(logits.data_ptr(), column.numel(), width, column.data_ptr(), log_p.data_ptr())
    return Likeliest(column, log_p)

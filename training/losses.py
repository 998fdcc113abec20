"""Losses of drafting, as pure functions of logits: weighted means over slots."""

import torch
import torch.nn.functional as F
from torch import Tensor


def slot_weights(num_drafts: int, decay: float, device: torch.device) -> Tensor:
    """Weights exp(-(k-1)/decay) of drafts k = 1..num_drafts: an early error costs a block more than a late one."""
    return torch.exp(-torch.arange(num_drafts, dtype=torch.float32, device=device) / decay)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Mean of values [rows] under weights [rows]; 0 where there are none."""
    return (values * weights).sum() / weights.sum().clamp(min=1e-9)


def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Cross-entropy of logits [rows, W] with column labels [rows]."""
    return weighted_mean(F.cross_entropy(logits.float(), labels, reduction="none"), weights)


def absolute_difference(logits: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
    """‖p - q‖₁ of the distributions of two rows of logits [rows, W]: twice the total variation, as DSpark weighs it."""
    difference = logits.float().softmax(-1) - teacher.float().softmax(-1)
    return weighted_mean(difference.abs().sum(-1), weights)


def forward_kl(logits: Tensor, teacher: Tensor, weights: Tensor | None = None) -> Tensor:
    """KL(teacher ‖ student) of rows of logits [rows, W], mean over rows, or their mean under `weights` [rows]."""
    student = logits.float().log_softmax(-1)
    teacher = teacher.float().log_softmax(-1)
    divergence = F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    return divergence.mean() if weights is None else weighted_mean(divergence, weights)


@torch.no_grad()
def reach_weights(chosen: Tensor, clean: Tensor, floor: float) -> Tensor:
    """Weights [..., D] of drafts: the probability, by the drafter itself, that a round gets as far as each of them.

    chosen [..., D]: probability that a draft is the token of the text. clean [...]: tokens that the block was given,
    which need no drafting. Draft d counts as often as drafts clean..d-1 are all right, and never less than `floor`: a
    round ends at its first wrong draft, so what stands behind one matters only where it was right.
    """
    given = torch.arange(chosen.shape[-1], device=chosen.device) < clean[..., None]
    reach = chosen.where(~given, 1).cumprod(-1).roll(1, -1)
    reach[..., 0] = 1
    return floor + (1 - floor) * reach

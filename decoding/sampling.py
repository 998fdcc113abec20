"""One token from one row of logits: the inverse CDF of the processed distribution.

Processing is temperature, then top-k, then top-p, then min-p. A call sees one row only, so a draw
cannot depend on the rows beside it, and every sum is taken in an order that depends on the row's
length alone. Knows nothing of drafts, penalties or grammars: callers edit the logits before.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from decoding.uniforms import uniform

_SUM_BLOCK = 256
_FIRST_NUCLEUS_GUESS = 64
_NUCLEUS_GROWTH = 16


class DegenerateDistribution(ValueError):
    """The logits give no token a positive, finite weight."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How a row of logits becomes a distribution. A top_k of 0 keeps every token."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in [0, 2**63), got {self.seed}")


@dataclass(frozen=True, slots=True)
class _Survivors:
    """Tokens left by the filters, in vocabulary order, with weights relative to the likeliest."""

    token_ids: Int64[Tensor, " survivors"] | None  # None: every token of the vocabulary
    logits: Float[Tensor, " survivors"]
    weights: Float64[Tensor, " survivors"]

    def keep(self, chosen: Int64[Tensor, " chosen"]) -> "_Survivors":
        token_ids = chosen if self.token_ids is None else self.token_ids[chosen]
        return _Survivors(token_ids, self.logits[chosen], self.weights[chosen])


def draw(logits: Float[Tensor, " vocab"], parameters: SamplingParameters, position: int) -> int:
    """The target's token at `position`: first argmax at temperature 0, else the inverse CDF.

    Raises DegenerateDistribution when no logit is finite, or one is NaN or +inf.
    """
    if parameters.temperature == 0.0:
        return _first_argmax(logits)
    return draw_at(logits, parameters, uniform(parameters.seed, position))


def draw_at(logits: Float[Tensor, " vocab"], parameters: SamplingParameters, uniform_value: float) -> int:
    """The token at which the cumulative probability first exceeds `uniform_value`, in [0, 1)."""
    if not 0.0 <= uniform_value < 1.0:
        raise ValueError(f"uniform_value must be in [0, 1), got {uniform_value}")
    if parameters.temperature == 0.0:
        return _first_argmax(logits)
    survivors = _survivors(logits, parameters)
    index = _inverse_cdf(survivors.weights, uniform_value)
    return index if survivors.token_ids is None else int(survivors.token_ids[index])


def processed_probabilities(
    logits: Float[Tensor, " vocab"], parameters: SamplingParameters
) -> Float64[Tensor, " vocab"]:
    """The distribution `draw` draws from; one-hot at temperature 0."""
    probabilities = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    if parameters.temperature == 0.0:
        probabilities[_first_argmax(logits)] = 1.0
        return probabilities
    survivors = _survivors(logits, parameters)
    normalised = survivors.weights / survivors.weights.sum()
    if survivors.token_ids is None:
        return normalised
    probabilities[survivors.token_ids] = normalised
    return probabilities


def _first_argmax(logits: Tensor) -> int:
    highest, index = torch.max(logits, dim=0)  # documented to give the first of equal maxima
    if not bool(torch.isfinite(highest)):
        raise DegenerateDistribution("the largest logit is not finite")
    return int(index)


def _survivors(logits: Tensor, parameters: SamplingParameters) -> _Survivors:
    highest = logits.max()
    if not bool(torch.isfinite(highest)):
        raise DegenerateDistribution("the largest logit is not finite")
    # The maximum is subtracted before the division: a tiny temperature cannot overflow.
    scaled = (logits.to(torch.float64) - highest.to(torch.float64)).div_(parameters.temperature)
    survivors = _Survivors(None, logits, scaled.exp_())
    if 0 < parameters.top_k < logits.shape[0]:
        survivors = _keep_largest(survivors, parameters.top_k)
    if parameters.top_p < 1.0:
        survivors = _keep_largest(survivors, _nucleus_size(survivors, parameters.top_p))
    if parameters.min_p > 0.0:
        # The likeliest token has weight 1, so weights compare with min_p directly.
        survivors = survivors.keep((survivors.weights >= parameters.min_p).nonzero().flatten())
    return survivors


def _keep_largest(survivors: _Survivors, count: int) -> _Survivors:
    """Exactly the `count` largest logits; among equals at the boundary the lower ids stay."""
    logits = survivors.logits
    if count >= logits.shape[0]:
        return survivors
    boundary = torch.topk(logits, count).values[-1]
    above = logits > boundary
    at_boundary = (logits == boundary).nonzero().flatten()
    num_equal_kept = count - int(above.sum())
    kept = torch.cat([above.nonzero().flatten(), at_boundary[:num_equal_kept]])
    return survivors.keep(kept.sort().values)


def _nucleus_size(survivors: _Survivors, top_p: float) -> int:
    """How many of the largest weights it takes to hold `top_p` of the mass.

    Looks at a growing number of the largest, and so sorts the vocabulary only for a flat row.
    """
    num_tokens = survivors.weights.shape[0]
    needed = top_p * float(_cumulative_block_sums(survivors.weights)[-1])
    size = min(_FIRST_NUCLEUS_GUESS, num_tokens)
    while True:
        largest = torch.topk(survivors.logits, size).indices
        cumulative = survivors.weights[largest].cpu().cumsum(0)
        if size == num_tokens or float(cumulative[-1]) >= needed:
            count = int(torch.searchsorted(cumulative, needed)) + 1
            return min(count, size)
        size = min(size * _NUCLEUS_GROWTH, num_tokens)


def _cumulative_block_sums(weights: Tensor) -> Tensor:
    """Running totals after each block of 256 weights, on the CPU.

    A parallel scan over the whole row may round differently from run to run on a GPU; sums of
    fixed blocks, then a short sequential scan, do not.
    """
    padding = -weights.shape[0] % _SUM_BLOCK
    blocks = torch.nn.functional.pad(weights, (0, padding)).view(-1, _SUM_BLOCK)  # [num_blocks, 256]
    return blocks.sum(dim=1).cpu().cumsum(0)


def _inverse_cdf(weights: Tensor, uniform_value: float) -> int:
    """The first index whose cumulative weight exceeds `uniform_value` of the total.

    The comparison is strict: a token of weight 0 is never drawn, not even at a uniform of 0.
    """
    block_ends = _cumulative_block_sums(weights)
    target = uniform_value * float(block_ends[-1])
    block = int(torch.searchsorted(block_ends, target, right=True))
    before = float(block_ends[block - 1]) if block > 0 else 0.0
    start = block * _SUM_BLOCK
    inside = weights[start : start + _SUM_BLOCK].cpu()
    offset = int(torch.searchsorted(before + inside.cumsum(0), target, right=True))
    if offset == inside.shape[0]:
        # The block's sum and its running sum round differently; the tail belongs to its last token.
        offset = int(inside.nonzero()[-1])
    return start + offset

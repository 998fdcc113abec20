"""Proposition 2: a fixed geometric fan-out, the allocation of anchors to accepted lengths.

What SSD caches in every round, kept as a baseline: the law of the accepted length is assumed
(acceptance rate α), and F anchors at one length are assumed to capture 1 - F^-ρ of its mass.
Knows nothing of a round's own scores.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FanOut:
    """Continuous anchor counts F_k for k = 0..γ; 0 where a length is inactive."""

    sizes: tuple[float, ...]
    hit_mass: float
    """Σ_k P_α(k)(1 - F_k^-ρ) over the active lengths."""


def length_law(alpha: float, gamma: int) -> tuple[float, ...]:
    """P_α(k) for k = 0..γ: γ independent tests, each passed with probability α."""
    if not 0.0 < alpha < 1.0:
        raise ValueError(f"alpha must be in (0, 1), got {alpha}")
    if gamma < 0:
        raise ValueError(f"gamma must be at least 0, got {gamma}")
    return (*(alpha**k * (1.0 - alpha) for k in range(gamma)), alpha**gamma)


def capped_series(alpha: float, rho: float, gamma: int, budget: float, active: Collection[int]) -> FanOut:
    """Part (a)'s series, F_k ∝ P_α(k)^(1/(1+ρ)), scaled to spend `budget` on the active lengths.

    The last length, γ, has no rejection and so breaks the geometric series: hence "capped".
    """
    if not rho > 0.0:
        raise ValueError(f"rho must be positive, got {rho}")
    law = length_law(alpha, gamma)
    if not active or not set(active) <= set(range(gamma + 1)):
        raise ValueError(f"active lengths must be some of 0..{gamma}, got {sorted(active)}")
    shares = [law[k] ** (1.0 / (1.0 + rho)) if k in active else 0.0 for k in range(gamma + 1)]
    sizes = tuple(budget * share / sum(shares) for share in shares)
    return FanOut(sizes, sum(law[k] * (1.0 - sizes[k] ** -rho) for k in active))


def best_series(alpha: float, rho: float, gamma: int, budget: float) -> FanOut:
    """The maximiser of the surrogate: the best of the M likeliest lengths that keeps every F_k ≥ 1."""
    if budget < 1.0:
        raise ValueError(f"budget must be at least 1, got {budget}")
    law = length_law(alpha, gamma)
    by_likelihood = sorted(range(gamma + 1), key=lambda k: (-law[k], k))
    candidates: list[FanOut] = []
    for num_active in range(1, gamma + 2):
        active = by_likelihood[:num_active]
        series = capped_series(alpha, rho, gamma, budget, active)
        if min(series.sizes[k] for k in active) >= 1.0:
            candidates.append(series)
    return max(candidates, key=lambda series: series.hit_mass)


def largest_remainders(sizes: Sequence[float], total: int) -> tuple[int, ...]:
    """Integers close to `sizes` that sum to `total`, the sum of `sizes`; ties go to the smaller index."""
    if not math.isclose(sum(sizes), total, rel_tol=1e-9, abs_tol=1e-9):
        raise ValueError(f"sizes sum to {sum(sizes)}, not to {total}")
    rounded = [math.floor(size + 1e-9) for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda index: (-round(sizes[index] - rounded[index], 9), index))
    for index in by_remainder[: total - sum(rounded)]:
        rounded[index] += 1
    return tuple(rounded)


def allocate(alpha: float, rho: float, gamma: int, budget: int, every_length: bool = False) -> tuple[int, ...]:
    """How many anchors to cache at each accepted length 0..γ; the counts sum to `budget`.

    `every_length` spreads the series over all lengths, as the paper's comparison with SSD does
    (Table 11); otherwise over the best active set.
    """
    if every_length:
        series = capped_series(alpha, rho, gamma, float(budget), range(gamma + 1))
    else:
        series = best_series(alpha, rho, gamma, float(budget))
    return largest_remainders(series.sizes, budget)


def fit_acceptance_rate(accepted_lengths: Collection[int], gamma: int) -> float:
    """Maximum likelihood of α: accepted drafts over tested drafts, kept inside (0, 1)."""
    num_accepted = sum(accepted_lengths)
    num_tested = num_accepted + sum(1 for length in accepted_lengths if length < gamma)
    return (num_accepted + 0.5) / (num_tested + 1.0)


def fit_decay(anchor_ranks: Collection[int]) -> float:
    """ρ by least squares on the log of how often the realised anchor ranks beyond F, F = 2, 3, ...

    Ranks count from 1. Raises ValueError when no anchor ranks beyond 2: no curve to fit.
    """
    covariance, variance = 0.0, 0.0
    for fan_out in range(2, max(anchor_ranks, default=0)):
        beyond = sum(1 for rank in anchor_ranks if rank > fan_out) / len(anchor_ranks)
        covariance -= math.log(fan_out) * math.log(beyond)
        variance += math.log(fan_out) ** 2
    if covariance <= 0.0:
        raise ValueError("too few anchors rank beyond 2: the decay cannot be fitted")
    return covariance / variance

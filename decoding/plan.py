"""Equations 3 and 4: how much drafting fits under one verification, and what it buys.

Knows only times and sizes; who measures the times is no concern of this module.
"""

from collections.abc import Mapping
from dataclasses import dataclass

SERVING_CACHE_SIZE = 4
"""The paper's cache size when serving. Below it a round is too often a miss for refinement to
pay; above it a further outcome is worth less than a further pass."""

DEFAULT_MAX_PASSES = 3


@dataclass(frozen=True, slots=True)
class PassPlan:
    """J Jacobi passes after J0, R context refreshes, B outcomes pre-drafted."""

    num_passes: int
    num_refreshes: int
    cache_size: int

    def __post_init__(self) -> None:
        if self.num_passes < 0 or self.num_refreshes < 0:
            raise ValueError(f"a plan cannot have a negative number of passes or refreshes: {self}")
        if self.cache_size < 1:
            raise ValueError(f"a plan needs a cache size of at least 1: {self}")


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Measured seconds of the drafter's phases at one cache size."""

    foresight_s: float
    """T_pred(1): adapter and decoder over the block under verification."""
    pass_s: float
    """T_pass(B): the draft model over all pre-drafted blocks."""
    refresh_s: float
    """T_pred(B): adapter and decoder over all pre-drafted blocks."""
    host_s: float
    """T_host: selection, packing and pushing."""


@dataclass(frozen=True, slots=True)
class RoundModel:
    """The terms of equation 4. Token counts are per round, bonus included."""

    hit_rate: float
    tokens_on_hit: float
    tokens_on_miss: float
    verify_s: float
    draft_s: float
    communication_s: float
    fallback_s: float


def drafting_s(plan: PassPlan, times: PhaseTimes) -> float:
    """The left side of equation 3: T_pred(1) + (1 + J)·T_pass(B) + R·T_pred(B) + T_host."""
    passes_s = (1 + plan.num_passes) * times.pass_s
    return times.foresight_s + passes_s + plan.num_refreshes * times.refresh_s + times.host_s


def fits(plan: PassPlan, times: PhaseTimes, verify_s: float) -> bool:
    """Whether the plan ends before the verification does (equation 3)."""
    return drafting_s(plan, times) <= verify_s


def choose_plan(
    times: Mapping[int, PhaseTimes],
    verify_s: float,
    max_passes: int = DEFAULT_MAX_PASSES,
    max_refreshes: int = DEFAULT_MAX_PASSES,
) -> PassPlan:
    """The most useful plan that fits, from phase times measured at several cache sizes.

    A cache of serving size comes first, then refreshes (at most one before each pass), each of
    which gains more than three plain passes (paper, Table 5), then passes, then further outcomes.
    When nothing fits, the smallest cache and J0 alone: its drafts arrive late, which still costs
    less than drafting after a miss. Raises ValueError without times.
    """
    if not times:
        raise ValueError("times must hold at least one cache size")
    plans = [
        PassPlan(num_passes, num_refreshes, cache_size)
        for cache_size in times
        for num_passes in range(max_passes + 1)
        for num_refreshes in range(min(num_passes, max_refreshes) + 1)
        if fits(PassPlan(num_passes, num_refreshes, cache_size), times[cache_size], verify_s)
    ]
    return max(plans, key=_usefulness, default=PassPlan(0, 0, min(times)))


def _usefulness(plan: PassPlan) -> tuple[int, int, int, int]:
    served = min(plan.cache_size, SERVING_CACHE_SIZE)
    return served, plan.num_refreshes, plan.num_passes, plan.cache_size


def throughput(model: RoundModel) -> float:
    """Tokens per second of one sequence (equation 4)."""
    miss_rate = 1.0 - model.hit_rate
    num_tokens = model.hit_rate * model.tokens_on_hit + miss_rate * model.tokens_on_miss
    round_s = max(model.verify_s, model.draft_s) + model.communication_s + miss_rate * model.fallback_s
    return num_tokens / round_s

"""How many outcomes `ssd` prepares for each accepted length: the geometric series, from statistics of past rounds.

Two allocations of equal sum, one for blocks that came from the speculation cache and one for fallback blocks, as the
acceptance rates of the two may differ. Knows nothing of the round at hand: that is what jetspec++ does better.
"""

from collections import deque
from dataclasses import dataclass

from decoding.fanout import allocate, fit_acceptance_rate, fit_decay

WINDOW = 512
MIN_ROUNDS = 32
REFIT_EVERY = 16
MAX_RANK = 33
"""Ranks beyond it count as this: the decay is a matter of small fan-outs, and fitting costs a term a rank."""


@dataclass(frozen=True)
class FanOutPrior:
    """What is assumed before anything has been measured.

    alpha: probability that a draft is accepted given those before it. rho: F anchors miss the realised one with
    probability F^-rho.
    """

    alpha: float = 0.7
    rho: float = 1.0


class FanOutStatistics:
    """Acceptance of the last rounds, by where their block came from, and ranks of the realised anchors."""

    def __init__(self, prior: FanOutPrior | None = None) -> None:
        self._prior = prior or FanOutPrior()
        self._accepted: dict[bool, deque[int]] = {True: deque(maxlen=WINDOW), False: deque(maxlen=WINDOW)}
        self._ranks: deque[int] = deque(maxlen=WINDOW)
        self._sizes: dict[tuple[bool, int, int], tuple[int, ...]] = {}
        self._num_observed = 0

    def observe(self, num_accepted: int, anchor_rank: int, *, was_hit: bool) -> None:
        """How a round ended. anchor_rank: place of the bonus token among those that could be it, from 1."""
        self._accepted[was_hit].append(num_accepted)
        self._ranks.append(min(anchor_rank, MAX_RANK))
        self._num_observed += 1
        if self._num_observed % REFIT_EVERY == 0:
            self._sizes.clear()

    def sizes(self, num_draft_tokens: int, budget: int, *, was_hit: bool) -> tuple[int, ...]:
        """Anchors F_k for k = 0..γ accepted drafts of a block; they sum to `budget`.

        Over all lengths, as SSD does: the surrogate that would leave lengths out gives a single anchor no credit at
        all, though the first one is worth more than all others.
        """
        key = (was_hit, num_draft_tokens, budget)
        if key not in self._sizes:
            alpha = self.acceptance_rate(num_draft_tokens, was_hit=was_hit)
            self._sizes[key] = allocate(alpha, self.decay(), num_draft_tokens, budget, every_length=True)
        return self._sizes[key]

    def acceptance_rate(self, num_draft_tokens: int, *, was_hit: bool) -> float:
        """α of blocks from the cache or of fallback blocks."""
        accepted = self._accepted[was_hit]
        return fit_acceptance_rate(accepted, num_draft_tokens) if len(accepted) >= MIN_ROUNDS else self._prior.alpha

    def decay(self) -> float:
        """ρ; the prior where all anchors are too likely for a curve to be fitted."""
        if len(self._ranks) < MIN_ROUNDS:
            return self._prior.rho
        try:
            return fit_decay(self._ranks)
        except ValueError:
            return self._prior.rho

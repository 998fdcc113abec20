"""The fan-out of `ssd` follows what has been measured, and always spends the same."""

import pytest

from draft_worker.fan_out import MIN_ROUNDS, FanOutPrior, FanOutStatistics

GAMMA = 4


@pytest.mark.parametrize("budget", [1, 2, 4, 5, 16])
def test_both_allocations_have_the_same_sum(budget: int) -> None:
    statistics = FanOutStatistics()
    for index in range(2 * MIN_ROUNDS):
        statistics.observe(GAMMA if index % 2 else 0, 1 + index % 5, was_hit=index % 2 == 1)
    for was_hit in (True, False):
        sizes = statistics.sizes(GAMMA, budget, was_hit=was_hit)
        assert len(sizes) == GAMMA + 1 and sum(sizes) == budget


def test_blocks_from_the_cache_and_fallback_blocks_are_counted_apart() -> None:
    """Where nearly all drafts are accepted the anchors go to full acceptance, where few are to none."""
    statistics = FanOutStatistics()
    before = statistics.sizes(GAMMA, 6, was_hit=True)
    assert before == statistics.sizes(GAMMA, 6, was_hit=False)
    for _ in range(MIN_ROUNDS):
        statistics.observe(GAMMA, 1, was_hit=True)
        statistics.observe(0, 2, was_hit=False)
    after_hit, after_miss = (statistics.sizes(GAMMA, 6, was_hit=was_hit) for was_hit in (True, False))
    assert max(range(GAMMA + 1), key=after_hit.__getitem__) == GAMMA
    assert max(range(GAMMA + 1), key=after_miss.__getitem__) == 0
    assert statistics.acceptance_rate(GAMMA, was_hit=True) > 0.95
    assert statistics.acceptance_rate(GAMMA, was_hit=False) < 0.1


def test_few_rounds_and_anchors_that_are_always_likely_leave_the_prior() -> None:
    prior = FanOutPrior(alpha=0.4, rho=1.7)
    statistics = FanOutStatistics(prior)
    for _ in range(MIN_ROUNDS - 1):
        statistics.observe(1, 30, was_hit=True)
    assert statistics.acceptance_rate(GAMMA, was_hit=True) == prior.alpha
    assert statistics.decay() == prior.rho
    likely = FanOutStatistics(prior)
    for _ in range(MIN_ROUNDS):
        likely.observe(1, 1, was_hit=True)
    assert likely.decay() == prior.rho


def test_unlikely_anchors_flatten_the_decay() -> None:
    def decay(ranks: list[int]) -> float:
        statistics = FanOutStatistics()
        for rank in ranks * MIN_ROUNDS:
            statistics.observe(1, rank, was_hit=False)
        return statistics.decay()

    assert decay([1, 1, 1, 2, 3]) > decay([1, 2, 9, 40, 100_000]) > 0.0

"""Proposition 2(a)."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.fanout import (
    allocate,
    best_series,
    capped_series,
    fit_acceptance_rate,
    fit_decay,
    largest_remainders,
    length_law,
)


def test_the_worked_example_of_the_paper_drops_a_length() -> None:
    everywhere = capped_series(0.6, 1.0, 4, 10.0, range(5))
    best = best_series(0.6, 1.0, 4, 10.0)
    assert everywhere.hit_mass == pytest.approx(0.535, abs=5e-4)
    assert best.hit_mass == pytest.approx(0.567, abs=5e-4)
    assert [k for k, size in enumerate(best.sizes) if size > 0] == [0, 1, 2, 4]
    assert sum(best.sizes) == pytest.approx(10)


def test_the_last_length_has_no_rejection() -> None:
    assert length_law(0.6, 2) == pytest.approx((0.4, 0.24, 0.36))


@given(st.floats(0.05, 0.95), st.floats(0.2, 3.0), st.integers(1, 5), st.floats(1.0, 30.0))
@settings(max_examples=60, deadline=None)
def test_no_other_active_set_captures_more(alpha: float, rho: float, gamma: int, budget: float) -> None:
    best = best_series(alpha, rho, gamma, budget)
    assert all(size == 0.0 or size >= 1.0 for size in best.sizes)
    for num_active in range(1, gamma + 2):
        for active in itertools.combinations(range(gamma + 1), num_active):
            series = capped_series(alpha, rho, gamma, budget, active)
            if min(series.sizes[k] for k in active) >= 1.0:
                assert series.hit_mass <= best.hit_mass + 1e-12


def test_active_lengths_have_equal_marginal_gains() -> None:
    law, best = length_law(0.7, 6), best_series(0.7, 0.8, 6, 25.0)
    gains = [law[k] * 0.8 * size**-1.8 for k, size in enumerate(best.sizes) if size > 0]
    assert gains == pytest.approx([gains[0]] * len(gains))


def test_largest_remainders_go_up_and_ties_go_to_the_smaller_index() -> None:
    assert largest_remainders([1.2, 1.7, 1.1], 4) == (1, 2, 1)
    assert largest_remainders([0.5, 0.5, 0.5, 0.5], 2) == (1, 1, 0, 0)
    assert largest_remainders([2.9999999999, 1.0000000001], 4) == (3, 1)


def test_sizes_that_do_not_sum_to_the_total_are_refused() -> None:
    with pytest.raises(ValueError, match="sum"):
        largest_remainders([1.0, 1.0], 3)


@given(st.floats(0.05, 0.95), st.floats(0.2, 3.0), st.integers(0, 15), st.integers(1, 40), st.booleans())
@settings(max_examples=60, deadline=None)
def test_an_allocation_spends_its_budget(alpha: float, rho: float, gamma: int, budget: int, every_length: bool) -> None:
    counts = allocate(alpha, rho, gamma, budget, every_length)
    assert len(counts) == gamma + 1
    assert sum(counts) == budget
    assert min(counts) >= 0


def test_the_paper_s_comparison_spreads_over_every_length() -> None:
    assert allocate(0.6, 1.0, 4, 10, every_length=True) == (3, 2, 2, 1, 2)
    assert allocate(0.6, 1.0, 4, 10)[3] == 0


def test_the_acceptance_rate_counts_tests_not_rounds() -> None:
    # γ = 3: lengths 3 and 1 make 4 accepted drafts out of 3 + 2 tested.
    assert fit_acceptance_rate([3, 1] * 500, 3) == pytest.approx(4 / 5, abs=1e-3)
    assert 0.0 < fit_acceptance_rate([0, 0], 3) < fit_acceptance_rate([3, 3], 3) < 1.0


def test_the_decay_of_a_power_law_is_recovered() -> None:
    # Ranks whose survival function is F^-1.5: the r-th of 4000 quantiles.
    ranks = [int((1 - (i + 0.5) / 4000) ** (-1 / 1.5)) + 1 for i in range(3960)] + [10**2] * 40
    assert fit_decay([min(rank, 20) for rank in ranks]) == pytest.approx(1.5, abs=0.15)


def test_a_decay_without_evidence_is_refused() -> None:
    with pytest.raises(ValueError, match="rank"):
        fit_decay([1, 2, 1])


@pytest.mark.parametrize(("alpha", "rho", "budget"), [(0.0, 1.0, 4), (1.0, 1.0, 4), (0.5, 0.0, 4), (0.5, 1.0, 0)])
def test_parameters_out_of_range_are_refused(alpha: float, rho: float, budget: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        allocate(alpha, rho, 4, budget)

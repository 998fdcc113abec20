import pytest

from decoding.plan import PassPlan, PhaseTimes, RoundModel, choose_plan, drafting_s, fits, throughput

TIMES = PhaseTimes(foresight_s=2.0, pass_s=1.0, refresh_s=3.0, host_s=0.5)


def test_equation_3_counts_j0_and_one_foresight() -> None:
    assert drafting_s(PassPlan(2, 1, 4), TIMES) == pytest.approx(2.0 + 3 * 1.0 + 1 * 3.0 + 0.5)


def test_a_plan_that_ends_with_the_verification_fits() -> None:
    assert fits(PassPlan(2, 1, 4), TIMES, 8.5)
    assert not fits(PassPlan(2, 1, 4), TIMES, 8.49)


def test_ample_time_gives_every_pass_a_refresh_and_the_largest_cache() -> None:
    assert choose_plan({1: TIMES, 4: TIMES, 16: TIMES}, 100.0) == PassPlan(3, 3, 16)


def test_the_serving_cache_size_comes_before_passes() -> None:
    slow = PhaseTimes(foresight_s=2.0, pass_s=3.0, refresh_s=3.0, host_s=0.5)
    # At 6 s the cache of one could afford three passes, the cache of four only J0.
    assert choose_plan({1: TIMES, 4: slow}, 6.0) == PassPlan(0, 0, 4)


def test_passes_come_before_outcomes_beyond_the_serving_cache_size() -> None:
    slow = PhaseTimes(foresight_s=2.0, pass_s=3.0, refresh_s=9.0, host_s=0.5)
    assert choose_plan({4: TIMES, 16: slow}, 6.5) == PassPlan(3, 0, 4)


def test_refreshes_come_before_passes_without_one() -> None:
    assert choose_plan({4: TIMES}, 12.0) == PassPlan(2, 2, 4)  # three passes would leave time for one refresh only
    assert choose_plan({4: TIMES}, 10.0) == PassPlan(3, 1, 4)


def test_a_refresh_needs_a_pass_after_it() -> None:
    assert choose_plan({4: TIMES}, 100.0, max_passes=1) == PassPlan(1, 1, 4)


def test_when_nothing_fits_the_smallest_cache_is_drafted_once() -> None:
    assert choose_plan({4: TIMES, 2: TIMES}, 0.1) == PassPlan(0, 0, 2)


def test_no_measured_times_are_refused() -> None:
    with pytest.raises(ValueError, match="times"):
        choose_plan({}, 1.0)


@pytest.mark.parametrize("sizes", [(-1, 0, 1), (0, -1, 1), (0, 0, 0)])
def test_an_impossible_plan_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="plan"):
        PassPlan(*sizes)


def test_equation_4() -> None:
    model = RoundModel(
        hit_rate=0.75,
        tokens_on_hit=8.0,
        tokens_on_miss=4.0,
        verify_s=0.006,
        draft_s=0.005,
        communication_s=0.001,
        fallback_s=0.004,
    )
    assert throughput(model) == pytest.approx((0.75 * 8 + 0.25 * 4) / (0.006 + 0.001 + 0.25 * 0.004))

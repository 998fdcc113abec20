import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.sampling import DegenerateDistribution, SamplingParameters, draw, draw_at, processed_probabilities
from decoding.uniforms import uniform

ALMOST_ONE = 1.0 - 2.0**-53
INF = math.inf


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def support(logits: torch.Tensor, **fields: float) -> list[int]:
    probabilities = processed_probabilities(logits, SamplingParameters(**fields))  # type: ignore[arg-type]
    assert float(probabilities.sum()) == pytest.approx(1.0)
    return probabilities.nonzero().flatten().tolist()


random_rows = st.integers(0, 2**32 - 1).map(
    lambda seed: torch.randn(300, generator=torch.Generator().manual_seed(seed)) * (1 + seed % 7)
)


# --- the inverse CDF


def test_a_token_owns_the_half_open_interval_that_ends_at_its_cumulative_probability() -> None:
    logits = torch.zeros(4)
    drawn = [draw_at(logits, SamplingParameters(), u) for u in (0.0, 0.2499, 0.25, 0.4999, 0.5, 0.75, ALMOST_ONE)]
    assert drawn == [0, 0, 1, 1, 2, 3, 3]


def test_u_of_zero_skips_leading_tokens_of_probability_zero() -> None:
    assert draw_at(torch.tensor([-INF, -INF, 1.0, 1.0]), SamplingParameters(), 0.0) == 2


def test_u_close_to_one_never_reaches_a_padded_vocabulary() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    logits[700:] = -INF
    assert draw_at(logits, SamplingParameters(), ALMOST_ONE) == 699


@given(random_rows, st.floats(0.0, ALMOST_ONE))
@settings(max_examples=60, deadline=None)
def test_a_draw_is_always_a_token_of_positive_probability(logits: torch.Tensor, u: float) -> None:
    logits[::3] = -INF
    parameters = SamplingParameters(top_p=0.9, min_p=0.01)
    assert processed_probabilities(logits, parameters)[draw_at(logits, parameters, u)] > 0


def test_the_last_token_of_positive_probability_owns_the_rounding_at_the_top() -> None:
    for seed in range(200):
        logits = 4 * torch.randn(513, generator=torch.Generator().manual_seed(seed))
        logits[400:] = -INF
        logits[399] = 5.0
        assert draw_at(logits, SamplingParameters(), ALMOST_ONE) == 399


def test_draws_agree_with_a_plain_cumulative_sum_across_blocks() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    cumulative = torch.softmax(logits.to(torch.float64), 0).cumsum(0)
    for u in [(i + 0.5) / 997 for i in range(997)]:
        index = draw_at(logits, SamplingParameters(), u)
        assert float(cumulative[index]) > u - 1e-12
        assert index == 0 or float(cumulative[index - 1]) <= u + 1e-12


def test_the_share_of_uniforms_a_token_owns_is_its_processed_probability() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -INF])
    parameters = SamplingParameters(temperature=0.8, top_k=4)
    counts = torch.zeros(6, dtype=torch.float64)
    for index in range(4000):
        counts[draw_at(logits, parameters, (index + 0.5) / 4000)] += 1
    assert torch.allclose(counts / 4000, processed_probabilities(logits, parameters), atol=1 / 4000)


def test_a_single_survivor_is_drawn_at_every_uniform() -> None:
    logits = torch.full((600,), -INF)
    logits[517] = -3.0
    assert {draw_at(logits, SamplingParameters(), u) for u in (0.0, 0.5, ALMOST_ONE)} == {517}


def test_draw_uses_the_uniform_of_its_seed_and_position() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(2))
    parameters = SamplingParameters(seed=99)
    for position in range(20):
        assert draw(logits, parameters, position) == draw_at(logits, parameters, uniform(99, position))


def test_a_uniform_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="uniform_value"):
        draw_at(torch.zeros(3), SamplingParameters(), 1.0)


# --- greedy


def test_greedy_takes_the_first_of_equal_maxima_and_ignores_the_filters() -> None:
    logits = torch.tensor([0.0, 3.0, 3.0, 1.0])
    parameters = SamplingParameters(temperature=0.0, top_k=1, top_p=0.1, min_p=0.5)
    assert draw(logits, parameters, 17) == 1
    assert processed_probabilities(logits, parameters).tolist() == [0.0, 1.0, 0.0, 0.0]


def test_a_tiny_temperature_agrees_with_greedy() -> None:
    logits = torch.tensor([10.0, 300.0, 299.0, -50.0])
    assert draw_at(logits, SamplingParameters(temperature=1e-300), 0.999) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logits", [[-INF, -INF], [0.0, math.nan], [0.0, INF]])
def test_degenerate_logits_are_a_typed_error(logits: list[float], temperature: float) -> None:
    with pytest.raises(DegenerateDistribution):
        draw(torch.tensor(logits), SamplingParameters(temperature=temperature), 0)


# --- the filters


def test_probabilities_are_a_float64_softmax_at_the_temperature() -> None:
    logits = torch.randn(400, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    expected = torch.softmax(logits.to(torch.float64) / 0.7, 0)
    actual = processed_probabilities(logits, SamplingParameters(temperature=0.7))
    assert actual.dtype == torch.float64
    assert torch.allclose(actual, expected, rtol=1e-12, atol=0)


def test_top_k_keeps_the_lower_ids_among_equals_at_its_boundary() -> None:
    assert support(torch.tensor([1.0, 2.0, 2.0, 3.0, 2.0]), top_k=3) == [1, 2, 3]


def test_survivors_stay_in_vocabulary_order_for_the_draw() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0])
    assert draw_at(logits, SamplingParameters(top_k=2), 0.0) == 0
    assert draw_at(logits, SamplingParameters(top_k=2), ALMOST_ONE) == 1


def test_top_k_of_the_whole_vocabulary_or_more_changes_nothing() -> None:
    assert support(torch.zeros(4), top_k=4) == support(torch.zeros(4), top_k=9) == [0, 1, 2, 3]


def test_top_p_keeps_the_lower_ids_among_equals_at_its_boundary() -> None:
    assert support(torch.zeros(4), top_p=0.5) == [0, 1]
    assert support(torch.zeros(4), top_p=0.51) == [0, 1, 2]


def test_top_p_of_a_flat_vocabulary_grows_past_its_first_guess() -> None:
    assert support(torch.zeros(5000), top_p=0.5) == list(range(2500))


def test_top_p_keeps_at_least_the_likeliest_token() -> None:
    assert support(logits_of(0.2, 0.5, 0.3), top_p=1e-9) == [1]


def test_temperature_comes_before_top_p() -> None:
    logits = logits_of(0.6, 0.3, 0.1)
    assert support(logits, top_p=0.7) == [0, 1]
    assert support(logits, top_p=0.7, temperature=0.5) == [0]


def test_top_p_acts_on_what_top_k_left_renormalised() -> None:
    logits = logits_of(0.5, 0.3, 0.2)
    assert support(logits, top_p=0.6) == [0, 1]
    assert support(logits, top_p=0.6, top_k=2) == [0]


def test_min_p_comes_after_top_p() -> None:
    # With min-p first the two survivors would be renormalised and top-p would keep one.
    assert support(logits_of(0.4, 0.3, 0.1, 0.1, 0.1), top_p=0.5, min_p=0.5) == [0, 1]


def test_min_p_is_relative_to_the_likeliest_token() -> None:
    logits = logits_of(0.5, 0.3, 0.15, 0.05)
    assert support(logits, min_p=0.29) == [0, 1, 2]
    assert support(logits, min_p=0.31) == [0, 1]
    assert support(logits, min_p=1.0) == [0]


@given(random_rows, st.floats(0.01, 0.999))
@settings(max_examples=60, deadline=None)
def test_top_p_keeps_the_smallest_set_that_holds_p(logits: torch.Tensor, top_p: float) -> None:
    full = processed_probabilities(logits, SamplingParameters())
    kept = processed_probabilities(logits, SamplingParameters(top_p=top_p)) > 0
    mass = float(full[kept].sum())
    assert mass >= top_p - 1e-12
    assert mass - float(full[kept].min()) < top_p + 1e-12
    assert bool(kept.all()) or float(full[~kept].max()) <= float(full[kept].min())


@given(st.integers(0, 2**32 - 1), st.integers(2, 17), st.floats(0.2, 1.0), st.integers(0, 400))
@settings(max_examples=40, deadline=None)
def test_a_row_does_not_depend_on_its_company(seed: int, num_rows: int, top_p: float, top_k: int) -> None:
    rows = torch.randn(num_rows, 333, generator=torch.Generator().manual_seed(seed)) * 4
    alone = rows[num_rows // 2].clone()
    parameters = SamplingParameters(top_p=top_p, top_k=top_k, seed=seed)
    among_others = rows.to(torch.float32)[num_rows // 2]
    assert torch.equal(processed_probabilities(among_others, parameters), processed_probabilities(alone, parameters))
    assert draw(among_others, parameters, seed % 1000) == draw(alone, parameters, seed % 1000)


def test_the_logits_of_the_caller_are_left_as_they_are() -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    before = logits.clone()
    draw(logits, SamplingParameters(temperature=0.5, top_k=20, top_p=0.8, min_p=0.1), 3)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", INF),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParameters(**{field: value})  # type: ignore[arg-type]

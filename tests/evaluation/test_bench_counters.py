"""Metrics as numbers: what is read, and what the difference of two readings says about the rounds between them."""

import pytest

from evaluation.bench.counters import Counters, RoundStatistics, phases_ms, total
from server.metrics import PHASES as SERVED_PHASES
from server.metrics import ROUND_LABELS, Metrics
from tests.evaluation.bench_servers import exposition


def between(first: int, last: int, *, is_plain: bool = False) -> Counters:
    return Counters.parse(exposition(last, is_plain=is_plain)) - Counters.parse(exposition(first, is_plain=is_plain))


def test_statistics_are_those_of_the_rounds_between_two_readings() -> None:
    statistics = RoundStatistics.of(between(3, 5))
    assert statistics.num_rounds == 22
    assert statistics.tau == pytest.approx((24 + 2 + 1) / 11)
    assert statistics.hit_rate == pytest.approx(8 / 10)  # the first round is no failed prediction
    assert statistics.verify_ms == pytest.approx(30.0)
    assert statistics.exposed_ms == pytest.approx((8 * 1.0 + 2 * 10.0) / 10)
    assert statistics.acceptance == pytest.approx((9 / 11, 4 / 11, 0.0))  # slots in the order of their numbers
    assert statistics.outcomes == {"hit": 16, "miss": 4, "first": 2}
    assert phases_ms(between(3, 5)) == pytest.approx({"foresight": 13.0})


def test_plain_decoding_has_nothing_that_could_hit() -> None:
    statistics = RoundStatistics.of(between(0, 1, is_plain=True))
    assert (statistics.tau, statistics.hit_rate, statistics.acceptance) == (1.0, None, ())
    assert phases_ms(between(0, 1, is_plain=True)) == {}


def test_nothing_between_two_readings() -> None:
    statistics = RoundStatistics.of(between(2, 2))
    assert statistics == RoundStatistics(0, None, None, None, None, (), {})


def test_the_sum_of_differences_is_the_difference_of_the_ends() -> None:
    assert RoundStatistics.of(total([between(0, 1), between(1, 4)])) == RoundStatistics.of(between(0, 4))


def test_the_names_are_those_the_server_publishes() -> None:
    metrics = Metrics(4)
    served = Counters.parse(metrics.render().decode())
    ours = Counters.parse(exposition(1))
    names = {name for name, _ in ours.samples}
    assert names <= {name for name, _ in served.samples}
    assert set(served.by_label("jetspec_rounds_total", "outcome")) == set(ROUND_LABELS)
    assert set(served.by_label("jetspec_draft_phase_seconds_total", "phase")) == set(SERVED_PHASES)


def test_other_text_is_refused() -> None:
    with pytest.raises(ValueError):
        Counters.parse("<html>not metrics</html>")

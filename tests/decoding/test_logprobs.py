"""Reports on tokens against log_softmax and a full sort."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoding.logprobs import report_tokens
from decoding.sampling import DegenerateDistribution

VOCAB = 10
WIDTH = 12


@given(seed=st.integers(0, 999), chosen=st.integers(0, VOCAB - 1), count=st.integers(0, 15), coarse=st.booleans())
def test_reports_are_those_of_a_full_sort(seed: int, chosen: int, count: int, coarse: bool) -> None:
    row = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
    row = row.round() if coarse else row  # coarse rows have equals
    (report,) = report_tokens(row[None], [chosen], count, VOCAB)
    expected = torch.log_softmax(row.double(), dim=0).tolist()
    ranking = sorted(range(VOCAB), key=lambda token_id: (-float(row[token_id]), token_id))
    assert report.token_id == chosen
    assert report.logprob == pytest.approx(expected[chosen], abs=1e-6)
    assert report.rank == 1 + sum(float(row[token_id]) > float(row[chosen]) for token_id in range(VOCAB))
    assert [token.token_id for token in report.top] == ranking[:count]
    assert [token.logprob for token in report.top] == pytest.approx([expected[t] for t in ranking[:count]], abs=1e-6)


def test_a_row_for_every_token() -> None:
    rows = torch.eye(3)
    reports = report_tokens(rows, [0, 1, 0], 1, 3)
    assert [report.rank for report in reports] == [1, 1, 2]
    assert [report.top[0].token_id for report in reports] == [0, 1, 2]


def test_ids_without_a_text_count_for_the_norm_only() -> None:
    row = torch.zeros(1, WIDTH)
    row[0, 11] = 5.0
    (report,) = report_tokens(row, [0], 3, VOCAB)
    assert report.rank == 1
    assert report.logprob == pytest.approx(-math.log(WIDTH - 1 + math.exp(5.0)), abs=1e-6)
    assert [token.token_id for token in report.top] == [0, 1, 2]


def test_an_impossible_token_has_an_infinitely_low_logprob() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 3] = -math.inf
    (report,) = report_tokens(row, [3], 0, VOCAB)
    assert report.logprob == -math.inf and report.rank == VOCAB


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_no_distribution_is_refused(value: float) -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 3] = value
    with pytest.raises(DegenerateDistribution):
        report_tokens(row, [0], 2, VOCAB)

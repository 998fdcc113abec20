"""The import hook of conftest.py is in force: without it the annotations would be prose."""

import pytest
import torch
from jaxtyping import TypeCheckError

from decoding.acceptance import accept
from decoding.outcomes import OutcomeTable
from decoding.sampling import SamplingParameters, draw


def test_a_batch_of_rows_is_refused_by_draw() -> None:
    with pytest.raises(TypeCheckError):
        draw(torch.zeros(2, 5), SamplingParameters(), 0)


def test_integer_logits_are_refused() -> None:
    with pytest.raises(TypeCheckError):
        accept(torch.zeros(2, 5, dtype=torch.int64), [1], SamplingParameters(), 0)


def test_columns_of_different_lengths_are_refused_in_a_table() -> None:
    with pytest.raises(TypeCheckError):
        OutcomeTable(torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), torch.zeros(2))

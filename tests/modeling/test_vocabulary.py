"""A trimmed head gives the full head's logits for the tokens it keeps, and no others."""

import pytest
import torch

from modeling.vocabulary import DraftHead
from tests.modeling.tiny_models import relative_error

VOCAB_SIZE, WIDTH = 50, 24
KEPT = torch.tensor([49, 3, 0, 17, 20])


def weight() -> torch.Tensor:
    return torch.randn(VOCAB_SIZE, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("packed", [False, True])
def test_trimmed_against_full(packed: bool) -> None:
    rows = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    full = DraftHead(weight(), None, packed=packed)
    trimmed = DraftHead(weight(), KEPT, packed=packed)
    assert full.is_full
    assert not trimmed.is_full
    assert relative_error(full.logits(rows), rows @ weight().T) < 1e-6
    assert trimmed.logits(rows).shape == (3, 5)
    assert relative_error(trimmed.logits(rows), full.logits(rows)[:, KEPT]) < 1e-6


def test_columns_are_the_inverse_of_token_ids() -> None:
    trimmed = DraftHead(weight(), KEPT)
    assert [trimmed.column(token) for token in KEPT.tolist()] == [0, 1, 2, 3, 4]
    dropped = sorted(set(range(VOCAB_SIZE)) - set(KEPT.tolist()))
    assert {trimmed.column(token) for token in dropped} == {-1}
    full = DraftHead(weight(), None)
    assert [full.column(token) for token in range(VOCAB_SIZE)] == list(range(VOCAB_SIZE))
    assert torch.equal(trimmed.columns[trimmed.token_ids], torch.arange(5))


def test_a_permutation_of_all_tokens_keeps_its_order() -> None:
    order = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    rows = torch.randn(2, WIDTH)
    head = DraftHead(weight(), order)
    assert relative_error(head.logits(rows), (rows @ weight().T)[:, order]) < 1e-6
    assert [head.column(token) for token in order.tolist()] == list(range(VOCAB_SIZE))


@pytest.mark.parametrize("token_ids", [[], [0, 50], [-1, 3]])
def test_ids_outside_the_vocabulary_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(ValueError, match="50 tokens"):
        DraftHead(weight(), torch.tensor(token_ids, dtype=torch.long))


def test_a_token_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        DraftHead(weight(), torch.tensor([3, 4, 3]))

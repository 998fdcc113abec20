"""The pool of two opinions on the next token."""

import pytest
import torch

from decoding.pooling import DRAFT_SHARE, pooled_outlook


def test_a_pool_is_the_weighted_product_of_two_distributions() -> None:
    decoder, drafter = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.1, 0.6, 0.3]])
    product = decoder * drafter**0.5
    log_p = torch.cat((decoder, decoder)).log()
    for constant in (0, 5):  # logits, up to a constant
        pooled = pooled_outlook(log_p, drafter.log() + constant, share=0.5)
        torch.testing.assert_close(pooled[:1].exp(), product / product.sum(-1, keepdim=True))


def test_an_outlook_pools_the_rows_that_were_drafted_and_leaves_the_last() -> None:
    generator = torch.Generator().manual_seed(0)
    log_p = torch.randn(4, 7, generator=generator).log_softmax(-1)
    logits = torch.randn(3, 7, generator=generator)
    pooled = pooled_outlook(log_p, logits)
    torch.testing.assert_close(pooled.exp().sum(-1), torch.ones(4))
    assert torch.equal(pooled[3], log_p[3])
    torch.testing.assert_close(pooled[:3], (log_p[:3] + DRAFT_SHARE * logits).log_softmax(-1))
    assert torch.equal(pooled_outlook(log_p, None), log_p)
    torch.testing.assert_close(pooled_outlook(log_p, logits, share=0.0), log_p)


def test_two_that_agree_are_surer_than_one() -> None:
    likely = torch.tensor([[0.6, 0.3, 0.1]]).log()
    assert pooled_outlook(torch.cat((likely, likely)), likely)[0, 0].exp().item() == pytest.approx(0.7, abs=0.05)

"""Permanent caches hold the true rows of positions below n and nothing else, whatever was predicted in between."""

import pytest
import torch

from decoding.plan import PassPlan
from draft_worker.block import DraftBlock
from draft_worker.round import DraftRound, SelectionRule, fallback_block
from draft_worker.sequence import DraftSequence, new_memory
from modeling.layers import Heads
from tests.draft_worker.caches import permanent
from tests.tiny.models import VOCAB_SIZE, TargetKind, TinyModels, TrueRows, drafted_sequence, successors, true_rows

GAMMA = 4


def assert_holds_true_rows(sequence: DraftSequence, rows: TrueRows, token_ids: list[int]) -> None:
    """n rows as a fresh install of all of them gives, and behind them the zeros of a new cache."""
    n = sequence.num_rows
    fresh = drafted_sequence(sequence.networks, rows, token_ids[: n + 1])
    for (name, ours), (_, theirs) in zip(permanent(sequence.memory), permanent(fresh.memory), strict=True):
        torch.testing.assert_close(ours[:, :, :n], theirs[:, :, :n], rtol=1e-5, atol=1e-5, msg=name)
        assert not theirs[:, :, n - 1].eq(0).all(), name
        assert ours[:, :, n:].eq(0).all(), f"{name}: something was written beyond n"


@pytest.mark.parametrize("target", ["llama", "qwen3"])
@pytest.mark.parametrize("plan", [PassPlan(0, 0, 8), PassPlan(1, 1, 4), PassPlan(3, 3, 8)])
def test_after_every_round(models: TinyModels, target: TargetKind, plan: PassPlan) -> None:
    token_ids = [(3 * index + 1) % VOCAB_SIZE for index in range(40)]
    rows = true_rows(models.runner(target), token_ids)
    sequence = drafted_sequence(models.networks("trained", target), rows, token_ids[:3])
    generator = torch.Generator().manual_seed(1)
    for num_accepted in (0, 4, 2, 1, 4, 3):
        fallback_block(sequence, GAMMA, generator)
        drafts = tuple(successors(sequence.token_ids[-1], GAMMA))
        round_ = DraftRound(
            sequence, DraftBlock(drafts, (0.5,) * GAMMA), plan, SelectionRule(None, None, frozenset()), generator
        )
        list(round_.steps())
        assert len(round_.prepared) == plan.cache_size
        assert_holds_true_rows(sequence, rows, token_ids)
        n = sequence.num_rows
        stop = n + num_accepted + 1
        sequence.token_ids += token_ids[n + 1 : stop + 1]
        sequence.install(rows.taps[n:stop], rows.decoder_kv[n:stop])
        assert sequence.num_rows == stop
        assert_holds_true_rows(sequence, rows, token_ids)


def test_scratch_rows_cannot_reach_the_verified_ones(models: TinyModels) -> None:
    memory = new_memory(models.networks("trained"), 64, GAMMA, 2)
    cache = memory.draft
    rows = torch.ones(2, 2, 16)
    heads = Heads(rows[:, :0], rows, rows)
    cache.write_scratch(0, cache.num_scratch - 2, heads)
    assert cache.key[0, :, cache.num_scratch :].eq(0).all()
    with pytest.raises(AssertionError, match="scratch"):
        cache.write_scratch(0, cache.num_scratch - 1, heads)

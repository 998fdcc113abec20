"""Blocks of the target against one clean pass, and rows against their company."""

import pytest
import torch

from modeling.cache import KeyValueCache
from modeling.invariance import choose_policy
from modeling.target import TargetBlock, TargetRunner
from tests.tiny.models import TAP_LAYERS, VOCAB_SIZE, TinyModels, true_rows
from tests.tiny.sequences import sequence_for
from verify_worker.sequence import Sequence
from verify_worker.verifier import Failure, Verification, Verifier

TEXT = [(11 * index + 5) % VOCAB_SIZE for index in range(40)]
GAMMA = 4


def verified(verifier: Verifier, sequences: list[Sequence]) -> list[Verification]:
    """Verifications, none of which fails."""
    verdicts = verifier.verify(sequences)
    assert not any(isinstance(verdict, Failure) for verdict in verdicts)
    return [verdict for verdict in verdicts if isinstance(verdict, Verification)]


def cache_with(runner: TargetRunner, token_ids: list[int]) -> KeyValueCache:
    """A cache that holds these tokens' rows."""
    cache = runner.new_cache()
    if token_ids:
        runner.forward([TargetBlock(cache, 0, token_ids)])
    return cache


def test_a_block_sees_its_prefix_and_nothing_behind(models: TinyModels) -> None:
    """Rows of blocks that follow each other, rejected rows in between, equal the rows of one clean pass."""
    runner = models.runner("qwen3")
    clean = true_rows(runner, TEXT)
    cache = runner.new_cache()
    runner.forward([TargetBlock(cache, 0, TEXT[:10])])
    start = 10
    for num_accepted in (0, 4, 2, 1, 4, 3):
        block = [*TEXT[start : start + num_accepted + 1], *[99] * (GAMMA - num_accepted)]
        rows = runner.forward([TargetBlock(cache, start, block)])
        kept = slice(start, start + num_accepted + 1)
        torch.testing.assert_close(rows.logits[: num_accepted + 1], clean.logits[kept], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rows.taps[: num_accepted + 1], clean.taps[kept], rtol=1e-4, atol=1e-4)
        start += num_accepted + 1
    fresh = runner.new_cache()
    runner.forward([TargetBlock(fresh, 0, TEXT[:start])])
    torch.testing.assert_close(cache.key[:, :, :start], fresh.key[:, :, :start], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache.value[:, :, :start], fresh.value[:, :, :start], rtol=1e-4, atol=1e-4)


def test_sequences_of_one_pass_do_not_see_each_other(models: TinyModels) -> None:
    runner = models.runner("llama")
    caches = [runner.new_cache(), runner.new_cache()]
    for cache, length in zip(caches, (12, 3), strict=True):
        runner.forward([TargetBlock(cache, 0, TEXT[:length])])
    rows = runner.forward([TargetBlock(caches[0], 12, TEXT[12:17]), TargetBlock(caches[1], 3, TEXT[3:8])])
    clean = true_rows(runner, TEXT).logits
    torch.testing.assert_close(rows.logits[:5], clean[12:17], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rows.logits[5:], clean[3:8], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chosen_shapes_leave_every_row_alone(models: TinyModels, dtype: torch.dtype) -> None:
    """Bit for bit: one row a step, a block, and blocks of several sequences together, at every prefix length."""
    runner = models.runner("llama", dtype, num_positions=96)
    policy = choose_policy(runner, GAMMA, 4)
    verifier = Verifier(runner, policy, TAP_LAYERS[-1] + 1)
    for length in (1, 7, 30, 35):
        prompt = TEXT[:length]
        alone = cache_with(runner, prompt[:-1])
        steps, token_ids = [], list(prompt)
        for _ in range(GAMMA + 1):
            (verification,) = verified(verifier, [sequence_for(token_ids, alone, [])])
            steps.append(verification)
            token_ids.append(verification.outcome.anchor)
        crowd = []
        for wrong in (None, 0, 2):
            cache = cache_with(runner, prompt[:-1])
            drafts = [
                (token + 1) % VOCAB_SIZE if index == wrong else token
                for index, token in enumerate(token_ids[length : length + GAMMA])
            ]
            crowd.append(sequence_for(prompt, cache, drafts))
        for verification, num_accepted in zip(verified(verifier, crowd), (GAMMA, 0, 2), strict=True):
            assert verification.outcome.num_accepted == num_accepted
            assert verification.outcome.anchor == token_ids[length + num_accepted]
            assert verification.taps.shape[0] == num_accepted + 1  # rejected rows stay here
            expected = torch.cat([step.taps for step in steps[: num_accepted + 1]])
            assert torch.equal(verification.taps, expected)


def test_decoder_rows_are_those_of_the_layers_above_the_deepest_tap(models: TinyModels) -> None:
    runner = models.runner("llama")
    rows = true_rows(runner, TEXT)
    cache = runner.new_cache()
    runner.forward([TargetBlock(cache, 0, TEXT)])
    verifier = Verifier(runner, choose_policy(runner, GAMMA, 1), TAP_LAYERS[-1] + 1)
    found = verifier.decoder_rows(sequence_for(TEXT, cache, []), 3, 9)
    assert found.shape == (6, 2, 2, 2, 16)
    assert torch.equal(found, rows.decoder_kv[3:9])
    assert torch.equal(found[0, 1, 1], cache.value[5, :, 3])

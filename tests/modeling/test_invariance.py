"""The row policy: whatever it promises to leave a row's bits alone does so in whole forward passes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from modeling.invariance import CANDIDATE_ROWS, RowPolicy, choose_policy
from modeling.kernels.build import load_kernels
from modeling.kernels.packed import PackedWeight
from modeling.target import TargetBlock, TargetRows, TargetRunner, load_target
from tests.modeling.tiny_models import TAP_LAYERS, random_tokens, save_reference

NUM_DRAFTS = 6
BLOCK = NUM_DRAFTS + 1
MAX_SEQS = 3
Switch = Callable[[bool], None]


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Switch]:
    """Switch our kernels on or off for this test; asking for them where they do not exist skips it."""

    def switch(on: bool) -> None:
        monkeypatch.setenv("JETSPEC_KERNELS", "1" if on else "0")
        load_kernels.cache_clear()
        if on and load_kernels() is None:
            pytest.skip("neither AVX-512 nor AVX2, or no C compiler, on this machine")

    yield switch
    load_kernels.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    save_reference(path, "qwen3")
    return path


def load_runner(folder: Path, dtype: torch.dtype) -> TargetRunner:
    return TargetRunner(load_target(folder, dtype, torch.device("cpu")), TAP_LAYERS, 512 + 16)


def verify(runner: TargetRunner, policy: RowPolicy, texts: list[list[int]], start: int) -> list[TargetRows]:
    """Blocks of several sequences behind prompts of `start` tokens, grouped and padded as the policy says."""
    caches = [runner.new_cache() for _ in texts]
    for cache, text in zip(caches, texts, strict=True):
        runner.forward([TargetBlock(cache, 0, text[:start])])
    blocks = []
    for cache, text in zip(caches, texts, strict=True):
        rows = text[start:]
        blocks.append(TargetBlock(cache, start, rows + [0] * policy.padding(len(rows))))
    results: list[TargetRows] = [TargetRows(torch.empty(0), torch.empty(0), torch.empty(0))] * len(texts)
    for group in policy.groups([len(block.token_ids) for block in blocks]):
        out = runner.forward([blocks[index] for index in group])
        row = 0
        for index in group:
            real = len(texts[index]) - start
            results[index] = TargetRows(
                out.logits[row : row + real], out.taps[row : row + real], out.hidden[row : row + real]
            )
            row += len(blocks[index].token_ids)
    return results


def step_by_step(runner: TargetRunner, policy: RowPolicy, text: list[int], start: int) -> TargetRows:
    """The same rows, one token at a time in autoregressive steps."""
    cache = runner.new_cache()
    runner.forward([TargetBlock(cache, 0, text[:start])])
    rows = []
    for position in range(start, len(text)):
        tokens = [text[position]] + [0] * policy.padding(1)
        out = runner.forward([TargetBlock(cache, position, tokens)])
        rows.append(TargetRows(out.logits[:1], out.taps[:1], out.hidden[:1]))
    return TargetRows(*(torch.cat(parts) for parts in zip(*((r.logits, r.taps, r.hidden) for r in rows), strict=True)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("own", [True, False])
def test_steps_and_blocks_agree_bit_for_bit(folder: Path, own_kernels: Switch, dtype: torch.dtype, own: bool) -> None:
    own_kernels(own)
    runner = load_runner(folder, dtype)
    assert isinstance(runner.head, PackedWeight) is own
    policy = choose_policy(runner, NUM_DRAFTS, MAX_SEQS)
    for start in (5, 249, 253, 506):  # inside a bucket, across its end, across the cut last bucket
        texts = [random_tokens(start + count, seed) for seed, count in enumerate((BLOCK, BLOCK, 3))]
        together = verify(runner, policy, texts, start)
        for text, rows in zip(texts, together, strict=True):
            single = step_by_step(runner, policy, text, start)
            assert torch.equal(rows.logits, single.logits), start
            assert torch.equal(rows.taps, single.taps), start


def test_own_kernels_need_no_padding_and_share_every_pass(folder: Path, own_kernels: Switch) -> None:
    own_kernels(True)
    for dtype in (torch.bfloat16, torch.float32):
        policy = choose_policy(load_runner(folder, dtype), NUM_DRAFTS, MAX_SEQS)
        assert policy.block_rows == BLOCK
        assert policy.max_shared_rows == BLOCK * MAX_SEQS


def test_a_kernel_that_depends_on_the_row_count_is_found(
    folder: Path, own_kernels: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product that differs below four rows and above ten forces steps of four rows and blocks that run alone."""
    own_kernels(False)
    from modeling import invariance
    from modeling.kernels.packed import Weight, linear

    def moody(rows: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = linear(rows, weight, bias)
        return out if 4 <= rows.shape[0] <= 10 else out * 2

    monkeypatch.setattr(invariance, "linear", moody)
    runner = load_runner(folder, torch.bfloat16)
    policy = choose_policy(runner, NUM_DRAFTS, MAX_SEQS)
    assert policy == RowPolicy(autoregressive_rows=4, block_rows=BLOCK, max_shared_rows=10)

    def never(rows: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(rows, weight, bias) + rows.shape[0]

    monkeypatch.setattr(invariance, "linear", never)
    policy = choose_policy(runner, NUM_DRAFTS, MAX_SEQS)
    assert policy == RowPolicy(BLOCK, BLOCK, 1)  # only whole blocks agree with blocks


def test_a_target_without_drafts_still_has_a_policy(folder: Path, own_kernels: Switch) -> None:
    own_kernels(False)
    policy = choose_policy(load_runner(folder, torch.float32), 0, 1)
    assert policy.autoregressive_rows == policy.block_rows == 1
    assert policy.padding(1) == 0


def test_padding() -> None:
    policy = RowPolicy(autoregressive_rows=2, block_rows=9, max_shared_rows=18)
    assert [policy.padding(n) for n in (1, 2, 3, 8, 9, 10)] == [1, 0, 6, 1, 0, 0]
    assert 1 in CANDIDATE_ROWS


@pytest.mark.parametrize(
    ("limit", "rows", "expected"),
    [
        (18, [9, 9, 9], [[0, 1], [2]]),
        (18, [2, 9, 2, 9, 2], [[0, 1, 2], [3, 4]]),
        (1, [9, 2, 9], [[0], [1], [2]]),
        (18, [30, 2], [[0], [1]]),
        (18, [], []),
        (27, [9, 9, 9], [[0, 1, 2]]),
    ],
)
def test_groups(limit: int, rows: list[int], expected: list[list[int]]) -> None:
    assert list(RowPolicy(2, 9, limit).groups(rows)) == expected

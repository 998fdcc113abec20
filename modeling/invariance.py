"""Which shapes leave a row's bits alone on this machine, found by trying.

Matrix kernels are chosen by row count, and in some of them a row's last bit depends on how many rows come along. A
block is
exact against one-row decoding only in shapes that agree with it; this module tries the target's own weights and
picks them.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.cache import KeyMask, KeyValueCache
from modeling.kernels.packed import Weight, linear
from modeling.target import KEY_BUCKET, Target, TargetRunner

logger = logging.getLogger("jetspec.invariance")

CANDIDATE_ROWS = (1, 2, 3, 4, 6, 8)
MAX_WINDOWS = 8


@dataclass(frozen=True)
class RowPolicy:
    """Rows of an autoregressive step, rows of a block, and how many blocks may share a pass (1: each runs alone)."""

    autoregressive_rows: int
    block_rows: int
    max_shared_rows: int

    def padding(self, num_rows: int) -> int:
        """Rows to add behind a block so that it has an agreed shape."""
        if num_rows <= self.autoregressive_rows:
            return self.autoregressive_rows - num_rows
        return max(0, self.block_rows - num_rows)

    def groups(self, rows: Sequence[int]) -> Iterator[list[int]]:
        """Split blocks (by their rows) into passes whose total stays agreed."""
        group: list[int] = []
        total = 0
        for index, count in enumerate(rows):
            if group and total + count > self.max_shared_rows:
                yield group
                group, total = [], 0
            group.append(index)
            total += count
        if group:
            yield group


def choose_policy(runner: TargetRunner, num_draft_tokens: int, max_num_seqs: int) -> RowPolicy:
    """Try candidate shapes on the first layer and the head; the smallest that agrees with a block becomes the step."""
    block = num_draft_tokens + 1
    most = block * max_num_seqs
    probes = [_Probe(weight, block, max(most, *CANDIDATE_ROWS)) for weight in _weights(runner)]

    def agrees(num_rows: int) -> bool:
        return all(probe.agrees(num_rows) for probe in probes)

    target = runner.target
    steps = [
        rows for rows in CANDIDATE_ROWS if rows <= block and agrees(rows) and _attention_agrees(target, rows, block)
    ]
    step = min(steps, default=block)
    shared = step
    while shared < most and agrees(shared + 1):
        shared += 1
    policy = RowPolicy(step, block, shared if shared >= 2 * step else 1)
    logger.info("rows: %d a step, %d a block, up to %d a pass", step, block, policy.max_shared_rows)
    return policy


class _Probe:
    """One weight on made-up rows, with the results that blocks running alone give."""

    def __init__(self, weight: Weight, block: int, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        num_rows = -(-num_rows // block) * block
        self._weight = weight
        self._rows = torch.randn(num_rows, weight.shape[1], generator=generator).to(weight.dtype)
        if isinstance(weight, Tensor):
            self._rows = self._rows.to(weight.device)
        self._alone = torch.cat([linear(rows, weight) for rows in self._rows.split(block)])

    def agrees(self, num_rows: int) -> bool:
        """Whether every row of windows of `num_rows` rows comes out as in its block."""
        last = self._rows.shape[0] - num_rows
        for start in sorted({*range(0, last + 1, max(1, last // MAX_WINDOWS)), last}):
            stop = start + num_rows
            if not torch.equal(linear(self._rows[start:stop], self._weight), self._alone[start:stop]):
                return False
        return True


def _weights(runner: TargetRunner) -> list[Weight]:
    layer = runner.target.layer(0)
    return [layer.qkv, layer.out, layer.gate_up, layer.down, runner.head]


def _attention_agrees(target: Target, num_rows: int, block: int) -> bool:
    """Whether attention of a row is the same in a step and in a block, and in both of two neighbouring key buckets."""
    shape = target.architecture
    generator = torch.Generator().manual_seed(1)
    num_keys, start = 2 * KEY_BUCKET, KEY_BUCKET - block

    def made(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(target.device, target.dtype)

    query = made(block, shape.num_heads, shape.head_dim)
    cache = KeyValueCache(shape, 1, num_keys, target.dtype, target.device)
    cache.key.copy_(made(*cache.key.shape))
    cache.value.copy_(made(*cache.value.shape))

    def run(first: int, rows: int, keys: int) -> Tensor:
        positions = torch.arange(start + first, start + first + rows, device=target.device)
        visible = torch.arange(keys, device=target.device)[None, :] <= positions[:, None]
        return cache.attend(0, query[first : first + rows], KeyMask(visible, shape.group_size, target.dtype))

    whole = run(0, block, KEY_BUCKET)
    if not torch.equal(whole, run(0, block, num_keys)):
        return False
    return all(
        torch.equal(whole[first : first + 1], run(first, num_rows, KEY_BUCKET)[:1])
        for first in range(block - num_rows + 1)
    )

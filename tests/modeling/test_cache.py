"""Scratch rows and verified rows of a cache share a tensor and never a row."""

import pytest
import torch

from modeling.cache import KeyValueCache, bucket
from modeling.layers import Heads
from tests.modeling.tiny_models import tiny_architecture

SCRATCH, POSITIONS = 6, 10


def made_cache() -> KeyValueCache:
    return KeyValueCache(tiny_architecture(), 2, POSITIONS, torch.float32, torch.device("cpu"), SCRATCH)


def rows(count: int, value: float) -> Heads:
    """Keys of `value`, values of `-value`; the query plays no part."""
    filled = torch.full((count, 2, 12), value)
    return Heads(filled[:, :0], filled, -filled)


def test_scratch_and_verified_rows_never_overlap() -> None:
    cache = made_cache()
    cache.write(0, 0, rows(POSITIONS, 1.0))
    before = cache.key.clone()
    for start in range(SCRATCH):
        for count in range(1, SCRATCH - start + 1):
            cache.write_scratch(0, start, rows(count, 9.0))
    changed = (cache.key != before).any(-1)  # [layers, heads, rows]
    assert changed[0, :, :SCRATCH].all()
    assert not changed[0, :, SCRATCH:].any()
    assert not changed[1].any()
    assert torch.equal(cache.value, -cache.key)

    scratch_before = cache.key[:, :, :SCRATCH].clone()
    for position in range(POSITIONS):
        cache.write(0, position, rows(POSITIONS - position, 3.0))
    assert torch.equal(cache.key[:, :, :SCRATCH], scratch_before)


@pytest.mark.parametrize(("row", "count"), [(0, SCRATCH + 1), (SCRATCH, 1), (SCRATCH - 1, 2), (-1, 1)])
def test_scratch_rows_that_would_reach_verified_ones_are_refused(row: int, count: int) -> None:
    cache = made_cache()
    with pytest.raises(AssertionError, match="scratch"):
        cache.write_scratch(0, row, rows(count, 1.0))
    assert not cache.key.any()


@pytest.mark.parametrize(("position", "count"), [(POSITIONS, 1), (POSITIONS - 1, 2), (-1, 1), (0, POSITIONS + 1)])
def test_rows_without_room_are_refused(position: int, count: int) -> None:
    """A single row behind the end would otherwise vanish without a word, a negative one land in the scratch area."""
    cache = made_cache()
    with pytest.raises(AssertionError, match="room"):
        cache.write(0, position, rows(count, 1.0))
    assert not cache.key.any()


def test_views_hold_scratch_then_positions_in_order() -> None:
    cache = made_cache()
    cache.write_scratch(1, 2, rows(1, 5.0))
    cache.write(1, 3, rows(2, 7.0))
    keys, values = cache.keys(1, 4), cache.values(1, 4)
    assert keys.shape == (2, SCRATCH + 4, 12)
    assert keys[0, :, 0].tolist() == [0, 0, 5, 0, 0, 0, 0, 0, 0, 7]
    assert torch.equal(values, -keys)
    assert keys.data_ptr() == cache.key[1].data_ptr()  # a view: addresses stay for life
    assert not cache.keys(0, 4).any()


def test_buckets() -> None:
    assert [bucket(n, 256, 600) for n in (1, 255, 256, 257, 512, 513, 600)] == [256, 256, 256, 512, 512, 600, 600]

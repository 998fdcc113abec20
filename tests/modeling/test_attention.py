"""Attention against a cache is right, has the same bits in any company and is deaf to what a row does not see."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from modeling.cache import KeyMask, KeyValueCache
from modeling.kernels.build import load_kernels
from modeling.layers import Heads, attend, grouped_mask
from tests.modeling.tiny_models import relative_error, tiny_architecture

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32)
SCRATCH, POSITIONS, NUM_KEYS, MAX_ROWS = 75, 140, 140, 40  # between packed slots and positions a block is empty
DIMS = (12, 16, 32, 48, 64, 80, 128, 256)
SPECIAL = (float("nan"), float("inf"), -float("inf"))

needs_kernels = pytest.mark.skipif(
    load_kernels() is None, reason="neither AVX-512 nor AVX2, or no C compiler, on this machine"
)


class Case:
    """A cache full of made-up keys and values, and query rows as they come out of a fused projection."""

    def __init__(self, dtype: torch.dtype, dim: int = 64, group: int = 3, num_kv_heads: int = 2) -> None:
        self.dtype, self.group = dtype, group
        shape = replace(tiny_architecture(), num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=dim)
        generator = torch.Generator().manual_seed(dim * 10 + group)
        self.cache = KeyValueCache(shape, 2, POSITIONS, dtype, CPU, SCRATCH)
        self.cache.key.copy_(torch.randn(self.cache.key.shape, generator=generator))
        self.cache.value.copy_(torch.randn(self.cache.value.shape, generator=generator))
        projected = torch.randn(MAX_ROWS, (group + 2) * num_kv_heads, dim, generator=generator).to(dtype)
        self.query = projected[:, : group * num_kv_heads]

    def attend(self, rows: Tensor, visible: Tensor, layer: int = 1) -> Tensor:
        """Attention of some of the query rows with the mask of all of them."""
        return self.cache.attend(layer, self.query[rows], KeyMask(visible[rows], self.group, self.dtype))

    def exact(self, visible: Tensor, layer: int = 1) -> Tensor:
        keys, values = (t[layer, :, : visible.shape[-1]].double() for t in (self.cache.key, self.cache.value))
        return attend(self.query.double(), keys, values, grouped_mask(visible, self.group, torch.float64))


def packed_visibility(num_keys: int) -> Tensor:
    """Two packed outcomes as a drafter has them: foresight rows 0..8, ten slots of its own, 60 verified positions."""
    visible = torch.zeros(MAX_ROWS, num_keys, dtype=torch.bool)
    for row in range(MAX_ROWS):
        visible[row, : row % 10] = True
        visible[row, 9 + row % 2 : 9 + row % 12 + 1] = True
        visible[row, SCRATCH : SCRATCH + 60] = True
    return visible


def causal_visibility(num_keys: int) -> Tensor:
    """Rows at positions 25, 26, ... of a target without scratch rows."""
    return torch.arange(num_keys)[None, :] <= 25 + torch.arange(MAX_ROWS)[:, None]


MASKS = {"packed": packed_visibility, "causal": causal_visibility}
ALL = torch.arange(MAX_ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_against_float64(dtype: torch.dtype, kind: str, group: int) -> None:
    case = Case(dtype, group=group)
    visible = MASKS[kind](NUM_KEYS)
    got, wanted = case.attend(ALL, visible), case.exact(visible)
    assert got.dtype == dtype and got.is_contiguous()
    assert relative_error(got, wanted) < (4e-3 if dtype == torch.bfloat16 else 1e-6)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("num_keys", [1, 15, 33, 161])
def test_dimensions_and_numbers_of_keys(dtype: torch.dtype, dim: int, num_keys: int) -> None:
    case = Case(dtype, dim)
    visible = torch.rand(MAX_ROWS, num_keys, generator=torch.Generator().manual_seed(num_keys)) < 0.5
    visible[:, num_keys // 2] = True
    for rows in (1, 2, 13, MAX_ROWS):
        got = case.attend(ALL[:rows], visible)
        assert relative_error(got, case.exact(visible)[:rows]) < (4e-3 if dtype == torch.bfloat16 else 2e-6)


def test_more_rows_than_share_a_pass() -> None:
    """200 rows of 6 heads: the kernel takes them in several passes over the keys."""
    case = Case(torch.float32)
    rows = torch.arange(200) % MAX_ROWS
    visible = causal_visibility(NUM_KEYS)
    assert relative_error(case.attend(rows, visible), case.exact(visible)[rows]) < 1e-6


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, kind: str, group: int) -> None:
    case = Case(dtype, group=group)
    visible = MASKS[kind](NUM_KEYS)
    alone = torch.cat([case.attend(ALL[row : row + 1], visible) for row in range(MAX_ROWS)])
    for num_rows in range(2, MAX_ROWS + 1):
        for start in (0, 1, 7, MAX_ROWS - num_rows):
            rows = ALL[start : start + num_rows]
            assert torch.equal(case.attend(rows, visible), alone[rows]), (num_rows, start)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", MASKS)
def test_the_bucket_and_what_lies_beyond_the_mask_leave_no_trace(dtype: torch.dtype, kind: str) -> None:
    case = Case(dtype)
    expected = case.attend(ALL, MASKS[kind](NUM_KEYS))
    for num_keys in (141, 159, 160, 161, SCRATCH + POSITIONS):
        assert torch.equal(case.attend(ALL, MASKS[kind](num_keys)), expected), num_keys
    hidden = ~MASKS[kind](SCRATCH + POSITIONS).any(0)
    for garbage in (*SPECIAL, 1e30):
        case.cache.key[:, :, hidden] = garbage
        case.cache.value[:, :, hidden] = garbage
        assert torch.equal(case.attend(ALL, MASKS[kind](NUM_KEYS)), expected), garbage
        assert torch.equal(case.attend(ALL, MASKS[kind](SCRATCH + POSITIONS)), expected), garbage


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", ["key", "value"])
@pytest.mark.parametrize("garbage", SPECIAL)
def test_a_key_spoils_only_the_rows_that_see_it(dtype: torch.dtype, place: str, garbage: float) -> None:
    case = Case(dtype)
    visible = causal_visibility(NUM_KEYS)
    expected = case.attend(ALL, visible)
    getattr(case.cache, place)[:, :, 40] = garbage
    got = case.attend(ALL, visible)
    sees = visible[:, 40]
    assert torch.equal(got[~sees], expected[~sees])
    assert not torch.isfinite(got[sees]).any()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_foreign_queries_cannot_spoil_a_row(dtype: torch.dtype) -> None:
    case = Case(dtype)
    visible = packed_visibility(NUM_KEYS)
    expected = case.attend(ALL, visible)
    case.query[5] = float("nan")
    got = case.attend(ALL, visible)
    assert bool(got[5].isnan().all())
    assert torch.equal(got[ALL != 5], expected[ALL != 5])


@needs_kernels
def test_a_row_that_sees_nothing_gives_zeros() -> None:
    case = Case(torch.float32)
    visible = causal_visibility(NUM_KEYS)
    expected = case.attend(ALL, visible)
    visible[3] = False
    got = case.attend(ALL, visible)
    assert not got[3].any()
    assert torch.equal(got[ALL != 3], expected[ALL != 3])
    assert not case.attend(ALL, torch.zeros_like(visible)).any()
    assert case.attend(ALL[:0], visible).shape == (0, expected.shape[1])


@needs_kernels
@pytest.mark.parametrize("scale", [1e-20, 1e3, 1e30])
def test_scores_far_apart(scale: float) -> None:
    """Large scores pick one key; their exponentials may neither overflow nor vanish together."""
    case = Case(torch.float32)
    case.cache.key.mul_(scale)
    visible = causal_visibility(NUM_KEYS)
    assert relative_error(case.attend(ALL, visible), case.exact(visible)) < 1e-4


@needs_kernels
def test_other_layouts_of_rows() -> None:
    case = Case(torch.float32)
    visible = causal_visibility(NUM_KEYS)
    expected = case.attend(ALL, visible)
    mask = KeyMask(visible, case.group, torch.float32)
    assert torch.equal(case.cache.attend(1, case.query.contiguous(), mask), expected)
    turned = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(case.cache.attend(1, turned, mask), expected)
    assert torch.equal(case.attend(ALL[::3], visible), expected[::3])
    sliced = KeyMask(visible.T.contiguous().T, case.group, torch.float32)
    assert torch.equal(case.cache.attend(1, case.query, sliced), expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_writes_land_where_they_belong(dtype: torch.dtype) -> None:
    """Slices of a fused projection, copies, and other strides: what torch would write, and nothing beside it."""
    case = Case(dtype, dim=12)
    expected_key, expected_value = case.cache.key.clone(), case.cache.value.clone()
    projected = torch.randn(7, 10, 12).to(dtype)
    key, value = projected[:, 6:8], projected[:, 8:]
    for layer, row, heads in (
        (0, 5, Heads(projected[:, :6], key, value)),
        (1, 0, Heads(projected[:, :6], key.contiguous(), value.transpose(1, 2).contiguous().transpose(1, 2))),
        (1, 30, Heads(projected[::2, :6], key[::2], value.contiguous()[::2])),
        (0, 12, Heads(projected[:1, :6], key[:1], value[:1])),
    ):
        if row < SCRATCH:
            case.cache.write_scratch(layer, row, heads)
        else:
            case.cache.write(layer, row - SCRATCH, heads)
        stop = row + heads.key.shape[0]
        expected_key[layer, :, row:stop] = heads.key.transpose(0, 1)
        expected_value[layer, :, row:stop] = heads.value.transpose(0, 1)
    assert torch.equal(case.cache.key, expected_key)
    assert torch.equal(case.cache.value, expected_value)


def test_without_kernels_torch_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(torch.float32)
    visible = packed_visibility(NUM_KEYS)
    expected = case.attend(ALL, visible)
    key, value = torch.randn(2, 3, 2, 64)
    case.cache.write(1, 4, Heads(key[:, :0], key, value))
    written = case.attend(ALL, visible)
    load_kernels.cache_clear()
    monkeypatch.setenv("JETSPEC_KERNELS", "0")
    try:
        other = Case(torch.float32)
        assert relative_error(other.attend(ALL, visible), expected) < 1e-6
        other.cache.write(1, 4, Heads(key[:, :0], key, value))
        assert relative_error(other.attend(ALL, visible), written) < 1e-6
        assert not torch.equal(expected, written)
    finally:
        load_kernels.cache_clear()


@needs_kernels
def test_a_mask_for_other_rows_or_a_larger_cache_is_refused() -> None:
    case = Case(torch.float32)
    with pytest.raises(AssertionError, match="mask"):
        case.cache.attend(0, case.query[:3], KeyMask(causal_visibility(NUM_KEYS), case.group, torch.float32))
    with pytest.raises(AssertionError, match="mask"):
        case.attend(ALL, causal_visibility(SCRATCH + POSITIONS + 1))

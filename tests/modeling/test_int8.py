"""Weights of eight bits: right within their error bound, the same bits in any company, and nothing without VNNI."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.kernels import int8
from modeling.kernels.build import load_kernels
from modeling.kernels.int8 import GROUP, OFFSET, choose_quantization, has_int8, quantise
from modeling.kernels.packed import can_pack, pack
from modeling.layers import DecoderLayer, RotaryTable
from modeling.vocabulary import DraftHead
from tests.modeling.tiny_models import relative_error, tiny_architecture

DTYPES = (torch.bfloat16, torch.float32)
SHAPES = ((96, 64), (100, 64), (33, 7), (1, 1), (31, 1), (40, 65), (65, 200), (64, 576))
MAX_ROWS = 30
CPU = torch.device("cpu")

needs_int8 = pytest.mark.skipif(not has_int8(), reason="no VNNI or no C compiler on this machine")


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("JETSPEC_KERNELS", "0")
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


def made(shape: tuple[int, int], dtype: torch.dtype, num_rows: int = MAX_ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    weight = torch.randn(shape, generator=generator).to(dtype)
    return weight, torch.randn(num_rows, shape[1], generator=generator).to(dtype)


def dequantised(weight: Tensor) -> Tensor:
    """What the kernel multiplies by."""
    levels, scale = quantise(weight)
    return (levels.double() - OFFSET) * scale.double()[:, None]


def rounded_rows(rows: Tensor) -> Tensor:
    """Rows as the kernel sees them: in groups, each with 127 steps to its largest value."""
    padded = F.pad(rows.double(), (0, -rows.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    step = (padded.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=1e-300)
    rounded: Tensor = (padded / step).round() * step
    return rounded.flatten(1)[:, : rows.shape[1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_levels_are_the_nearest(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, _ = made(shape, dtype)
    levels, scale = quantise(weight)
    assert int(levels.min()) >= 1  # symmetric: -127 to 127
    error = (dequantised(weight) - weight.double()).abs()
    assert bool((error <= scale.double()[:, None] * 0.5001).all())


def test_zero_rows_of_a_weight_stay_zero() -> None:
    levels, scale = quantise(torch.zeros(3, 5))
    assert levels.tolist() == [[OFFSET] * 5] * 3
    assert scale.tolist() == [0.0] * 3


@needs_int8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_the_plain_reference(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Exactly the product of quantised weights with rows rounded in groups, but for what may round either way."""
    weight, rows = made(shape, dtype)
    product = pack(weight, "int8")(rows)
    assert product.dtype == dtype
    expected = rounded_rows(rows) @ dequantised(weight).T
    assert relative_error(product, expected) < (4e-3 if dtype == torch.bfloat16 else 1e-4)


@needs_int8
@pytest.mark.parametrize("shape", SHAPES)
def test_error_bound_of_the_true_product(shape: tuple[int, int]) -> None:
    """Half a step of each weight times its value, and half a step of each value times its weight."""
    weight, rows = made(shape, torch.float32)
    exact = rows.double() @ weight.double().T
    groups = F.pad(rows.double(), (0, -shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    half_step = groups.abs().amax(dim=-1, keepdim=True).expand_as(groups).flatten(1)[:, : shape[1]] / 254
    largest = weight.double().abs().amax(dim=1)
    bound = rows.double().abs().sum(dim=1)[:, None] * largest / 254 + half_step @ dequantised(weight).abs().T
    error = (pack(weight, "int8")(rows).double() - exact).abs()
    assert bool((error <= bound * 1.001 + 1e-6).all())
    if shape[1] >= 64:
        assert relative_error(exact + error, exact) < 0.015


@needs_int8
def test_a_massive_channel_spoils_its_own_group_only() -> None:
    weight, rows = made((64, 576), torch.float32)
    rows[:, 70] = 3000.0
    others = torch.cat((rows[:, :GROUP], torch.zeros(MAX_ROWS, GROUP), rows[:, 2 * GROUP :]), dim=1)
    exact = others.double() @ weight.double().T
    alone = torch.zeros_like(rows)
    alone[:, GROUP : 2 * GROUP] = rows[:, GROUP : 2 * GROUP]
    packed = pack(weight, "int8")
    rest = packed(rows).double() - packed(alone).double()
    assert relative_error(rest, exact) < 0.015


@needs_int8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, rows = made(shape, dtype)
    packed = pack(weight, "int8")
    alone = torch.cat([packed(rows[index : index + 1]) for index in range(len(rows))])
    for num_rows in range(1, MAX_ROWS + 1):
        assert torch.equal(packed(rows[-num_rows:]), alone[-num_rows:]), num_rows


@needs_int8
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_foreign_rows_cannot_spoil_a_row(value: float) -> None:
    weight, rows = made((96, 64), torch.float32, 13)
    packed = pack(weight, "int8")
    expected = packed(rows)
    rows[5, 3] = value
    product = packed(rows)
    assert not bool(product[5].isfinite().any())
    keep = torch.arange(13) != 5
    assert torch.equal(product[keep], expected[keep])


@needs_int8
def test_zeros_and_layouts() -> None:
    weight, rows = made((40, 24), torch.float32, 12)
    packed = pack(weight, "int8")
    expected = packed(rows)
    assert torch.equal(packed(torch.zeros(2, 24)), torch.zeros(2, 40))
    assert torch.equal(packed(rows.t().contiguous().t()), expected)
    assert torch.equal(packed(rows.view(3, 4, 24)), expected.view(3, 4, 40))
    assert packed(rows[:0]).shape == (0, 40)


@needs_int8
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cut_shares_memory_where_panels_allow(dtype: torch.dtype) -> None:
    weight, rows = made((100, 70), dtype, 5)
    packed = pack(weight, "int8")
    cut = packed.rows_from(64)
    assert cut is not None
    assert torch.equal(cut(rows), packed(rows)[:, 64:])
    assert packed.rows_from(33) is None


@needs_int8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "qk_norm": False}, {"head_dim": 16}])
def test_a_layer_stays_close(dtype: torch.dtype, changes: dict[str, object]) -> None:
    """Every part of a packed layer, and twice the same bits."""
    shape = tiny_architecture(**changes)
    torch.manual_seed(3)
    plain, packed = DecoderLayer(shape, dtype), DecoderLayer(shape, dtype)
    packed.load_state_dict(plain.state_dict())
    packed.pack("int8")
    assert packed.fused is not None
    hidden, attended = torch.randn(9, shape.hidden_size).to(dtype), torch.randn(9, shape.query_width).to(dtype)
    rotary = RotaryTable(shape, 32, dtype, CPU).span(4, 13)
    with torch.no_grad():
        for run in (
            lambda layer: layer.project(hidden, rotary).query,
            lambda layer: layer.project(hidden, rotary).value,
            lambda layer: layer.context(hidden, rotary, normalise=True).key,
            lambda layer: layer.context(hidden, rotary, normalise=False).value,
            lambda layer: layer.finish(hidden, attended),
        ):
            _compare(run, plain, packed)


def _compare(run: Callable[[DecoderLayer], Tensor], plain: DecoderLayer, packed: DecoderLayer) -> None:
    got, wanted = run(packed), run(plain)
    assert got.dtype == wanted.dtype
    assert relative_error(got, wanted) < 0.03
    assert torch.equal(run(packed), got)


@needs_int8
def test_a_head_stays_close() -> None:
    weight, rows = made((96, 64), torch.bfloat16)
    kept = torch.tensor([90, 3, 0, 17, 20])
    plain = DraftHead(weight, kept, packed=True)
    quantised = DraftHead(weight, kept, packed=True, quantization="int8")
    assert quantised.logits(rows).shape == (MAX_ROWS, 5)
    assert relative_error(quantised.logits(rows), plain.logits(rows)) < 0.03


@needs_int8
def test_auto_takes_int8_on_the_cpu_only() -> None:
    assert choose_quantization("auto", CPU) == "int8"
    assert choose_quantization("int8", CPU) == "int8"
    assert choose_quantization("none", CPU) == "none"
    assert choose_quantization("auto", torch.device("cuda")) == "none"


def test_without_kernels_weights_stay_as_they_are(without_kernels: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger=int8.logger.name):
        assert choose_quantization("auto", CPU) == "none"
        assert caplog.text == ""
        assert choose_quantization("int8", CPU) == "none"
        assert "VNNI" in caplog.text
    weight, rows = made((96, 64), torch.float32)
    assert not can_pack(weight)
    head = DraftHead(weight, None, packed=True, quantization="int8")
    assert torch.equal(head.logits(rows), F.linear(rows, weight))
    layer = DecoderLayer(tiny_architecture())
    layer.pack("int8")
    assert layer.fused is None


def test_a_library_without_vnni_has_no_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """As compiled on a CPU with AVX-512 alone: the symbols are missing."""
    monkeypatch.setattr(int8, "load_kernels", object)
    assert not has_int8()
    assert choose_quantization("auto", CPU) == "none"

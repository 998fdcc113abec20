"""A decoder layer in its plain and in its packed form: one result, and in the packed form the same bits in any
company."""

import pytest
import torch
from torch import Tensor

from modeling.architecture import Architecture
from modeling.kernels.build import load_kernels
from modeling.layers import DecoderLayer, Heads, Rotary, RotaryTable, attend, block_layer, grouped_mask, rms_norm
from tests.modeling.tiny_models import relative_error, tiny_architecture

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32)
KINDS = {
    "llama": tiny_architecture(qk_norm=False),
    "qwen2": tiny_architecture(qk_norm=False, attention_bias=True),
    "qwen3": tiny_architecture(),
    "wide heads": tiny_architecture(head_dim=16, hidden_size=33, intermediate_size=47),
}
NUM_ROWS = 40

needs_kernels = pytest.mark.skipif(
    load_kernels() is None, reason="neither AVX-512 nor AVX2, or no C compiler, on this machine"
)


def make_layer(shape: Architecture, dtype: torch.dtype) -> DecoderLayer:
    torch.manual_seed(0)
    layer = DecoderLayer(shape, dtype)
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif "bias" in name:
            torch.nn.init.normal_(parameter)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    return layer.requires_grad_(False)


def rows_for(shape: Architecture, dtype: torch.dtype) -> tuple[Tensor, Tensor, Rotary]:
    """Residual rows, attended rows and rotary entries of positions that are not in order."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(NUM_ROWS, shape.hidden_size, generator=generator).to(dtype)
    attended = torch.randn(NUM_ROWS, shape.query_width, generator=generator).to(dtype)
    positions = torch.randint(400, (NUM_ROWS,), generator=generator)
    return hidden, attended, RotaryTable(shape, 400, dtype, CPU).at(positions)


def parts(heads: Heads) -> tuple[Tensor, ...]:
    return heads.query, heads.key, heads.value


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_against_plain(kind: str, dtype: torch.dtype) -> None:
    shape = KINDS[kind]
    hidden, attended, rotary = rows_for(shape, dtype)
    exact = make_layer(shape, dtype).double()
    wide_rotary = Rotary(rotary.cos.double(), rotary.sin.double())
    packed = make_layer(shape, dtype)
    packed.pack()
    limit = 2e-2 if dtype == torch.bfloat16 else 2e-6
    for got, wanted in zip(
        parts(packed.project(hidden, rotary)), parts(exact.project(hidden.double(), wide_rotary)), strict=True
    ):
        assert got.dtype == dtype
        assert relative_error(got, wanted) < limit
    assert relative_error(packed.finish(hidden, attended), exact.finish(hidden.double(), attended.double())) < limit
    for normalise in (True, False):
        got_context = packed.context(hidden, rotary, normalise=normalise)
        wanted_context = exact.context(hidden.double(), wide_rotary, normalise=normalise)
        assert got_context.query.shape[-2] == 0
        assert relative_error(got_context.key, wanted_context.key) < limit
        assert relative_error(got_context.value, wanted_context.value) < limit


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_have_the_same_bits_in_any_company(kind: str, dtype: torch.dtype) -> None:
    shape = KINDS[kind]
    hidden, attended, rotary = rows_for(shape, dtype)
    layer = make_layer(shape, dtype)
    layer.pack()
    projected, finished = layer.project(hidden, rotary), layer.finish(hidden, attended)
    context = layer.context(hidden, rotary, normalise=True)
    for num_rows in (1, 2, 7, 9, 12, 13, 25, 36):
        for start in (0, 1, NUM_ROWS - num_rows):
            window = slice(start, start + num_rows)
            for got, wanted in zip(
                parts(layer.project(hidden[window], rotary[window])), parts(projected[window]), strict=True
            ):
                assert torch.equal(got, wanted), (num_rows, start)
            assert torch.equal(layer.finish(hidden[window], attended[window]), finished[window]), (num_rows, start)
            part = layer.context(hidden[window], rotary[window], normalise=True)
            assert torch.equal(part.key, context.key[window])
            assert torch.equal(part.value, context.value[window])


@needs_kernels
def test_packed_layer_passes_over_nan_in_other_rows() -> None:
    shape = KINDS["qwen3"]
    hidden, attended, rotary = rows_for(shape, torch.float32)
    layer = make_layer(shape, torch.float32)
    layer.pack()
    expected = layer.finish(hidden, attended)
    hidden[5] = float("nan")
    spoiled = layer.finish(hidden, attended)
    keep = torch.arange(NUM_ROWS) != 5
    assert torch.equal(spoiled[keep], expected[keep])
    assert bool(spoiled[5].isnan().all())
    assert bool(layer.project(hidden, rotary).query[5].isnan().all())


@needs_kernels
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1000.0])
def test_packed_layer_stands_large_and_small_gates(scale: float) -> None:
    """Gates far from zero take the sigmoid to its ends, where a careless exponential overflows."""
    shape = KINDS["llama"]
    hidden, attended, _ = rows_for(shape, torch.float32)
    plain, packed = make_layer(shape, torch.float32), make_layer(shape, torch.float32)
    for layer in (plain, packed):
        layer.gate_up.data.mul_(scale)  # type: ignore[union-attr]
    packed.pack()
    expected = plain.double().finish(hidden.double(), attended.double())
    assert relative_error(packed.finish(hidden, attended), expected) < 2e-6


def test_leading_dimensions_are_batches() -> None:
    """Rows [batch, rows, hidden] with a context of their own give what each batch entry gives alone."""
    shape = KINDS["qwen3"]
    hidden, attended, rotary = rows_for(shape, torch.float32)
    layer = make_layer(shape, torch.float32)
    batch = hidden.view(4, 10, -1)
    turned = Rotary(rotary.cos.view(4, 10, 1, -1), rotary.sin.view(4, 10, 1, -1))
    before, rows = Rotary(turned.cos[:, :6], turned.sin[:, :6]), Rotary(turned.cos[:, 6:], turned.sin[:, 6:])
    context = layer.context(batch[:, :6], before, normalise=True)
    visible = torch.cat((torch.ones(4, 6, dtype=torch.bool), torch.ones(4, 4, dtype=torch.bool).tril()), dim=1)
    mask = grouped_mask(visible, shape.group_size, torch.float32)
    together = block_layer(layer, batch[:, 6:], rows, context, mask)
    for index in range(4):
        own = Heads(context.query[index], context.key[index], context.value[index])
        alone = block_layer(layer, batch[index, 6:], Rotary(rows.cos[index], rows.sin[index]), own, mask)
        assert relative_error(together[index], alone) < 1e-6
    batched = layer.finish(batch, attended.view(4, 10, -1)).view(NUM_ROWS, -1)
    assert relative_error(batched, layer.finish(hidden, attended)) < 1e-6


def test_attention_matches_its_definition() -> None:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(5, 6, 12, generator=generator)
    key, value = torch.randn(2, 9, 12, generator=generator), torch.randn(2, 9, 12, generator=generator)
    visible = torch.rand(5, 9, generator=generator) < 0.6
    visible[:, 0] = True
    got = attend(query, key, value, grouped_mask(visible, 3, torch.float32)).view(5, 6, 12)
    for head in range(6):
        scores = (query[:, head] @ key[head // 3].T / 12**0.5).masked_fill(~visible, float("-inf"))
        assert relative_error(got[:, head], scores.softmax(-1) @ value[head // 3]) < 1e-6


def test_rms_norm_matches_its_definition() -> None:
    rows, weight = torch.randn(7, 33), torch.rand(33)
    expected = rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert relative_error(rms_norm(rows, weight, 1e-5), expected) < 1e-6


def test_gradients_reach_a_plain_layer() -> None:
    shape = KINDS["qwen2"]
    layer = make_layer(shape, torch.float32).requires_grad_(True)
    hidden, _, rotary = rows_for(shape, torch.float32)
    context = layer.context(hidden[:8], rotary[:8], normalise=True)
    mask = grouped_mask(torch.ones(4, 12, dtype=torch.bool), shape.group_size, torch.float32)
    block_layer(layer, hidden[8:12], rotary[8:12], context, mask).square().sum().backward()
    without = [name for name, p in layer.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without == []

"""A stack in one call gives what its layers give one by one, bit for bit, and writes where it should, nowhere else."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from modeling.architecture import Architecture
from modeling.cache import KeyMask, KeyValueCache
from modeling.kernels.build import load_kernels
from modeling.kernels.int8 import Quantization, has_int8
from modeling.layers import DecoderLayer, Rotary, RotaryTable
from modeling.stack import FrozenRows, LayerStack, StackedLayer
from tests.modeling.tiny_models import relative_error, tiny_architecture

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32)
NUM_SCRATCH, NUM_POSITIONS, NUM_KEYS = 12, 40, 32
NUM_LAYERS, NUM_ROWS, FIRST_ROW = 3, 7, 4
PLACES = ((0, False), (0, True), (1, True))  # two layers for the lower tap, one for the other

needs_kernels = pytest.mark.skipif(
    load_kernels() is None, reason="neither AVX-512 nor AVX2, or no C compiler, on this machine"
)
quantizations = pytest.mark.parametrize(
    "quantization",
    ["none", pytest.param("int8", marks=pytest.mark.skipif(not has_int8(), reason="no VNNI on this machine"))],
)


def make_layers(shape: Architecture, dtype: torch.dtype) -> list[DecoderLayer]:
    torch.manual_seed(5)
    layers = [DecoderLayer(shape, dtype).requires_grad_(False) for _ in range(NUM_LAYERS)]
    for layer in layers:
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(0.2 * torch.randn(parameter.shape).to(dtype))
            else:
                parameter.data.mul_(5.0)
    return layers


def make_stack(layers: list[DecoderLayer], *, normalise_context: bool = True) -> LayerStack:
    placed = [StackedLayer(layer, tap, is_last) for layer, (tap, is_last) in zip(layers, PLACES, strict=True)]
    return LayerStack(placed, normalise_context=normalise_context)


class Scene:
    """Rows, what they see, and a cache full of numbers; the same for everybody who asks."""

    def __init__(self, shape: Architecture, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)

        def made(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(dtype)

        self.shape, self.dtype = shape, dtype
        self.hidden, self.feature = made(NUM_ROWS, shape.hidden_size), made(NUM_ROWS, shape.hidden_size)
        self.taps = made(NUM_ROWS, 2, shape.hidden_size)
        self.rotary = RotaryTable(shape, 64, dtype, CPU).at(torch.arange(NUM_ROWS) + 20)
        self.visible = torch.rand(NUM_ROWS, NUM_SCRATCH + NUM_KEYS, generator=generator) < 0.5
        self.visible[:, FIRST_ROW : FIRST_ROW + NUM_ROWS] = torch.ones(NUM_ROWS, NUM_ROWS).tril().bool()
        self.is_frozen = torch.tensor([True, False, True, True, False, False, False])
        self._filling = made(2, NUM_LAYERS, shape.num_kv_heads, NUM_SCRATCH + NUM_POSITIONS, shape.head_dim)

    @property
    def mask(self) -> KeyMask:
        return KeyMask(self.visible, self.shape.group_size, self.dtype)

    def cache(self) -> KeyValueCache:
        cache = KeyValueCache(self.shape, NUM_LAYERS, NUM_POSITIONS, self.dtype, CPU, NUM_SCRATCH)
        cache.key.copy_(self._filling[0])
        cache.value.copy_(self._filling[1])
        return cache


SHAPES = {
    "qwen3": tiny_architecture(num_layers=NUM_LAYERS),
    "llama": tiny_architecture(num_layers=NUM_LAYERS, qk_norm=False),
    "qwen2": tiny_architecture(num_layers=NUM_LAYERS, qk_norm=False, attention_bias=True, head_dim=16),
}


def packed_stack(shape: Architecture, dtype: torch.dtype, quantization: Quantization, **options: bool) -> LayerStack:
    layers = make_layers(shape, dtype)
    for layer in layers:
        layer.pack(quantization)
    return make_stack(layers, **options)


def one_by_one(stack: LayerStack) -> LayerStack:
    """The same packed layers without the call for all of them."""
    slow = LayerStack(stack._layers, normalise_context=stack._normalise_context)
    slow._fused = None
    return slow


@needs_kernels
@quantizations
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("with_frozen", [False, True])
def test_one_call_is_its_layers(kind: str, dtype: torch.dtype, quantization: Quantization, with_frozen: bool) -> None:
    scene = Scene(SHAPES[kind], dtype)
    stack = packed_stack(scene.shape, dtype, quantization, normalise_context=not with_frozen)
    assert stack._fused is not None
    frozen = FrozenRows(scene.is_frozen, scene.feature) if with_frozen else None
    before = scene.hidden.clone()
    caches = scene.cache(), scene.cache()
    outputs = [
        one.run(scene.hidden, scene.rotary, scene.mask, cache, FIRST_ROW, frozen)
        for one, cache in zip((stack, one_by_one(stack)), caches, strict=True)
    ]
    assert torch.equal(outputs[0].hidden, outputs[1].hidden)
    assert torch.equal(outputs[0].taps, outputs[1].taps)
    assert torch.equal(caches[0].key, caches[1].key)
    assert torch.equal(caches[0].value, caches[1].value)
    assert torch.equal(scene.hidden, before)
    assert outputs[0].taps.shape == (NUM_ROWS, 2, scene.shape.hidden_size)
    assert torch.equal(outputs[0].taps[:, 1], outputs[0].hidden)
    untouched = torch.ones(NUM_SCRATCH + NUM_POSITIONS, dtype=torch.bool)
    untouched[FIRST_ROW : FIRST_ROW + NUM_ROWS] = False
    assert torch.equal(caches[0].key[:, :, untouched], scene.cache().key[:, :, untouched])


@needs_kernels
@quantizations
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", ["taps", "feature"])
def test_context_rows(dtype: torch.dtype, quantization: Quantization, source: str) -> None:
    """Each layer reads its own tap, or all one feature; scratch rows and verified ones, and no other row changes."""
    scene = Scene(SHAPES["qwen3"], dtype)
    stack = packed_stack(scene.shape, dtype, quantization, normalise_context=source == "taps")
    states = scene.taps if source == "taps" else scene.feature
    caches = scene.cache(), scene.cache()
    for one, cache in zip((stack, one_by_one(stack)), caches, strict=True):
        one.lay_scratch(states, scene.rotary, cache, FIRST_ROW)
        one.lay_verified(states[2:], Rotary(scene.rotary.cos[2:], scene.rotary.sin[2:]), cache, 11)
    assert torch.equal(caches[0].key, caches[1].key)
    assert torch.equal(caches[0].value, caches[1].value)
    changed = (caches[0].key != scene.cache().key).flatten(3).any(-1).any(0).any(0).nonzero().flatten().tolist()
    verified = NUM_SCRATCH + 11
    assert changed == [*range(FIRST_ROW, FIRST_ROW + NUM_ROWS), *range(verified, verified + NUM_ROWS - 2)]


def test_against_torch() -> None:
    """Without packing the layers run through torch; both give the same but for rounding."""
    scene = Scene(SHAPES["qwen3"], torch.float32)
    plain = make_stack(make_layers(scene.shape, torch.float32))
    assert plain._fused is None
    fast = packed_stack(scene.shape, torch.float32, "none")
    expected = plain.run(scene.hidden, scene.rotary, scene.mask, scene.cache(), FIRST_ROW)
    got = fast.run(scene.hidden, scene.rotary, scene.mask, scene.cache(), FIRST_ROW)
    assert relative_error(got.hidden, expected.hidden) < 1e-5
    assert relative_error(got.taps, expected.taps) < 1e-5


@pytest.mark.parametrize("row", [-1, NUM_SCRATCH - NUM_ROWS + 1])
def test_predicted_rows_stay_in_the_scratch_area(row: int) -> None:
    scene = Scene(SHAPES["llama"], torch.float32)
    stack = packed_stack(scene.shape, torch.float32, "none")
    with pytest.raises(AssertionError, match="scratch"):
        stack.run(scene.hidden, scene.rotary, scene.mask, scene.cache(), row)
    with pytest.raises(AssertionError, match="scratch"):
        stack.lay_scratch(scene.taps, scene.rotary, scene.cache(), row)
    with pytest.raises(AssertionError, match="room"):
        stack.lay_verified(scene.taps, scene.rotary, scene.cache(), NUM_POSITIONS - NUM_ROWS + 1)


@needs_kernels
def test_a_stack_wants_its_own_kind_of_cache_and_mask() -> None:
    scene = Scene(SHAPES["llama"], torch.float32)
    stack = packed_stack(scene.shape, torch.float32, "none")
    small = KeyValueCache(scene.shape, NUM_LAYERS - 1, NUM_POSITIONS, torch.float32, CPU, NUM_SCRATCH)
    with pytest.raises(AssertionError, match="layer for each"):
        stack.run(scene.hidden, scene.rotary, scene.mask, small, FIRST_ROW)
    mask = KeyMask(scene.visible[1:], scene.shape.group_size, torch.float32)
    with pytest.raises(AssertionError, match="these rows"):
        stack.run(scene.hidden, scene.rotary, mask, scene.cache(), FIRST_ROW)
    other = replace(scene.shape, num_kv_heads=1)
    wrong = KeyValueCache(other, NUM_LAYERS, NUM_POSITIONS, torch.float32, CPU, NUM_SCRATCH)
    with pytest.raises(AssertionError, match="heads"):
        stack.run(scene.hidden, scene.rotary, scene.mask, wrong, FIRST_ROW)

"""Tensors as bytes: exact for every dtype on the wire, and nothing is made up for bytes that are not there."""

import pytest
import torch

from modeling.tensors import DTYPE_NAMES, DTYPES, from_bytes, to_bytes

CPU = torch.device("cpu")


def made(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 200, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", list(DTYPE_NAMES))
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (4, 0, 2)])
@pytest.mark.parametrize("carrier", [bytes, bytearray, memoryview])
def test_round_trip(dtype: torch.dtype, shape: tuple[int, ...], carrier: type) -> None:
    tensor = made(dtype, shape)
    data = to_bytes(tensor)
    assert len(data) == tensor.numel() * tensor.element_size()
    back = from_bytes(DTYPE_NAMES[dtype], shape, carrier(data), CPU)
    assert back.dtype == dtype
    assert back.shape == torch.Size(shape)
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("dtype", list(DTYPE_NAMES))
def test_rows_that_are_not_contiguous(dtype: torch.dtype) -> None:
    tensor = made(dtype, (6, 4)).t()[1:3]
    assert not tensor.is_contiguous()
    assert torch.equal(from_bytes(DTYPE_NAMES[dtype], (2, 6), bytes(to_bytes(tensor)), CPU), tensor)


def test_special_values_survive() -> None:
    tensor = torch.tensor([float("inf"), -float("inf"), -0.0, 1e-40])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        back = from_bytes(DTYPE_NAMES[dtype], (4,), bytes(to_bytes(tensor.to(dtype))), CPU)
        assert bytes(to_bytes(back)) == bytes(to_bytes(tensor.to(dtype)))
    assert from_bytes("float32", (1,), bytes(to_bytes(torch.tensor([float("nan")]))), CPU).isnan().all()


def test_gradients_do_not_stand_in_the_way() -> None:
    tensor = torch.ones(3, requires_grad=True)
    assert bytes(to_bytes(tensor)) == bytes(to_bytes(torch.ones(3)))


@pytest.mark.parametrize(("shape", "num_bytes"), [((3,), 0), ((3,), 7), ((3,), 8), ((3,), 16), ((0,), 4), ((), 8)])
def test_length_must_fit_the_shape(shape: tuple[int, ...], num_bytes: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        from_bytes("float32", shape, bytes(num_bytes), CPU)


def test_writing_to_a_received_tensor_leaves_the_message_alone() -> None:
    data = bytes(to_bytes(torch.arange(4)))
    back = from_bytes("int64", (4,), data, CPU)
    back += 1
    assert torch.equal(from_bytes("int64", (4,), data, CPU), torch.arange(4))


def test_names_and_dtypes_are_one_to_one() -> None:
    assert {name: dtype for dtype, name in DTYPE_NAMES.items()} == DTYPES

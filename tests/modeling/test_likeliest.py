"""The likeliest token: against torch, among equals, and with numbers that are none."""

import math
from collections.abc import Iterator

import pytest
import torch

from modeling.kernels.build import load_kernels
from modeling.kernels.likeliest import likeliest

DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(params=[True, False])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With our own kernels where there are some, and without."""
    if not request.param:
        monkeypatch.setenv("JETSPEC_KERNELS", "0")
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 100, 8192])
def test_against_torch(dtype: torch.dtype, width: int) -> None:
    logits = (4 * torch.randn(3, 5, width, generator=torch.Generator().manual_seed(width))).to(dtype)
    found = likeliest(logits)
    log_p = logits.double().log_softmax(-1)
    assert found.column.shape == found.log_p.shape == (3, 5)
    chosen = logits.gather(-1, found.column[..., None])
    assert torch.equal(chosen, logits.amax(-1, keepdim=True))
    torch.testing.assert_close(found.log_p.double(), log_p.amax(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("places", [(3, 9), (20, 4), (40, 39, 70), (16, 32), (0, 99)])
def test_the_first_of_equals(dtype: torch.dtype, places: tuple[int, ...]) -> None:
    logits = torch.zeros(1, 100, dtype=dtype)
    logits[0, list(places)] = 2.0
    assert likeliest(logits).column.tolist() == [min(places)]


@pytest.mark.usefixtures("kernels")
def test_extremes() -> None:
    far = torch.full((1, 40), -1e4)
    far[0, 33] = 1e4
    assert likeliest(far).column.tolist() == [33]
    assert likeliest(far).log_p.tolist() == [0.0]
    one = torch.full((1, 20), -math.inf)
    one[0, 7] = -3.0
    assert likeliest(one).column.tolist() == [7]
    assert likeliest(one).log_p.tolist() == pytest.approx([0.0], abs=1e-6)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_spoiled_row_spoils_no_other_and_still_names_a_column(value: float) -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(0))
    expected = likeliest(logits)
    logits[1] = value
    found = likeliest(logits)
    assert 0 <= int(found.column[1]) < 30
    assert bool(found.log_p[1].isnan())
    for row in (0, 2):
        assert found.column[row] == expected.column[row]
        assert found.log_p[row] == expected.log_p[row]


@pytest.mark.usefixtures("kernels")
def test_no_rows() -> None:
    found = likeliest(torch.zeros(0, 30))
    assert found.column.shape == found.log_p.shape == (0,)

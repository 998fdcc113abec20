"""The row-independent product: right, the same bits in any company, and replaceable by torch."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling.kernels import build
from modeling.kernels.build import load_kernels
from modeling.kernels.packed import PackedWeight, can_pack, linear, pack, pack_parameters
from modeling.kernels.threads import set_num_threads
from tests.modeling.tiny_models import relative_error

DTYPES = (torch.bfloat16, torch.float32)
SHAPES = ((96, 64), (100, 64), (33, 7), (1, 1), (31, 1), (32, 16), (40, 17), (65, 200))
MAX_ROWS = 40

needs_kernels = pytest.mark.skipif(
    load_kernels() is None, reason="neither AVX-512 nor AVX2, or no C compiler, on this machine"
)


@pytest.fixture
def fresh_load() -> Iterator[Callable[[], None]]:
    """Forget the loaded library, now and after the test."""
    load_kernels.cache_clear()
    yield load_kernels.cache_clear
    load_kernels.cache_clear()


def made(shape: tuple[int, int], dtype: torch.dtype, num_rows: int = MAX_ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    weight = torch.randn(shape, generator=generator).to(dtype)
    return weight, torch.randn(num_rows, shape[1], generator=generator).to(dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, rows = made(shape, dtype)
    exact = rows.double() @ weight.double().T
    product = pack(weight)(rows)
    assert product.dtype == dtype
    assert relative_error(product, exact) < (4e-3 if dtype == torch.bfloat16 else 1e-6)
    if dtype == torch.bfloat16:  # one rounding of an fp32 sum: at most half a unit in the last place beyond its error
        error = (product.double() - exact).abs()
        scale = rows.double().abs() @ weight.double().abs().T
        assert bool((error <= exact.abs() * 2**-8 + scale * 1e-5).all())


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, rows = made(shape, dtype, MAX_ROWS + 20)
    packed = pack(weight)
    alone = torch.cat([packed(rows[index : index + 1]) for index in range(len(rows))])
    for num_rows in range(1, MAX_ROWS + 1):
        for start in (0, 1, 7, 20):
            window = packed(rows[start : start + num_rows])
            assert torch.equal(window, alone[start : start + num_rows]), (num_rows, start)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_foreign_rows_cannot_spoil_a_row(dtype: torch.dtype) -> None:
    weight, rows = made((96, 64), dtype, 13)
    packed = pack(weight)
    expected = packed(rows)
    spoiled = rows.clone()
    spoiled[5] = float("nan")
    product = packed(spoiled)
    assert bool(product[5].isnan().all())
    keep = torch.arange(13) != 5
    assert torch.equal(product[keep], expected[keep])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_special_values_spread_as_in_torch(dtype: torch.dtype, shape: tuple[int, int], value: float) -> None:
    weight, rows = made(shape, dtype, 3)
    for place in ("rows", "weight"):
        changed_weight, changed_rows = weight.clone(), rows.clone()
        (changed_rows if place == "rows" else changed_weight)[-1, -1] = value
        product = pack(changed_weight)(changed_rows)
        expected = F.linear(changed_rows, changed_weight)
        assert torch.equal(product.isnan(), expected.isnan())
        assert torch.equal(product.isinf(), expected.isinf())
        infinite = expected.isinf()
        assert torch.equal(product[infinite], expected[infinite])


@needs_kernels
def test_bf16_rounds_to_nearest_even_and_overflows_to_infinity() -> None:
    """Sums halfway between two bf16 numbers, just beyond, and past the largest one."""
    high = torch.tensor([[1.0], [1.0], [1.0 + 2**-7], [1.0], [3.3895e38], [-3.3895e38]], dtype=torch.bfloat16)
    low = torch.tensor([[2**-8], [2**-8 + 2**-15], [2**-8], [-(2**-9)], [3e38], [-3e38]], dtype=torch.bfloat16)
    rows = torch.cat((high, low), dim=1)
    product = pack(torch.ones(1, 2, dtype=torch.bfloat16))(rows).squeeze(1)
    expected = (rows[:, 0].float() + rows[:, 1].float()).to(torch.bfloat16)
    assert torch.equal(product, expected)
    assert product.float().tolist()[:2] == [1.0, 1.0 + 2**-7]
    assert product.isinf().tolist() == [False] * 4 + [True] * 2


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_layouts_of_rows(dtype: torch.dtype) -> None:
    weight, rows = made((40, 24), dtype, 12)
    packed = pack(weight)
    expected = packed(rows)
    assert torch.equal(packed(rows.t().contiguous().t()), expected)
    assert torch.equal(packed(rows.view(3, 4, 24)), expected.view(3, 4, 40))
    assert torch.equal(packed(rows[::2]), expected[::2])
    assert packed(rows[:0]).shape == (0, 40)
    assert torch.equal(linear(rows, packed, torch.ones(40, dtype=dtype)), expected + 1)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cut_shares_memory_where_panels_allow(dtype: torch.dtype) -> None:
    weight, rows = made((100, 24), dtype, 5)
    packed = pack(weight)
    cut = packed.rows_from(64)
    assert cut is not None
    assert cut.shape == (36, 24)
    assert torch.equal(cut(rows), packed(rows)[:, 64:])
    assert packed.rows_from(33) is None


@needs_kernels
def test_nothing_is_written_outside_the_result() -> None:
    """Threads share one library: each call's memory is its own."""
    cases = [(pack(weight), rows) for shape in SHAPES for weight, rows in [made(shape, torch.float32)]]
    expected = [packed(rows) for packed, rows in cases]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            results = pool.map(lambda case: case[0](case[1]), cases)
            for product, wanted in zip(results, expected, strict=True):
                assert torch.equal(product, wanted)


@needs_kernels
def test_packing_replaces_parameters_and_keeps_no_plain_copy() -> None:
    class Holder(nn.Module):
        weight: nn.Parameter | PackedWeight

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(40, 24))

    holder = Holder()
    rows = torch.randn(3, 24)
    with torch.no_grad():
        expected = linear(rows, holder.weight)
    pack_parameters(holder, ("weight",))
    assert list(holder.parameters()) == []
    assert isinstance(holder.weight, PackedWeight)
    assert relative_error(linear(rows, holder.weight), expected) < 1e-6


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_a_product_and_change_no_bit(dtype: torch.dtype) -> None:
    weight, rows = made((3000, 130), dtype)  # large enough to be shared, and no whole number of panels
    packed = pack(weight)
    expected = [packed(rows[:num_rows]) for num_rows in (1, 9, MAX_ROWS)]
    try:
        for count in (2, 3, 7, 1, 2):
            assert set_num_threads(count) == count
            for _ in range(5):
                for wanted in expected:
                    assert torch.equal(packed(rows[: len(wanted)]), wanted)
    finally:
        assert set_num_threads(1) == 1


@needs_kernels
def test_several_callers_may_use_the_threads() -> None:
    """One of them has the helpers, the others compute alone."""
    cases = [(pack(weight), rows) for size in (1000, 2000, 3000) for weight, rows in [made((size, 130), torch.float32)]]
    expected = [packed(rows) for packed, rows in cases]
    try:
        set_num_threads(3)
        with ThreadPoolExecutor(3) as pool:
            for _ in range(10):
                results = pool.map(lambda case: case[0](case[1]), cases)
                for product, wanted in zip(results, expected, strict=True):
                    assert torch.equal(product, wanted)
    finally:
        set_num_threads(1)


def test_threads_without_kernels(monkeypatch: pytest.MonkeyPatch, fresh_load: Callable[[], None]) -> None:
    monkeypatch.setenv("JETSPEC_KERNELS", "0")
    fresh_load()
    assert set_num_threads(4) == 1


def test_switched_off_falls_back_to_torch(monkeypatch: pytest.MonkeyPatch, fresh_load: Callable[[], None]) -> None:
    monkeypatch.setenv("JETSPEC_KERNELS", "0")
    fresh_load()
    assert load_kernels() is None
    weight, rows = made((40, 24), torch.float32)
    assert not can_pack(weight)
    assert torch.equal(linear(rows, weight), F.linear(rows, weight))
    bias = torch.ones(40)
    assert torch.equal(linear(rows, weight, bias), F.linear(rows, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_stay_with_torch(dtype: torch.dtype) -> None:
    assert not can_pack(torch.ones(4, 4, dtype=dtype))


@needs_kernels
def test_compiled_once_and_found_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_load: Callable[[], None]
) -> None:
    monkeypatch.setenv("JETSPEC_KERNEL_DIR", str(tmp_path / "kernels"))
    assert load_kernels() is not None
    names = [path.name for path in (tmp_path / "kernels").iterdir()]
    assert len(names) == 1
    assert names[0].startswith("linear-")
    fresh_load()

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a compiled library is not compiled again")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert load_kernels() is not None


@needs_kernels
@pytest.mark.parametrize("compiler", ["/nonexistent/cc", "false"])
def test_a_compiler_that_fails_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fresh_load: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
    compiler: str,
) -> None:
    monkeypatch.setenv("JETSPEC_KERNEL_DIR", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level("WARNING", logger=build.logger.name):
        assert load_kernels() is None
    assert "using torch's" in caplog.text
    assert list(tmp_path.iterdir()) == []


@needs_kernels
def test_other_flags_give_another_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_load: Callable[[], None]
) -> None:
    monkeypatch.setenv("JETSPEC_KERNEL_DIR", str(tmp_path))
    assert load_kernels() is not None
    fresh_load()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DCHANGED"))
    assert load_kernels() is not None
    assert len(list(tmp_path.iterdir())) == 2


def test_the_older_instruction_set_passes_these_tests_too(tmp_path: Path) -> None:
    """A CPU with AVX-512 takes that; what CPUs with AVX2 alone get is compiled and tested on it as well."""
    if not torch.cpu.get_capabilities().get("avx512_bw") or load_kernels() is None:
        pytest.skip("this CPU has one instruction set of them at most")
    names = ("kernels", "attention", "likeliest", "layers", "stack")
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "not older_instruction_set",
        *files,
    ]
    environment = {**os.environ, "JETSPEC_KERNELS": "avx2", "JETSPEC_KERNEL_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "no C compiler" not in done.stdout, done.stdout[-4000:]
    assert len(list(tmp_path.iterdir())) == 1

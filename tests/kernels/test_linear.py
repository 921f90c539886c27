"""Products of few rows with weights, for the Triton kernels and their twins."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch

from specgen.kernels import library_products
from specgen.kernels import linear as triton_linear
from specgen.kernels import norm as triton_norm
from specgen.kernels.linear import Plan, choose_plan, multiply
from specgen.kernels.reference import linear as reference_linear
from specgen.kernels.reference import norm as reference_norm

MODULES = [
    pytest.param(reference_linear, id="reference"),
    pytest.param(triton_linear, id="triton"),
]
# Relative to the length of a row of results. The interpreter cuts off where a GPU rounds: each of
# the three roundings of a gated product may cost bfloat16 its last bit, 2**-7.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 3 * 2**-7, torch.float16: 3e-3}
LINE = Plan(block_n=2, block_k=64, num_warps=4, num_stages=1)
TILES = [
    Plan(block_n=32, block_k=32, num_warps=4, num_stages=2),
    Plan(block_n=32, block_k=32, num_warps=4, num_stages=2, parts=3),
    Plan(block_n=64, block_k=16, num_warps=4, num_stages=2, swapped=True),
    Plan(block_n=64, block_k=16, num_warps=4, num_stages=2, swapped=True, parts=4),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def expected_of(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool
) -> torch.Tensor:
    out = x.double() @ weight.double().T
    if bias is not None:
        out = out + bias.double()
    if gated:
        gate, up = out.chunk(2, dim=-1)
        out = gate / (1 + torch.exp(-gate)) * up
    return out


def check(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert out.shape[-2:] == expected.shape
    out = (out.sum(0) if out.ndim == 3 else out).cpu().double()
    error = (out - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1.0)
    assert error.max().item() < TOLERANCE[dtype]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_rows", "width", "inner"),
    # On and off the edges of tiles in every direction, one column, less K than a piece.
    [(1, 7, 40), (2, 1, 64), (3, 5, 130), (4, 6, 128), (5, 33, 96), (17, 64, 56), (64, 70, 50)],
)
@pytest.mark.usefixtures("poison")
def test_every_plan_multiplies(
    device: str,
    num_rows: int,
    width: int,
    inner: int,
    dtype: torch.dtype,
    with_bias: bool,
    gated: bool,
) -> None:
    total = 2 * width if gated else width
    x = torch.randn(num_rows, inner).to(dtype)
    weight = (torch.randn(total, inner) * inner**-0.5).to(dtype)
    bias = torch.randn(total).to(dtype) if with_bias else None
    expected = expected_of(x, weight, bias, gated)
    for plan in [LINE] if num_rows == 1 else TILES:
        on_device = None if bias is None else bias.to(device)
        out = multiply(x.to(device), weight.to(device), on_device, plan, gated=gated)
        assert out.dtype == (torch.float32 if out.ndim == 3 else dtype)
        assert out.ndim == 3 or gated or plan.parts == 1
        check(out, expected, dtype)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 4, 20, 64, 65, 128, 129])
@pytest.mark.usefixtures("poison")
def test_chosen_plans_multiply(
    module: ModuleType,
    device: str,
    num_rows: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library_products, "_FEWEST_WEIGHTS", 0)
    x = torch.randn(num_rows, 96).to(dtype)
    weight = (torch.randn(48, 96) * 0.1).to(dtype)
    bias = torch.randn(48).to(dtype)
    arguments = (x.to(device), weight.to(device), bias.to(device))
    check(module.linear(*arguments), expected_of(x, weight, bias, False), dtype)
    check(module.linear_parts(*arguments), expected_of(x, weight, bias, False), dtype)
    check(module.linear_silu_mul(*arguments), expected_of(x, weight, bias, True), dtype)
    assert module.linear(*arguments).dtype == dtype
    assert module.linear(*arguments).shape == (num_rows, 48)


@pytest.mark.parametrize("module", MODULES)
def test_no_rows(module: ModuleType, device: str) -> None:
    x = torch.empty(0, 32, dtype=torch.bfloat16, device=device)
    weight = torch.randn(10, 32, dtype=torch.bfloat16, device=device)
    assert module.linear(x, weight).shape == (0, 10)
    assert module.linear_silu_mul(x, weight).shape == (0, 5)


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_a_broken_row_stays_alone(device: str, num_rows: int) -> None:
    """NaN in a row reaches all of its results and no other row's."""
    x = torch.randn(num_rows, 64)
    x[0, 5] = float("nan")
    weight = torch.randn(40, 64)
    for plan in [LINE] if num_rows == 1 else TILES:
        out = multiply(x.to(device), weight.to(device), None, plan, gated=False)
        out = out.sum(0) if out.ndim == 3 else out
        assert out[0].isnan().all()
        assert torch.isfinite(out[1:]).all()


@pytest.mark.parametrize("num_rows", [2, 9])
def test_rows_of_a_wider_tensor(device: str, num_rows: int) -> None:
    wide = torch.randn(num_rows, 200, device=device)
    part, weight = wide[:, 8:136], torch.randn(30, 128, device=device)
    for plan in [LINE] if num_rows == 1 else TILES:
        out = multiply(part, weight, None, plan, gated=False)
        assert torch.equal(out, multiply(part.clone(), weight, None, plan, gated=False))


def test_float32_is_left_to_the_library(device: str) -> None:
    """Tokens at temperature 0 must not depend on which rows share a batch."""
    weight = torch.randn(4096, 4096, device=device)
    for num_rows in (1, 8, 64, 100):
        x = torch.randn(num_rows, 4096, device=device)
        assert choose_plan(x, weight, gated=False) is None
        assert choose_plan(x, weight, gated=True) is None


def test_plans_depend_on_shapes_alone() -> None:
    weight = torch.zeros(4096, 4096, dtype=torch.bfloat16)
    for num_rows in range(1, 65):
        x = torch.zeros(num_rows, 4096, dtype=torch.bfloat16)
        plans = {choose_plan(x + value, weight, gated=False) for value in (0, 1)}
        assert len(plans) == 1
        assert None not in plans
    for num_rows, gated in ((65, False), (129, True)):
        x = torch.zeros(num_rows, 4096, dtype=torch.bfloat16)
        assert choose_plan(x, weight, gated=gated) is None
        assert choose_plan(x[:-1], weight, gated=gated) is not None


@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module", [reference_norm, triton_norm])
@pytest.mark.usefixtures("poison")
def test_the_norm_sums_parts_and_rounds_them_once(
    module: ModuleType, device: str, dtype: torch.dtype, num_parts: int
) -> None:
    # Sixteenths: every sum is exact, so that only the rounding behind it can differ.
    parts = torch.randint(-64, 65, (num_parts, 3, 72)) / 16
    residual = (torch.randint(-64, 65, (3, 72)) / 16).to(dtype)
    weight = torch.rand(72).to(dtype)
    x = parts.sum(0).to(dtype)
    expected = module.rms_norm_residual(*(t.to(device) for t in (x, residual, weight)), 1e-6)
    got = module.rms_norm_residual(*(t.to(device) for t in (parts, residual, weight)), 1e-6)
    for left, right in zip(got, expected, strict=True):
        assert left.dtype == dtype
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", ["linear", "linear_parts", "linear_silu_mul"])
def test_signatures_match(name: str) -> None:
    triton_signature = inspect.signature(getattr(triton_linear, name))
    assert triton_signature == inspect.signature(getattr(reference_linear, name))

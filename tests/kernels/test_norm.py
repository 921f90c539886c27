"""RMS norm against transformers' module, for the Triton kernels and their twins."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specgen.kernels import norm as triton_norm
from specgen.kernels.reference import norm as reference_norm

MODULES = [pytest.param(reference_norm, id="reference"), pytest.param(triton_norm, id="triton")]
# Relative. bfloat16 is rounded twice to eight bits, and Triton's interpreter cuts off instead.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPS = 1e-5


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def oracle(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    module = LlamaRMSNorm(weight.numel(), eps).to(weight.dtype)
    module.weight.data.copy_(weight)
    with torch.no_grad():
        return module(x)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "hidden"), [(5, 320), (1, 1), (3, 128), (2, 4096), (2, 5120)])
@pytest.mark.usefixtures("poison")
def test_rms_norm(
    module: ModuleType, device: str, tokens: int, hidden: int, dtype: torch.dtype
) -> None:
    x = torch.randn(tokens, hidden).to(dtype)
    weight = torch.rand(hidden).to(dtype)
    out = module.rms_norm(x.to(device), weight.to(device), EPS).cpu()
    assert out.dtype == dtype
    torch.testing.assert_close(out, oracle(x, weight), rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "hidden"), [(4, 320), (2, 5120)])
@pytest.mark.usefixtures("poison")
def test_rms_norm_residual(
    module: ModuleType, device: str, tokens: int, hidden: int, dtype: torch.dtype
) -> None:
    x, residual = torch.randn(2, tokens, hidden).to(dtype)
    weight = torch.rand(hidden).to(dtype)
    before = x.clone(), residual.clone()
    out, total = module.rms_norm_residual(x.to(device), residual.to(device), weight.to(device), EPS)
    rtol = 0 if dtype == torch.float32 else TOLERANCE[dtype]
    torch.testing.assert_close(total.cpu(), x + residual, rtol=rtol, atol=0)
    torch.testing.assert_close(
        out.cpu(), oracle(total.cpu(), weight), rtol=TOLERANCE[dtype], atol=1e-6
    )
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.usefixtures("poison")
def test_rows_of_a_wider_tensor_and_leading_dimensions(module: ModuleType, device: str) -> None:
    weight = torch.rand(24).to(device)
    wide = torch.randn(6, 40).to(device)
    expected = oracle(wide[:, 8:32].cpu(), weight.cpu())
    out = module.rms_norm(wide[:, 8:32], weight, EPS).cpu()
    torch.testing.assert_close(out, expected, rtol=0, atol=3e-6)
    heads = torch.randn(3, 2, 24).to(device)
    out = module.rms_norm(heads, weight, EPS)
    assert out.shape == heads.shape
    torch.testing.assert_close(out.cpu(), oracle(heads.cpu(), weight.cpu()), rtol=0, atol=3e-6)


@pytest.mark.parametrize("module", MODULES)
def test_rounds_before_the_weight(module: ModuleType, device: str) -> None:
    """Rounding once, after the weight, would change every fourth element or so."""
    x, weight = torch.randn(8, 320).half(), torch.rand(320).half()
    out = module.rms_norm(x.to(device), weight.to(device), EPS).cpu()
    assert (out != oracle(x, weight)).float().mean() < 0.02


@pytest.mark.parametrize("module", MODULES)
def test_zero_rows_are_kept_and_eps_counts(module: ModuleType, device: str) -> None:
    x = torch.zeros(2, 32, device=device)
    x[1] = 1e-3
    out = module.rms_norm(x, torch.ones(32, device=device), 1e-2).cpu()
    assert torch.equal(out[0], torch.zeros(32))
    torch.testing.assert_close(out[1], torch.full((32,), 1e-3 / (1e-6 + 1e-2) ** 0.5))


@pytest.mark.parametrize("module", MODULES)
def test_no_tokens(module: ModuleType, device: str) -> None:
    x = torch.empty(0, 32, device=device)
    assert module.rms_norm(x, torch.ones(32, device=device), EPS).shape == (0, 32)


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_residual"])
def test_signatures_match(name: str) -> None:
    assert inspect.signature(getattr(triton_norm, name)) == inspect.signature(
        getattr(reference_norm, name)
    )

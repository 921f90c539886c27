"""SwiGLU's product against a plain formula, for the Triton kernel and its twin."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch

from specgen.kernels import activation as triton_activation
from specgen.kernels.reference import activation as reference_activation

MODULES = [
    pytest.param(reference_activation, id="reference"),
    pytest.param(triton_activation, id="triton"),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("tokens", "width"), [(3, 864), (1, 1), (2, 1024), (2, 1025), (2, 2816)])
@pytest.mark.usefixtures("poison")
def test_silu_mul(module: ModuleType, device: str, tokens: int, width: int) -> None:
    gate_up = torch.randn(tokens, 2 * width) * 3
    out = module.silu_mul(gate_up.to(device)).cpu()
    gate, up = gate_up[:, :width].double(), gate_up[:, width:].double()
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("poison")
def test_silu_mul_in_half_precision(module: ModuleType, device: str, dtype: torch.dtype) -> None:
    gate_up = torch.randn(4, 200).to(dtype)
    out = module.silu_mul(gate_up.to(device)).cpu()
    assert out.dtype == dtype
    gate, up = gate_up.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    # Two roundings (cut-offs in the interpreter) of eight bits each.
    torch.testing.assert_close(out, expected, rtol=1.6e-2, atol=1e-3)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_far_tails_are_finite(module: ModuleType, device: str) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, -1e30, 0.0, 2.0, 3.0, 4.0, 5.0]], device=device)
    out = module.silu_mul(gate_up).cpu()
    torch.testing.assert_close(out, torch.tensor([[0.0, 600.0, 0.0, 0.0]]))


@pytest.mark.parametrize("module", MODULES)
def test_rows_of_a_wider_tensor(module: ModuleType, device: str) -> None:
    wide = torch.randn(3, 50, device=device)
    part = wide[:, 3:27]
    torch.testing.assert_close(module.silu_mul(part), module.silu_mul(part.clone()))


def test_signatures_match() -> None:
    assert inspect.signature(triton_activation.silu_mul) == inspect.signature(
        reference_activation.silu_mul
    )

"""Grouped rows through the experts they were sent to, and the grouping itself."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch

from specgen.kernels import grouped as triton_grouped
from specgen.kernels.reference import grouped as reference_grouped
from specgen.models.experts import group_pairs

MODULES = [
    pytest.param(reference_grouped, id="reference"),
    pytest.param(triton_grouped, id="triton"),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


def choose(num_rows: int, num_experts: int, chosen: int, seed: int = 0) -> torch.Tensor:
    """Distinct experts of each row, int64 ``[num_rows, chosen]``; the last is never chosen."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_rows, num_experts, generator=generator)
    scores[:, -1] = -1.0
    return scores.topk(chosen).indices


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "chosen", "block_size"),
    [(1, 2, 1, 16), (3, 9, 8, 16), (70, 5, 2, 16), (200, 3, 2, 64), (40, 40, 4, 16)],
)
def test_every_pair_is_in_a_block_of_its_expert(
    num_rows: int, num_experts: int, chosen: int, block_size: int
) -> None:
    expert_ids = choose(num_rows, num_experts, chosen)
    pairs, experts = group_pairs(expert_ids, num_experts, block_size)
    assert pairs.dtype == experts.dtype == torch.int32
    assert pairs.shape == (len(experts) * block_size,)
    assert sorted(pairs[pairs >= 0].tolist()) == list(range(num_rows * chosen))
    for block, expert in zip(pairs.view(-1, block_size), experts.tolist(), strict=True):
        members = block[block >= 0].long()
        assert (expert >= 0) == bool(members.numel())
        assert (expert_ids.flatten()[members] == expert).all()


def test_all_rows_of_one_expert() -> None:
    pairs, experts = group_pairs(torch.full((50, 1), 2), 4, 16)
    assert experts.tolist()[:4] == [2, 2, 2, 2]
    assert set(experts.tolist()[4:]) == {-1}
    assert pairs[:50].tolist() == list(range(50))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "chosen", "hidden", "width", "block_size", "dtype"),
    [
        (5, 4, 2, 32, 48, 16, torch.float32),
        (1, 3, 1, 40, 7, 16, torch.float32),
        (70, 3, 2, 96, 130, 64, torch.float32),
        (20, 6, 3, 64, 64, 16, torch.bfloat16),
    ],
)
@pytest.mark.usefixtures("poison")
def test_grouped_linear(
    module: ModuleType,
    device: str,
    num_rows: int,
    num_experts: int,
    chosen: int,
    hidden: int,
    width: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    x = torch.randn(num_rows, hidden).to(dtype)
    weights = (torch.randn(num_experts, width, hidden) * hidden**-0.5).to(dtype)
    weights[-1] = torch.nan  # nobody's expert: it must not be looked at
    expert_ids = choose(num_rows, num_experts, chosen)
    groups = [part.to(device) for part in group_pairs(expert_ids, num_experts, block_size)]
    out = module.grouped_linear(x.to(device), weights.to(device), *groups, chosen).cpu()
    expected = torch.einsum("th,tknh->tkn", x.double(), weights[expert_ids].double())
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected.flatten(0, 1), rtol=0, atol=TOLERANCE[dtype])
    # The second layer of an expert: one row a pair.
    back = torch.randn(num_experts, hidden, width).to(dtype) * width**-0.5
    again = module.grouped_linear(out.to(device), back.to(device), *groups, 1).cpu()
    wanted = torch.einsum("pn,phn->ph", out.double(), back[expert_ids.flatten()].double())
    torch.testing.assert_close(again.double(), wanted, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("module", MODULES)
def test_no_rows(module: ModuleType, device: str) -> None:
    weights = torch.zeros(2, 8, 16, device=device)
    groups = group_pairs(torch.zeros(0, 2, dtype=torch.int64, device=device), 2, 16)
    out = module.grouped_linear(torch.zeros(0, 16, device=device), weights, *groups, 2)
    assert out.shape == (0, 8)


def test_signatures_match() -> None:
    name = "grouped_linear"
    assert inspect.signature(getattr(triton_grouped, name)) == inspect.signature(
        getattr(reference_grouped, name)
    )

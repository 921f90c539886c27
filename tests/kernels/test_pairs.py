"""The input of an EAGLE-3 layer against lookup, norms and a copy."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch

from specgen.kernels import pairs as triton_pairs
from specgen.kernels.reference import pairs as reference_pairs
from specgen.kernels.reference.norm import rms_norm

MODULES = [pytest.param(reference_pairs, id="reference"), pytest.param(triton_pairs, id="triton")]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "size"), [(0, 8), (1, 24), (5, 64), (3, 200)])
@pytest.mark.usefixtures("poison")
def test_pairs(
    module: ModuleType, device: str, num_rows: int, size: int, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(num_rows)
    vocab_size = 11

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    ids = torch.randint(0, vocab_size, (num_rows,), generator=g).int()
    ids[1::2] = -1  # rows that draft nothing
    embed, embed_norm, hidden_norm = normal(vocab_size, size), normal(size), normal(size)
    hidden = normal(num_rows, 2 * size)[:, :size]  # not contiguous
    got = module.norm_pairs(
        ids.to(device),
        embed.to(device),
        embed_norm.to(device),
        hidden.to(device),
        hidden_norm.to(device),
        1e-5,
    )
    assert got.shape == (num_rows, 2 * size)
    assert got.dtype == dtype
    wanted = torch.cat(
        (
            rms_norm(embed[ids.clamp(min=0).long()], embed_norm, 1e-5),
            rms_norm(hidden, hidden_norm, 1e-5),
        ),
        dim=1,
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.cpu(), wanted, rtol=tolerance, atol=tolerance)


def test_signatures_match() -> None:
    assert inspect.signature(triton_pairs.norm_pairs) == inspect.signature(
        reference_pairs.norm_pairs
    )

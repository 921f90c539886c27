"""Copying a stored tensor into a parameter of another dtype, part by part."""

from __future__ import annotations

import pytest
import torch

from specgen.models import filling
from specgen.models.filling import copy_converted


@pytest.mark.parametrize("at_once", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5, 0), (9,), (5, 12), (3, 5, 7)])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_make_the_whole(
    monkeypatch: pytest.MonkeyPatch,
    stored: torch.dtype,
    shape: tuple[int, ...],
    at_once: int,
    device: str,
) -> None:
    monkeypatch.setattr(filling, "_ELEMENTS_AT_ONCE", at_once)
    source = torch.randn(shape).to(stored)
    target = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
    copy_converted(target, source)
    assert torch.equal(target.cpu(), source.to(torch.bfloat16))


def test_rows_of_a_fused_parameter_and_turned_tensors_are_met(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(filling, "_ELEMENTS_AT_ONCE", 10)
    fused = torch.full((12, 5), float("nan"), dtype=torch.bfloat16, device=device)
    source = torch.randn(5, 7).T
    copy_converted(fused[3:10], source)
    assert torch.equal(fused[3:10].cpu(), source.to(torch.bfloat16))
    assert torch.isnan(fused[:3]).all()
    assert torch.isnan(fused[10:]).all()

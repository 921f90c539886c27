"""Fixtures shared by the kernel tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from specgen.kernels import lane_noise


@pytest.fixture(autouse=True)
def fewer_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time is that of operations, however many ids they have."""
    if triton.knobs.runtime.interpret:
        monkeypatch.setattr(lane_noise, "_CALLS", 16)
        monkeypatch.setattr(lane_noise, "_WIDTH", 16)


def fill_with_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a fresh tensor with what no kernel would write: NaN, huge ints, alternating bools."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        flat = tensor.view(-1)
        flat[::2] = True
        flat[1::2] = False
        return tensor
    if tensor.dtype == torch.uint8:
        return tensor.fill_(0xAB)
    return tensor.fill_(torch.iinfo(tensor.dtype).max // 3)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make uninitialised memory visible: an element left unwritten comes back as NaN or garbage."""
    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def poisoned_empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        return fill_with_poison(empty(*args, **kwargs))

    def poisoned_empty_like(*args: Any, **kwargs: Any) -> torch.Tensor:
        return fill_with_poison(empty_like(*args, **kwargs))

    def poisoned_new_empty(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return fill_with_poison(new_empty(self, *args, **kwargs))

    monkeypatch.setattr(torch, "empty", poisoned_empty)
    monkeypatch.setattr(torch, "empty_like", poisoned_empty_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned_new_empty)

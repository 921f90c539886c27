"""The trial of Triton before a run: in its interpreter here, and with what can go wrong."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specgen.errors import EnvironmentProblem
from specgen.kernels import select_kernels, trial


def kernels_that(monkeypatch: pytest.MonkeyPatch, norm: Any) -> None:
    """Let the Triton set have this norm; the twin stays."""
    twin = select_kernels("cpu", "reference")
    broken = SimpleNamespace(norm=SimpleNamespace(rms_norm=norm))
    monkeypatch.setattr(
        trial, "select_kernels", lambda device, backend: twin if backend == "reference" else broken
    )


def test_it_passes_where_kernels_work(device: str) -> None:
    trial.try_triton(device)


@pytest.mark.parametrize(
    "error",
    [
        subprocess.CalledProcessError(1, ["gcc"]),
        RuntimeError("Failed to find C compiler.\nSpecify it by CC"),
        FileNotFoundError("ld"),
        RuntimeError(""),
    ],
)
def test_whatever_is_missing_is_told_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise error

    kernels_that(monkeypatch, fail)
    with pytest.raises(EnvironmentProblem, match=r"Triton does not work: .") as caught:
        trial.try_triton("cpu")
    assert "--device cpu" in (caught.value.hint or "")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("wrong", [0.5, float("nan")])
def test_wrong_results_are_a_problem_too(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    kernels_that(monkeypatch, lambda x, *_: torch.full_like(x, wrong))
    with pytest.raises(EnvironmentProblem, match="wrong results"):
        trial.try_triton("cpu")


def test_running_out_of_memory_is_not_the_compilers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    kernels_that(monkeypatch, fail)
    with pytest.raises(torch.OutOfMemoryError):
        trial.try_triton("cpu")

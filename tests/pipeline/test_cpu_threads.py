from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specgen.pipeline.cpu_threads import fit_cpu_threads


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCH_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(("weights", "threads"), [(1000, 1), (12_000_000, 1), (20_000_000, 2)])
def test_small_models_get_few_threads(weights: int, threads: int) -> None:
    assert fit_cpu_threads(weights) == threads
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("four_threads")
def test_large_models_keep_what_torch_chose() -> None:
    assert fit_cpu_threads(10**9) == 4


@pytest.mark.usefixtures("four_threads")
def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert fit_cpu_threads(1000) == 4

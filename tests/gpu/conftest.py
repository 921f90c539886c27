"""Checkpoints and engines on a GPU, built once a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.engines import EngineShop, make_checkpoints


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def engine_of(checkpoints: dict[str, Path]) -> EngineShop:
    # The tiny models need little memory, and the module holds several engines.
    # With k chosen step by step, sampled tokens would depend on the schedule.
    return EngineShop(
        checkpoints,
        device="cuda",
        dtype="float32",
        gpu_memory_utilization=0.3,
        num_speculative_tokens=3,
    )

"""Checkpoints and engines of the end-to-end proofs, built once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.engines import EngineShop, make_checkpoints


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def engine_of(checkpoints: dict[str, Path]) -> EngineShop:
    """Engines on the CPU, in float32, on the torch twins, that read records as late as on a GPU."""
    return EngineShop(checkpoints, lag=1, device="cpu", dtype="float32", kernel_backend="reference")

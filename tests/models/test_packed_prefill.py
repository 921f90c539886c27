"""Prompts that need nothing from the cache attend to themselves, packed: the same as through it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models.paged import Paged
from models.tiny import make_target

from specgen.kernels import Kernels, select_kernels
from specgen.kernels.reference import packed_attention as reference_packed
from specgen.models.attention import AttentionMetadata
from specgen.models.weights import load_target

CHUNKS = [(2, 0, 37), (0, 0, 1), (1, 0, 16)]


def with_packed_path(calls: list[int]) -> Kernels:
    """The kernels of a CPU, with the path on that only a GPU takes; its rows are noted."""

    def packed_attention(q: torch.Tensor, *rest: object) -> torch.Tensor:
        calls.append(q.shape[0])
        return reference_packed.packed_attention(q, *rest)  # type: ignore[arg-type]

    module = SimpleNamespace(applies=lambda *_: True, packed_attention=packed_attention)
    return replace(select_kernels("cpu"), packed_attention=module)


@pytest.fixture(params=[None, 5], ids=["all", "window"])
def target_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    window = {"sliding_window": request.param} if request.param else {}
    return make_target(tmp_path, "mistral" if window else "llama", **window)


def run(
    path: Path, kernels: Kernels, paged: Paged | None, metadata: AttentionMetadata | None
) -> tuple[torch.Tensor, Paged]:
    target = load_target(path, device="cpu", kernels=kernels)
    paged = paged or Paged(target, 3, 64)
    metadata = metadata or replace(paged.prefill(CHUNKS), starts_at_zero=True)
    ids = torch.arange(metadata.positions.numel(), dtype=torch.int32) % 90
    return target.forward(ids, metadata, paged.caches)[0], paged


def test_the_same_states_and_the_same_cache(target_path: Path) -> None:
    calls: list[int] = []
    expected, through_cache = run(target_path, select_kernels("cpu"), None, None)
    got, packed = run(target_path, with_packed_path(calls), None, None)
    assert calls == [54] * 7
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    for (k, v), (expected_k, expected_v) in zip(packed.caches, through_cache.caches, strict=True):
        torch.testing.assert_close(k, expected_k, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(v, expected_v, rtol=1e-4, atol=1e-4)


def test_rows_with_a_cached_beginning_read_the_cache(target_path: Path) -> None:
    calls: list[int] = []
    kernels = with_packed_path(calls)
    _, paged = run(target_path, kernels, None, None)
    later = paged.prefill([(2, 37, 5), (0, 1, 2)])
    before = len(calls)
    got, _ = run(target_path, kernels, paged, later)
    assert len(calls) == before
    assert torch.isfinite(got).all()

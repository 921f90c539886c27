"""What does not fit is refused at start, with the number that would fit; and that number fits."""

from __future__ import annotations

import re

import pytest
import torch
from e2e.engines import EngineShop, make_checkpoints

from specgen.errors import EnvironmentProblem
from specgen.pipeline import kv_cache
from specgen.pipeline.memory_fit import check_num_seqs


def check(num_seqs: int, available: int = 10_000, cache_bytes: int = 2_000) -> None:
    check_num_seqs(
        num_seqs,
        available=available,
        bytes_per_row=100,
        step_bytes=lambda n: 10 * max(n, 50),
        cache_bytes=cache_bytes,
    )


def fitting(error: EnvironmentProblem, flag: str) -> int:
    found = re.search(rf"{flag} (\d+) or less", error.hint or "")
    assert found is not None, error.hint
    return int(found[1])


@pytest.mark.parametrize("asked", [73, 100, 10**9])
def test_the_number_of_rows_that_is_named_is_the_largest_that_fits(asked: int) -> None:
    with pytest.raises(EnvironmentProblem, match=f"--max-num-seqs {asked}") as caught:
        check(asked)
    best = fitting(caught.value, "--max-num-seqs")
    assert best == 71
    check(best)
    with pytest.raises(EnvironmentProblem):
        check(best + 1)


def test_a_cache_that_never_fits_is_not_blamed_on_the_rows() -> None:
    check(5, cache_bytes=20_000)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> EngineShop:
    paths = make_checkpoints(tmp_path_factory.mktemp("checkpoints"))
    return EngineShop(paths, device="cpu", dtype="float32", kernel_backend="reference")


def test_too_many_rows_are_refused_before_anything_is_allocated(shop: EngineShop) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        shop.build("text", "eagle3", draft_sample="gumbel", max_num_seqs=50_000_000)
    assert 1000 < fitting(caught.value, "--max-num-seqs") < 50_000_000


def test_too_long_a_row_is_refused_with_the_length_that_fits(
    shop: EngineShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "_CPU_CACHE_BYTES", 60_000)
    with pytest.raises(EnvironmentProblem, match="one row of --max-model-len") as caught:
        shop.build("text", "eagle3", max_model_len=256, max_num_seqs=2)
    length = fitting(caught.value, "--max-model-len")
    engine = shop.build("text", "eagle3", max_model_len=length, max_num_seqs=2)
    assert engine.config.max_model_len == length
    with pytest.raises(EnvironmentProblem):
        shop.build("text", "eagle3", max_model_len=length + 16, max_num_seqs=2)
    assert torch.is_tensor(engine._state.active)

"""What a step runs of the draft: no pair twice, and behind the cache only what yields a draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.engines import EngineShop, make_checkpoints
from e2e.harness import make_row, run_all

from specgen.models.layers import Linear
from specgen.pipeline.draft_length import FixedDraftLength
from specgen.pipeline.input_batch import PrefillBatch
from specgen.pipeline.request_state import NUM_KEPT_PAIRS

BEHIND_THE_CACHE = ("attention.out", "mlp.gate_up", "mlp.down")


class Spy:
    """Stands before the products of one weight, and notes their numbers of rows."""

    def __init__(self, module: Any, rows: list[int]) -> None:
        self._module, self._rows = module, rows

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        def call(x: torch.Tensor, *args: Any) -> torch.Tensor:
            self._rows.append(x.shape[0])
            out: torch.Tensor = getattr(self._module, name)(x, *args)
            return out

        return call


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> EngineShop:
    checkpoints: dict[str, Path] = make_checkpoints(tmp_path_factory.mktemp("checkpoints"))
    return EngineShop(checkpoints, device="cpu", dtype="float32", kernel_backend="reference")


def expected_rows(draft: str, num_pairs: int, num_rows: int, k: int) -> dict[str, list[int]]:
    """Rows of every product in a step that brings so many pairs, and drafts k times a row."""
    later = [num_rows] * max(0, k - 1) if num_rows else []
    drafted = [num_rows] * k if num_rows else []
    # EAGLE-1 has its fc in every pass.
    rows = {"fc": [num_pairs, *(later if draft == "eagle1" else [])]}
    rows["attention.qkv"] = [num_pairs, *later]
    return rows | dict.fromkeys(BEHIND_THE_CACHE, drafted)


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("draft", ["eagle1", "eagle3"])
def test_only_last_pairs_pass_the_whole_layer(
    shop: EngineShop, monkeypatch: pytest.MonkeyPatch, draft: str, k: int
) -> None:
    engine = shop.build(
        "few", draft, num_speculative_tokens="auto:3", max_num_seqs=4, max_num_batched_tokens=6
    )
    engine._scheduler.draft_length = FixedDraftLength(k)
    runner = engine._runner
    assert runner._drafter is not None
    model: Any = runner._drafter._model
    seen: dict[str, list[int]] = {}
    for name, part in model.named_modules():
        if isinstance(part, Linear):
            part._kernel = Spy(part._kernel, seen.setdefault(name, []))
    assert set(seen) == {"fc", "attention.qkv", *BEHIND_THE_CACHE}
    steps = {"prefill": 0, "decode": 0, "kept": 0}

    def check(kind: str, wanted: dict[str, list[int]]) -> None:
        assert seen == wanted, kind
        steps[kind] += 1
        for rows in seen.values():
            rows.clear()

    prefill, decode_step, kept_step = runner.prefill, runner.decode_step, runner._kept_step

    def checked_prefill(batch: PrefillBatch, _: int) -> torch.Tensor:
        record = prefill(batch, k)
        starting = batch.fresh_slots.numel() + batch.resumed_slots.numel()
        check("prefill", expected_rows(draft, batch.input_ids.numel(), starting, k))
        return record

    def checked_step(slot_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        record = decode_step(slot_ids, *args)
        wanted = expected_rows(draft, slot_ids.numel() * (k + 1), slot_ids.numel(), k)
        check("decode", wanted if k > 0 else {name: [] for name in seen})
        return record

    def checked_kept(slot_ids: torch.Tensor) -> torch.Tensor:
        """Pairs of steps without drafts, which those steps had left alone."""
        record = kept_step(slot_ids)
        check("kept", expected_rows(draft, slot_ids.numel() * NUM_KEPT_PAIRS, 0, 0))
        return record

    monkeypatch.setattr(runner, "prefill", checked_prefill)
    monkeypatch.setattr(runner, "decode_step", checked_step)
    monkeypatch.setattr(runner, "_kept_step", checked_kept)
    rows = [
        make_row(i, (4, 3, 2, 4) * (1 + i % 3), max_tokens=12, ignore_eos=True) for i in range(6)
    ]
    run_all(engine, rows)
    assert min(steps["prefill"], steps["decode"]) > 3
    assert (steps["kept"] > 0) == (k == 0)

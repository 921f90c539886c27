"""Steps that run as graphs do, without a GPU: on padded slots, over one record for all replays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from e2e.engines import EngineShop
from e2e.harness import histogram_of, run_all, tokens_of
from e2e.test_lag import PAIRS, SCHEDULES, Shop, facts, rows, shop_of

from specgen.pipeline.cuda_graphs import DecodeGraphs, DecodeStep
from specgen.pipeline.engine import Engine

__all__ = ["shop_of"]  # the fixture

Captured = tuple[Callable[[], None], torch.Tensor]


def use_graphs(engine: Engine, largest: int | None = None) -> DecodeGraphs:
    """Have decode steps repeated on fixed buffers; capturing more rows than ``largest`` fails."""

    def capture(slots: torch.Tensor, step: DecodeStep) -> Captured:
        if largest is not None and slots.numel() > largest:
            raise torch.OutOfMemoryError("injected")
        record = step(slots)

        def replay() -> None:
            done = step(slots)
            record.fill_(-7)  # whoever still reads the last one is to notice
            record.copy_(done)

        return replay, record

    graphs = DecodeGraphs(engine.config.max_num_seqs, torch.device("cpu"), capture)
    engine._pipeline = replace(engine._pipeline, graphs=graphs)
    engine._runner._graphs = graphs
    return graphs


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize(("draft", "sample"), PAIRS[-2:])
def test_graphs_change_nothing(
    shop_of: Shop, draft: str | None, sample: str, lag: int, schedule: str
) -> None:
    options: dict[str, Any] = {"draft_sample": sample, **SCHEDULES[schedule]}
    expected = facts(run_all(shop_of(0)("text", draft, **options), rows()))
    engine = shop_of(lag).build("text", draft, **options)
    use_graphs(engine)
    assert facts(run_all(engine, rows())) == expected
    assert facts(run_all(engine, rows(), preempt_seed=5)) == expected


@pytest.mark.parametrize("draft", ["eagle3", None])
def test_a_capture_without_memory_costs_no_row(
    engine_of: EngineShop, caplog: pytest.LogCaptureFixture, draft: str | None
) -> None:
    expected = run_all(engine_of("text", draft, max_num_seqs=12), rows())
    engine = engine_of.build("text", draft, max_num_seqs=12)
    graphs = use_graphs(engine, largest=4)
    outputs = run_all(engine, rows())
    assert tokens_of(outputs) == tokens_of(expected)
    assert histogram_of(outputs) == histogram_of(expected)
    assert graphs.max_num_rows == 4
    assert "at most 4 rows" in caplog.messages[-1]
    limits = engine._scheduler.limits
    for _ in range(3000):  # a shortage may pass, but a graph that does not fit is not tried again
        limits.step_succeeded()
    assert limits.num_seqs == 4
    assert not limits.reduced

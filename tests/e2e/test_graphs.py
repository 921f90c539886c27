"""Steps that run as graphs do, without a GPU: on padded slots, over one record for all replays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from e2e.engines import EngineShop
from e2e.harness import histogram_of, run_all, tokens_of
from e2e.test_lag import PAIRS, SCHEDULES, Shop, facts, rows, shop_of

from specgen.pipeline.decode_graphs import DecodeGraphs
from specgen.pipeline.engine import Engine
from specgen.pipeline.prefill_graphs import PrefillGraphs

__all__ = ["shop_of"]  # the fixture


def tensors_of(made: Any) -> list[torch.Tensor]:
    """What a step returned: one tensor, or several of which some may be missing."""
    return [t for t in (made if isinstance(made, tuple) else (made,)) if t is not None]


def use_graphs(
    engine: Engine, largest: int | None = None, longest: int = 32
) -> tuple[DecodeGraphs, PrefillGraphs]:
    """Have steps repeated on fixed buffers; capturing more rows or tokens than ``largest`` fails.

    Passes over more prompt tokens than ``longest`` are not captured.
    """

    def capture(step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        if largest is not None and isinstance(step, partial) and step.args[0].numel() > largest:
            raise torch.OutOfMemoryError("injected")
        made = step()
        if largest is not None and isinstance(made, tuple) and made[0].shape[0] > largest:
            raise torch.OutOfMemoryError("injected")

        def replay() -> None:
            for mine, done in zip(tensors_of(made), tensors_of(step()), strict=True):
                mine.fill_(-7)  # whoever still reads the last one is to notice
                mine.copy_(done)

        return replay, made

    num_seqs, state = engine.config.max_num_seqs, engine._pipeline.state
    graphs = DecodeGraphs(num_seqs, torch.device("cpu"), capture)
    max_context_len = state.block_tables.shape[1] * engine.config.block_size
    prefill_graphs = PrefillGraphs(longest, num_seqs, max_context_len, capture)
    engine._pipeline = replace(engine._pipeline, graphs=graphs, prefill_graphs=prefill_graphs)
    engine._runner._graphs = graphs
    engine._runner._prefill_graphs = prefill_graphs
    return graphs, prefill_graphs


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize(("draft", "sample"), PAIRS[-2:])
def test_graphs_change_nothing(
    shop_of: Shop, draft: str | None, sample: str, lag: int, schedule: str
) -> None:
    options: dict[str, Any] = {"draft_sample": sample, **SCHEDULES[schedule]}
    expected = facts(run_all(shop_of(0)("text", draft, **options), rows()))
    engine = shop_of(lag).build("text", draft, **options)
    _, prefill_graphs = use_graphs(engine)
    assert facts(run_all(engine, rows())) == expected
    assert facts(run_all(engine, rows(), preempt_seed=5)) == expected
    assert prefill_graphs._graphs, "no pass over prompt tokens was captured"


@pytest.mark.parametrize("draft", ["eagle3", None])
def test_a_capture_without_memory_costs_no_row(
    engine_of: EngineShop, caplog: pytest.LogCaptureFixture, draft: str | None
) -> None:
    expected = run_all(engine_of("text", draft, max_num_seqs=12), rows())
    engine = engine_of.build("text", draft, max_num_seqs=12)
    graphs, prefill_graphs = use_graphs(engine, largest=4)
    outputs = run_all(engine, rows())
    assert tokens_of(outputs) == tokens_of(expected)
    assert histogram_of(outputs) == histogram_of(expected)
    assert graphs.max_num_rows == 4
    assert any("at most 4 rows" in message for message in caplog.messages)
    assert any("kernel by kernel" in message for message in caplog.messages)
    assert not prefill_graphs._graphs
    limits = engine._scheduler.limits
    for _ in range(3000):  # a shortage may pass, but a graph that does not fit is not tried again
        limits.step_succeeded()
    assert limits.num_seqs == 4
    assert not limits.reduced


def test_an_engine_that_warms_up_has_a_graph_for_every_batch_size_that_occurred(
    engine_of: EngineShop,
) -> None:
    engine = engine_of.build("text", "eagle3", max_num_seqs=12)
    graphs, _ = use_graphs(engine)
    run_all(engine, rows())
    some = {size for size, _ in graphs._graphs}
    with engine.warming_up():
        run_all(engine, rows())
    assert some < {size for size, _ in graphs._graphs}
    assert not graphs.captures_every_size

"""Allocations that fail: a step is done again with less, and only a row that never fits is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from e2e.engines import EngineShop
from e2e.harness import histogram_of, make_row, run_all, tokens_of

from specgen.pipeline.engine import Engine
from specgen.pipeline.request import PromptRow

Fails = Callable[[int, Sequence[int]], bool]
POISON = "poison"


def rows() -> list[PromptRow]:
    prompts = [f"row {i} " + "abc " * (i % 7) for i in range(20)]
    return [make_row(i, prompt, max_tokens=5 + 3 * (i % 5)) for i, prompt in enumerate(prompts)]


def build(engine_of: EngineShop, draft: str | None) -> Engine:
    return engine_of.build("text", draft, draft_sample="gumbel" if draft else "greedy",
                           max_num_seqs=8, max_num_batched_tokens=64)  # fmt: skip


def fail_when(engine: Engine, *, prefill: Fails | None = None, decode: Fails | None = None) -> None:
    """Let steps run out of memory: told the rows (or tokens) of a step and their indices."""
    runner = engine._runner
    real_prefill, real_decode = runner.prefill, runner.decode

    def failing_prefill(batch: Any, *args: Any) -> Any:
        done = real_prefill(batch, *args)  # the worst moment: everything is written on the device
        if prefill is not None and prefill(int(batch.input_ids.numel()), held(engine)):
            raise torch.OutOfMemoryError("injected")
        return done

    def failing_decode(requests: Any, *args: Any) -> Any:
        done = real_decode(requests, *args)
        if decode is not None and decode(len(requests), [r.row.index for r in requests]):
            raise torch.OutOfMemoryError("injected")
        return done

    runner.prefill = failing_prefill  # type: ignore[method-assign]
    runner.decode = failing_decode  # type: ignore[method-assign]


def held(engine: Engine) -> list[int]:
    return [request.row.index for request in engine._scheduler.prefilling]


@pytest.fixture(params=["eagle3", None], ids=["eagle3", "plain"])
def draft(request: pytest.FixtureRequest) -> str | None:
    chosen: str | None = request.param
    return chosen


def test_the_batch_shrinks_and_all_rows_come_back(engine_of: EngineShop, draft: str | None) -> None:
    expected = run_all(build(engine_of, draft), rows())
    engine = build(engine_of, draft)
    fail_when(engine, prefill=lambda n, _: n > 20, decode=lambda n, _: n > 3)
    outputs = run_all(engine, rows())
    assert tokens_of(outputs) == tokens_of(expected)
    assert histogram_of(outputs) == histogram_of(expected)
    assert engine.num_memory_faults > 2
    assert engine._scheduler.limits.num_seqs <= 3
    assert engine._scheduler.limits.num_tokens <= 20


def test_faults_now_and_then(engine_of: EngineShop, draft: str | None) -> None:
    expected = run_all(build(engine_of, draft), rows())
    engine = build(engine_of, draft)
    chance = random.Random(5)
    fail_when(
        engine,
        prefill=lambda n, _: n > 16 and chance.random() < 0.3,
        decode=lambda n, _: n > 1 and chance.random() < 0.2,
    )
    assert tokens_of(run_all(engine, rows())) == tokens_of(expected)
    assert engine.num_memory_faults > 1


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_only_the_row_that_never_fits_is_lost(
    engine_of: EngineShop, draft: str | None, phase: str
) -> None:
    expected = run_all(build(engine_of, draft), rows())
    engine = build(engine_of, draft)
    fail_when(engine, **{phase: lambda _, indices: 6 in indices})
    outputs = run_all(engine, rows())
    assert [o.row.index for o in outputs if o.error is not None] == [6]
    error = outputs[6].error
    assert error is not None
    assert (error.code, error.line) == ("out_of_memory", 7)
    del outputs[6], expected[6]
    assert tokens_of(outputs) == tokens_of(expected)


def test_one_of_several_samples_that_does_not_fit_is_one_error_row(engine_of: EngineShop) -> None:
    engine = build(engine_of, "eagle3")
    fail_when(engine, decode=lambda _, indices: 1 in indices)
    outputs = run_all(engine, [make_row(i, "abc", n=3, max_tokens=6) for i in range(3)])
    assert [o.error is not None for o in outputs] == [False, True, False]
    assert [len(o.choices) for o in outputs] == [3, 0, 3]


def test_a_batch_that_shrank_grows_again(engine_of: EngineShop) -> None:
    engine = build(engine_of, None)
    left = iter([True] * 3)
    fail_when(engine, decode=lambda *_: next(left, False))
    many = [make_row(i, f"row {i}", max_tokens=40, ignore_eos=True) for i in range(100)]
    run_all(engine, many)
    limits = engine._scheduler.limits
    assert engine.num_memory_faults == 3
    assert limits.num_seqs > 1
    for _ in range(2000):
        limits.step_succeeded()
    assert not limits.reduced

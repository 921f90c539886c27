"""Logits that are NaN or infinite: the target's end a row with an error, the draft's its drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from e2e.engines import EngineShop
from e2e.harness import make_row, run_all, step_log, tokens_of

from specgen.pipeline.engine import Engine
from specgen.pipeline.request import PromptRow

NUM_ROWS = 5
BAD_ROW = 2
OPTIONS = {"max_tokens": 24, "ignore_eos": True}


def rows(**sampling: Any) -> list[PromptRow]:
    return [make_row(i, (10 + i, 20, 30), **OPTIONS, **sampling) for i in range(NUM_ROWS)]


@pytest.fixture(params=["eagle3-gumbel", "eagle1-greedy", "none"])
def engine(request: pytest.FixtureRequest, engine_of: EngineShop) -> Engine:
    draft, _, sample = request.param.partition("-")
    return engine_of(
        "text",
        None if draft == "none" else draft,
        draft_sample=sample or "greedy",
        max_num_seqs=NUM_ROWS,
    )


Poison = Callable[[torch.Tensor], None]


def nan(logits: torch.Tensor) -> None:
    logits[7] = float("nan")


def infinite(logits: torch.Tensor) -> None:
    logits[7] = float("inf")


def nothing_left(logits: torch.Tensor) -> None:
    logits[:] = float("-inf")


def poison_target(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, call: int, row: int, poison: Poison
) -> None:
    """Spoil one row of the target's logits in the ``call``-th pass (0 is the prefill)."""
    target = engine._pipeline.target
    original = target.compute_logits
    calls = 0

    def spoiled(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        logits = original(hidden).clone()
        if calls == call:
            poison(logits[row])
        calls += 1
        return logits

    monkeypatch.setattr(target, "compute_logits", spoiled)


@pytest.mark.parametrize("poison", [nan, infinite, nothing_left])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("call", [0, 3])
def test_bad_target_logits_end_one_row_with_an_error(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    call: int,
    temperature: float,
    poison: Poison,
) -> None:
    good = tokens_of(run_all(engine, rows(temperature=temperature)))
    width = 1 if call == 0 else engine.config.num_speculative_tokens + 1
    # The first row of logits of a step is always judged.
    poison_target(engine, monkeypatch, call, BAD_ROW * width, poison)
    outputs = run_all(engine, rows(temperature=temperature))
    bad = outputs.pop(BAD_ROW)
    assert bad.choices == (), "no text comes out of broken logits"
    assert bad.error is not None
    assert bad.error.code == "bad_logits"
    assert bad.error.line == BAD_ROW + 1
    del good[BAD_ROW]
    assert tokens_of(outputs) == good, "a neighbour changed"


def test_filters_meet_bad_logits_without_harm(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"top_k": 10, "top_p": 0.9}
    good = tokens_of(run_all(engine, rows(**options)))
    width = engine.config.num_speculative_tokens + 1
    poison_target(engine, monkeypatch, 2, BAD_ROW * width, nan)
    outputs = run_all(engine, rows(**options))
    assert outputs.pop(BAD_ROW).error is not None
    del good[BAD_ROW]
    assert tokens_of(outputs) == good


def test_one_bad_sample_fails_its_row_once_all_have_ended(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_target(engine, monkeypatch, 0, 1, nan)
    (output,) = run_all(engine, [make_row(0, (10, 20), n=3, **OPTIONS)])
    assert output.error is not None
    assert output.choices == ()


def test_bad_logits_behind_a_rejected_draft_do_not_matter(
    engine_of: EngineShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position that was never judged may hold anything."""
    engine = engine_of("text", "eagle3", draft_sample="greedy", max_num_seqs=NUM_ROWS)
    with step_log(engine) as log:
        good = tokens_of(run_all(engine, rows()))
    step = next(i for i, s in enumerate(log[NUM_ROWS:]) if s.record.num_sampled == 1)
    call, row = 1 + step // NUM_ROWS, step % NUM_ROWS
    assert call < 5, "all rows must still be running"
    poison_target(engine, monkeypatch, call, row * 4 + 3, nan)
    assert tokens_of(run_all(engine, rows())) == good


@pytest.mark.parametrize("draft", ["eagle1", "eagle3"])
@pytest.mark.parametrize("sample", ["greedy", "gumbel"])
@pytest.mark.parametrize("position", [0, 1])
def test_bad_draft_logits_only_shorten_the_drafts(
    engine_of: EngineShop,
    monkeypatch: pytest.MonkeyPatch,
    draft: str,
    sample: str,
    position: int,
) -> None:
    """Drafts end before the broken position, in that row and step only."""
    engine = engine_of("text", draft, draft_sample=sample, max_num_seqs=NUM_ROWS)
    k = engine.config.num_speculative_tokens
    model = engine._pipeline.draft
    assert model is not None
    original = model.compute_logits
    calls = 0

    def spoiled(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        logits = original(hidden).clone()
        if calls == 2 * k + position:  # the drafts made in the third step
            logits[BAD_ROW] = float("nan")
        calls += 1
        return logits

    greedy = tokens_of(run_all(engine, rows(temperature=0)))
    monkeypatch.setattr(model, "compute_logits", spoiled)
    with step_log(engine) as log:
        assert tokens_of(run_all(engine, rows(temperature=0))) == greedy
    decode = log[NUM_ROWS:]  # behind the prefill
    judged = [step.record.num_draft_tokens for step in decode[: 4 * NUM_ROWS]]
    expected = [k] * (4 * NUM_ROWS)
    expected[2 * NUM_ROWS + BAD_ROW] = position  # judged in the step after
    assert judged == expected

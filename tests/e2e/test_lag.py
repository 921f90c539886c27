"""Records read late: whatever is under way, rows come out as if every record were read at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.engines import TEXT_VOCAB, EngineShop
from e2e.harness import histogram_of, make_row, run_all, tokens_of

from specgen.pipeline.engine import Engine
from specgen.pipeline.request import PromptRow, RequestOutput

PAIRS = [("eagle1", "gumbel"), ("eagle3", "greedy"), ("eagle3", "gumbel"), (None, "greedy")]
SCHEDULES: dict[str, dict[str, Any]] = {
    "roomy": {"max_num_seqs": 8},
    "two-slots": {"max_num_seqs": 2},
    "chunked": {"max_num_seqs": 5, "max_num_batched_tokens": 13},
    "crowded": {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 17,
        "max_model_len": 80,
        "num_kv_blocks": 26,
        "block_size": 4,
    },
}
STOPS = [*"ADetv7", "q'", "xyz"]
Shop = Callable[[int], EngineShop]


@pytest.fixture(scope="session")
def shop_of(checkpoints: dict[str, Path]) -> Shop:
    """Engines by how late they read their records."""
    shops = {
        lag: EngineShop(
            checkpoints, lag=lag, device="cpu", dtype="float32", kernel_backend="reference"
        )
        for lag in range(3)
    }
    return shops.__getitem__


def prompt(index: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(index)
    length = 1 + (7 * index) % 33
    return tuple(torch.randint(4, TEXT_VOCAB, (length,), generator=generator).tolist())


def rows() -> list[PromptRow]:
    """Rows of every kind of end: length (of 1 and up), stop token, stop string, several samples."""
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 1},
        {"max_tokens": 23, "ignore_eos": True},
        {"max_tokens": 30, "stop": STOPS},
        {"max_tokens": 17, "temperature": 0.0},
        {"max_tokens": 9, "n": 3, "stop": STOPS},
        {"max_tokens": 30, "stop_token_ids": [*range(4, TEXT_VOCAB, 9)]},
        {"max_tokens": 2, "top_k": 20},
        {"max_tokens": 30, "num_speculative_tokens": 1, "stop": STOPS},
        {"max_tokens": 12, "num_speculative_tokens": 0, "top_p": 0.9},
    ]
    return [make_row(i, prompt(i), **kinds[i % len(kinds)]) for i in range(27)]


def facts(outputs: list[RequestOutput]) -> list[Any]:
    """All that a line of output could say of a row."""
    assert all(output.error is None for output in outputs)
    return [
        (c.token_ids, c.text, c.finish_reason, c.stop_reason, c.stats.to_dict())
        for output in outputs
        for c in output.choices
    ]


@pytest.fixture(scope="module")
def expected(shop_of: Shop) -> dict[Any, list[Any]]:
    """One row at a time, every record read at once."""
    return {
        (draft, sample): facts(
            run_all(shop_of(0)("text", draft, draft_sample=sample, max_num_seqs=1), rows())
        )
        for draft, sample in PAIRS
    }


def test_the_rows_end_in_all_ways(expected: dict[Any, list[Any]]) -> None:
    for outcome in expected.values():
        reasons = {(reason, type(stop)) for _, _, reason, stop, _ in outcome}
        assert reasons >= {("length", type(None)), ("stop", str), ("stop", int)}


@pytest.mark.parametrize("preempt_seed", [None, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize(("draft", "sample"), PAIRS)
def test_nothing_depends_on_how_late_records_are_read(
    shop_of: Shop,
    expected: dict[Any, list[Any]],
    draft: str | None,
    sample: str,
    lag: int,
    schedule: str,
    preempt_seed: int | None,
) -> None:
    engine = shop_of(lag)("text", draft, draft_sample=sample, **SCHEDULES[schedule])
    before = engine.num_generated_tokens
    outcome = facts(run_all(engine, rows(), preempt_seed=preempt_seed))
    assert outcome == expected[draft, sample]
    num_tokens = sum(len(token_ids) for token_ids, *_ in outcome)
    assert engine.num_generated_tokens - before == num_tokens
    engine._scheduler.blocks.check([])


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_steps_are_launched_before_earlier_ones_are_read(shop_of: Shop, lag: int) -> None:
    """The lag is what it says, and a full batch without news keeps it at every step."""
    engine = shop_of(lag).build("text", "eagle3", max_num_seqs=4)
    under_way = []
    decode = engine._runner.decode

    def spy(*args: Any) -> torch.Tensor:
        under_way.append(len(engine._in_flight))
        return decode(*args)

    engine._runner.decode = spy  # type: ignore[method-assign]
    run_all(engine, [make_row(i, prompt(i), max_tokens=24, ignore_eos=True) for i in range(4)])
    assert max(under_way) == lag
    assert under_way.count(lag) >= len(under_way) - lag


def test_a_slot_is_taken_over_while_its_last_step_is_under_way(
    shop_of: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop string is found late: its row has run on, and another row stands in its slot next."""
    alone = shop_of(0)("text", "eagle3", draft_sample="gumbel", max_num_seqs=1)
    many = [make_row(i, prompt(5), max_tokens=30, seed=i, stop=STOPS) for i in range(24)]
    wanted = facts(run_all(alone, many))
    engine = shop_of(1)("text", "eagle3", draft_sample="gumbel", max_num_seqs=2)
    taken_over = 0
    admit = engine._state.admit

    def spy(requests: Any) -> bool:
        nonlocal taken_over
        held = {slot for step in engine._in_flight._steps for slot in slots_of[id(step.requests)]}
        taken_over += sum(request.slot in held for request in requests)
        return admit(requests)

    slots_of: dict[int, list[int | None]] = {}
    push = engine._in_flight.push

    def note(requests: Any, *args: Any, **options: Any) -> None:
        slots_of[id(requests)] = [request.slot for request in requests]
        push(requests, *args, **options)

    monkeypatch.setattr(engine._state, "admit", spy)
    monkeypatch.setattr(engine._in_flight, "push", note)
    assert facts(run_all(engine, many)) == wanted
    assert taken_over > 5


@pytest.mark.parametrize("lag", [1, 2])
def test_a_run_that_was_stopped_goes_on_elsewhere(
    shop_of: Shop, expected: dict[Any, list[Any]], lag: int
) -> None:
    """What is finished when a run stops is handed out; the rest runs again as if it were new."""
    first = shop_of(lag).build("text", "eagle3", draft_sample="gumbel", max_num_seqs=5)
    running = first.generate(iter(rows()))
    outputs = [next(running) for _ in range(6)]
    outputs += [output for output in first.take_finished() if output is not outputs[-1]]
    done = {output.row.index for output in outputs}
    assert len(done) == len(outputs) < len(rows())
    second = shop_of(lag)("text", "eagle3", draft_sample="gumbel", max_num_seqs=5)
    outputs += run_all(second, [row for row in rows() if row.index not in done])
    outputs.sort(key=lambda output: output.row.index)
    assert facts(outputs) == expected["eagle3", "gumbel"]


def test_rows_that_end_in_the_last_records_are_still_handed_out(shop_of: Shop) -> None:
    """Preempting reads all records: it may end the last row."""
    engine: Engine = shop_of(2)("text", None, max_num_seqs=4)
    engine.add_request(make_row(0, prompt(3), max_tokens=2, ignore_eos=True))
    engine.step()
    assert engine.step() == []
    engine.preempt_all()
    assert engine.num_running == engine.num_waiting == 0
    assert engine.has_unfinished()
    (output,) = engine.step()
    assert len(output.choices[0].token_ids) == 2
    assert not engine.has_unfinished()


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("draft", ["eagle3", None])
def test_memory_that_runs_out_behind_steps_under_way(
    shop_of: Shop, lag: int, draft: str | None
) -> None:
    """Records of the steps before the one that failed still count; its own rows run again."""
    options = {"draft_sample": "gumbel" if draft else "greedy", "max_num_seqs": 6}
    good = run_all(shop_of(0)("text", draft, **options), rows())
    engine = shop_of(lag).build("text", draft, **options)
    decode, num_calls, under_way = engine._runner.decode, 0, []

    def failing(*args: Any) -> torch.Tensor:
        nonlocal num_calls
        record = decode(*args)
        num_calls += 1
        if num_calls % 7 == 0:
            under_way.append(len(engine._in_flight))
            raise torch.OutOfMemoryError("injected")
        return record

    engine._runner.decode = failing  # type: ignore[method-assign]
    outputs = run_all(engine, rows())
    assert tokens_of(outputs) == tokens_of(good)
    assert histogram_of(outputs) == histogram_of(good)
    assert max(under_way) == lag


def test_a_row_that_ended_in_a_record_under_way_is_not_lost_to_memory(shop_of: Shop) -> None:
    """The step behind a row's last one fails: the row is complete and no error."""
    engine = shop_of(1).build("text", None, max_num_seqs=1)
    whole = tokens_of(run_all(engine, [make_row(0, prompt(4), max_tokens=20, ignore_eos=True)]))[0]
    stop = whole[7]
    length = whole.index(stop) + 1
    row = make_row(0, prompt(4), max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    decode = engine._runner.decode

    def failing(requests: Any, *args: Any) -> torch.Tensor:
        record = decode(requests, *args)
        if int(engine._state.seq_lens[requests[0].slot]) - len(prompt(4)) == length:
            if not failing.armed:  # type: ignore[attr-defined]
                failing.armed = True  # type: ignore[attr-defined]
                return record
            raise torch.OutOfMemoryError("injected")
        return record

    failing.armed = False  # type: ignore[attr-defined]
    engine._runner.decode = failing  # type: ignore[method-assign]
    (output,) = run_all(engine, [row])
    assert output.error is None
    assert output.choices[0].token_ids == whole[:length]
    assert engine.num_memory_faults == 1

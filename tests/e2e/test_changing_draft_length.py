"""k changes from step to step, to 0 and back: tokens, drafts, accounts and the law stay right."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.engines import EngineShop
from e2e.harness import device_rows, make_row, run_all, step_log, tokens_of
from e2e.laws import P_VALUE, chain_law
from e2e.lengths import LongPauses, RandomLength, changing, entry_log
from e2e.runs import SAMPLING, big_engine, chain_fits, chain_rows
from e2e.test_equality import SCHEDULES, expected, reference_head, rows
from models.straight_line import draft_tokens

from specgen.pipeline.draft_length import AutoDraftLength, FixedDraftLength
from specgen.pipeline.loading import Pipeline
from specgen.pipeline.step_record import RowRecord

__all__ = ["expected"]  # the fixture

K = 3
DRAFTS = [("eagle1", "greedy"), ("eagle1", "gumbel"), ("eagle3", "greedy"), ("eagle3", "gumbel")]


# A run whose length is chosen: only such a one has steps without drafts, and keeps their pairs.
AUTO: dict[str, Any] = {"num_speculative_tokens": f"auto:{K}"}


@pytest.fixture(autouse=True)
def _leave_engines_as_they_were(engine_of: EngineShop) -> Any:
    yield
    for engine in engine_of._engines.values():
        if not isinstance(engine._scheduler.draft_length, FixedDraftLength):
            engine._scheduler.draft_length = FixedDraftLength(engine.config.num_speculative_tokens)


@pytest.mark.parametrize("schedule", ["three", "all", "chunked-crowded"])
@pytest.mark.parametrize(("draft", "sample"), DRAFTS)
def test_greedy_tokens_do_not_depend_on_k(
    engine_of: EngineShop,
    expected: list[tuple[int, ...]],
    draft: str,
    sample: str,
    schedule: str,
) -> None:
    engine = engine_of("text", draft, draft_sample=sample, **SCHEDULES[schedule], **AUTO)
    for seed in range(2):
        policy = RandomLength(seed)
        outputs = run_all(changing(engine, policy), rows(), preempt_seed=seed or None)
        assert tokens_of(outputs) == expected  # and the accounts of every row were checked
        assert set(policy.chosen) == set(range(K + 1))
        stats = [choice.stats for output in outputs for choice in output.choices]
        assert all(stat.num_speculative_tokens == K for stat in stats)
        assert sum(stat.num_accepted_draft_tokens for stat in stats) > 20
        assert sum(stat.num_plain_tokens for stat in stats) > 2 * len(stats)


@pytest.mark.parametrize("policy", [RandomLength, LongPauses])
@pytest.mark.parametrize("schedule", ["all", "chunked-crowded"])
@pytest.mark.parametrize("draft", ["eagle1", "eagle3"])
def test_every_draft_is_the_one_that_the_head_proposes(
    engine_of: EngineShop,
    checkpoints: dict[str, Path],
    draft: str,
    schedule: str,
    policy: type[RandomLength],
) -> None:
    """Also after steps without drafts, whose pairs were kept: more of them than there are places,
    and of rows that took another's slot."""
    engine = engine_of("text", draft, draft_sample="greedy", **SCHEDULES[schedule], **AUTO)
    head, model = reference_head(checkpoints, draft)
    proposals: list[tuple[int, int, list[int]]] = []
    decode, state = engine._runner.decode, engine._state

    def spy(requests: Any, *args: Any) -> torch.Tensor:
        for request, slot, n in device_rows(engine, requests):
            drafts = state.draft_tokens[slot, : int(state.num_draft_tokens[slot])].tolist()
            proposals.append((request.row.index, n, drafts))
        return decode(requests, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._runner, "decode", spy)
        outputs = run_all(changing(engine, policy(7)), rows(ignore_eos=True))
    lengths = [len(drafts) for _, _, drafts in proposals]
    assert set(lengths) == set(range(K + 1))
    checked = 0
    with torch.no_grad():
        for row, n, drafts in proposals:
            if not drafts or row % 3:
                continue
            output = outputs[row]
            whole = torch.tensor([*output.prompt_token_ids, *output.choices[0].token_ids])
            states = model(whole[None], output_hidden_states=True).hidden_states
            used = states[-1:] if draft == "eagle1" else states[:3]
            features = torch.cat(used, dim=-1)[0]
            wanted, _ = draft_tokens(head, whole[:n], features[: n - 1], len(drafts))
            assert drafts == wanted, f"row {row} after {n} tokens"
            checked += 1
    assert checked > 10


@pytest.mark.parametrize("sample", ["greedy", "gumbel"])
def test_no_stale_draft_is_judged_after_a_step_without(engine_of: EngineShop, sample: str) -> None:
    """Drafts of before a plain step stand in the row still: they belong to other positions."""
    engine = engine_of("text", "eagle3", draft_sample=sample, max_num_seqs=16, **AUTO)
    pattern = [3, 3, 0, 3, 3, 1, 0, 0, 2, 3]

    class Pattern(RandomLength):
        def choose(self, num_rows: int, limit: int) -> int:
            self.chosen.append(pattern[len(self.chosen) % len(pattern)])
            return self.chosen[-1]

    policy = Pattern(0)
    with step_log(engine) as log:
        run_all(changing(engine, policy), rows(ignore_eos=True))
    # One prefill step, then all sixteen rows together until the first of them ends.
    num_rows = len(rows())
    steps = [log[at : at + num_rows] for at in range(0, 12 * num_rows, num_rows)]
    for before, k, step in zip(policy.chosen, policy.chosen[1:12], steps[1:], strict=False):
        judged = {entry.record.num_draft_tokens for entry in step if entry.record.token_ids}
        assert judged <= {min(before, k)}


def test_pairs_wait_and_reach_the_cache_before_they_are_attended_to(engine_of: EngineShop) -> None:
    """Without drafts next to nothing is done for the head; then it is done for eight steps."""
    engine = engine_of.build("text", "eagle3", num_speculative_tokens="auto:3", max_num_seqs=16)
    drafter = engine._runner._drafter
    assert drafter is not None
    calls: list[str] = []
    write_cache, forward = drafter._model.write_cache, drafter._model.forward

    def wrote(ids: torch.Tensor, *args: Any) -> None:
        calls.append(f"write {len(ids)}")
        write_cache(ids, *args)

    def ran(*args: Any) -> Any:
        calls.append("forward")
        return forward(*args)

    class Pattern(RandomLength):
        def choose(self, num_rows: int, limit: int) -> int:
            calls.append(f"{num_rows} rows")
            self.chosen.append(1 if len(self.chosen) in (20, 21) else 0)
            return self.chosen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter._model, "write_cache", wrote)
        patch.setattr(drafter._model, "forward", ran)
        run_all(
            changing(engine, Pattern(0)), [make_row(i, (5 + i,), max_tokens=40) for i in (0, 1)]
        )
    assert calls[:2] == ["2 rows", "write 2"], "the prompts"
    wrote_at = [i for i, call in enumerate(calls) if call.startswith("write")][1:]
    num_steps = [sum(call.endswith("rows") for call in calls[:at]) for at in wrote_at]
    assert num_steps == [1 + 8 + 1, 1 + 16 + 1, 1 + 19 + 1, 1 + 21 + 8 + 1, 1 + 21 + 16 + 1]
    written = [calls[at] for at in wrote_at[:4]]
    assert written == ["write 16"] * 4, "of two rows, padded to eight pairs each"
    assert calls.count("forward") == 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("schedule", ["three", "all", "chunked-crowded"])
@pytest.mark.parametrize("draft", ["eagle1", "eagle3"])
def test_the_drafts_cache_holds_the_true_pairs_of_its_rows_and_of_no_others(
    engine_of: EngineShop, draft: str, schedule: str, seed: int
) -> None:
    """Entries of each row when a step has drafted, also of rows that took another's slot or blocks
    while its pairs waited, against those of a row that runs alone and always drafts."""
    alone = engine_of("text", draft, **SCHEDULES["one-by-one"])
    with entry_log(alone) as true:
        run_all(alone, rows(ignore_eos=True))
    engine = engine_of("text", draft, num_speculative_tokens="auto:3", **SCHEDULES[schedule])
    policy = LongPauses(seed)
    with entry_log(engine, true) as checked:
        run_all(changing(engine, policy), rows(ignore_eos=True), preempt_seed=seed or None)
    assert len(checked.keys() & true.keys()) > 300


def test_the_law_holds_while_k_changes(engine_of: EngineShop, checkpoints: dict[str, Path]) -> None:
    """Sampled drafts, ratio rule: jointly over a window and at every place of a step."""
    engine = big_engine(engine_of, "chain", "eagle3", "gumbel", num_speculative_tokens="auto:2")
    changing(engine, RandomLength(3, 2))
    law = chain_law(checkpoints["chain"], **SAMPLING)
    fits = chain_fits(engine, chain_rows(4096), law)
    assert set(fits) == {"joint", "first", "plain", "judged 0", "judged 1", "bonus"}
    for place, result in fits.items():
        assert result.p_value > P_VALUE, (place, result)


@pytest.mark.parametrize("lag", [0, 1])
def test_auto_measures_and_keeps_greedy_tokens(
    checkpoints: dict[str, Path], expected: list[tuple[int, ...]], lag: int
) -> None:
    shop = EngineShop(
        checkpoints, lag=lag, device="cpu", dtype="float32", kernel_backend="reference"
    )
    engine = shop("text", "eagle3", num_speculative_tokens="auto:4", max_num_seqs=6)
    assert engine.describe()["auto_draft_length"] is True
    assert isinstance(engine._scheduler.draft_length, AutoDraftLength)
    outputs = run_all(engine, rows(), preempt_seed=1)
    assert tokens_of(outputs) == expected
    assert {o.choices[0].stats.num_speculative_tokens for o in outputs} == {4}
    assert sum(engine.num_decode_steps_by_k.values()) > 10
    assert set(engine.num_decode_steps_by_k) <= set(range(5))


def test_measuring_costs_one_step_a_length_on_a_cpu(
    engine_of: EngineShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five steps of each took a third of a job of some seconds."""
    runner = engine_of("text", "eagle3", max_num_seqs=16, **AUTO)._runner
    ran: list[int] = []
    decode = runner._decode

    def spy(slots: list[int], k: int, **options: Any) -> torch.Tensor:
        ran.append(k)
        return decode(slots, k, **options)

    monkeypatch.setattr(runner, "_decode", spy)
    assert [runner.time_inert_step(4, k) > 0 for k in range(3)] == [True] * 3
    assert ran == [0, 1, 2]


def test_a_step_behind_a_capture_is_not_timed(
    engine_of: EngineShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for the host, which says nothing of how long such a step takes."""
    engine = engine_of("text", "eagle3", max_num_seqs=16, **AUTO)
    numbers = iter([0, 0, 1, 1, 1, 3, *[3] * 1000])
    monkeypatch.setattr(Pipeline, "num_graphs", property(lambda _: next(numbers)))
    engine._num_graphs = 0
    seen: list[float | None] = []

    class Watch(RandomLength):
        def observe(
            self, records: Iterable[RowRecord], num_rows: int, k: int, seconds: float | None
        ) -> None:
            seen.append(seconds)

    run_all(changing(engine, Watch(0)), rows(ignore_eos=True))
    untimed = [i for i, seconds in enumerate(seen) if seconds is None]
    assert untimed == [2, 5]


def test_a_row_that_wants_fewer_drafts_gets_no_more_under_auto(engine_of: EngineShop) -> None:
    engine = engine_of.build("text", "eagle3", num_speculative_tokens="auto:3", max_num_seqs=8)
    changing(engine, FixedDraftLength(3))
    mixed = [make_row(i, (5 + i, 6), max_tokens=12, num_speculative_tokens=i % 3) for i in range(8)]
    with step_log(engine) as log:
        run_all(engine, mixed)
    for step in log:
        assert step.record.num_draft_tokens <= step.request.row.index % 3

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.errors import RequestError
from specgen.pipeline.request import ChoiceOutput, PromptRow, RequestOutput
from specgen.sampling_params import SamplingParams
from specgen.stats import RunStats, SpeculationStats

K = 4


@st.composite
def completions(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], int]:
    """Steps (d, tau, c) of a completion, and its plain tokens; only the last step may be cut."""
    num_steps = draw(st.integers(0, 12))
    steps = []
    for i in range(num_steps):
        drafts = draw(st.integers(1, K))
        accepted = draw(st.integers(0, drafts))
        last = i == num_steps - 1
        committed = draw(st.integers(1, accepted + 1)) if last else accepted + 1
        steps.append((drafts, accepted, committed))
    return steps, draw(st.integers(0, 5))


def account(steps: list[tuple[int, int, int]], plain: int) -> SpeculationStats:
    stats = SpeculationStats(K)
    stats.add_plain(plain)
    for step in steps:
        stats.add_spec_step(*step)
    return stats


@settings(max_examples=200, deadline=None)
@given(completions())
def test_accounts_agree_with_their_definitions(
    completion: tuple[list[tuple[int, int, int]], int],
) -> None:
    steps, plain = completion
    stats = account(steps, plain)
    tokens = plain + sum(c for _, _, c in steps)
    stats.check(tokens)
    out = stats.to_dict()
    kept = [min(tau, c) for _, tau, c in steps]
    assert out["num_spec_steps"] == len(steps)
    assert out["num_draft_tokens"] == sum(d for d, _, _ in steps)
    assert out["num_accepted_draft_tokens"] == sum(kept)
    assert out["num_plain_tokens"] == plain
    assert out["acceptance_histogram"] == [kept.count(j) for j in range(K + 1)]
    assert out["drafted_per_position"] == [sum(d > i for d, _, _ in steps) for i in range(K)]
    assert out["accepted_per_position"] == [sum(a > i for a in kept) for i in range(K)]
    cut = bool(steps) and steps[-1][2] <= steps[-1][1]
    assert tokens == plain + sum(kept) + len(steps) - cut
    if steps:
        assert out["draft_acceptance_rate"] == sum(kept) / sum(d for d, _, _ in steps)
        assert out["mean_acceptance_length"] == 1 + sum(kept) / len(steps)


@settings(max_examples=50, deadline=None)
@given(completions(), st.sampled_from([-1, 1]))
def test_a_token_too_many_or_too_few_is_found(
    completion: tuple[list[tuple[int, int, int]], int], off: int
) -> None:
    steps, plain = completion
    tokens = plain + sum(c for _, _, c in steps)
    with pytest.raises(AssertionError, match="completion tokens"):
        account(steps, plain).check(tokens + off)


@pytest.mark.parametrize("name", ["acceptance_histogram", "accepted_per_position"])
def test_accounts_that_contradict_each_other_are_found(name: str) -> None:
    stats = account([(3, 2, 3)], 1)
    getattr(stats, name)[0] += 1
    with pytest.raises(AssertionError):
        stats.check(4)


@pytest.mark.parametrize(
    "step",
    [(0, 0, 1), (K + 1, 0, 1), (2, 3, 1), (2, -1, 1), (2, 1, 0), (2, 1, 3)],
)
def test_impossible_steps_are_refused(step: tuple[int, int, int]) -> None:
    with pytest.raises(AssertionError):
        SpeculationStats(K).add_spec_step(*step)


def test_nothing_follows_a_cut_step() -> None:
    stats = account([(3, 3, 2)], 0)
    with pytest.raises(AssertionError, match="after the row's end"):
        stats.add_plain(1)
    with pytest.raises(AssertionError, match="after the row's end"):
        stats.add_spec_step(1, 1, 2)


def test_null_where_the_divisor_is_zero() -> None:
    out = account([], 3).to_dict()
    assert out["draft_acceptance_rate"] is None
    assert out["mean_acceptance_length"] is None
    none = SpeculationStats(0)
    none.add_plain(2)
    none.check(2)
    assert none.to_dict()["acceptance_histogram"] == [0]
    assert none.to_dict()["drafted_per_position"] == []


def test_the_object_of_the_output() -> None:
    """The example of the format: 21 steps of 3 drafts, one of them the first token's."""
    stats = SpeculationStats(3)
    stats.add_plain(1)
    for accepted, count in enumerate([4, 5, 6, 6]):
        for _ in range(count):
            stats.add_spec_step(3, accepted, accepted + 1)
    assert list(stats.to_dict()) == [
        "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens",
        "num_speculative_tokens", "num_plain_tokens", "acceptance_histogram",
        "drafted_per_position", "accepted_per_position", "draft_acceptance_rate",
        "mean_acceptance_length",
    ]  # fmt: skip
    out = stats.to_dict()
    assert (out["num_spec_steps"], out["num_draft_tokens"]) == (21, 63)
    assert out["num_accepted_draft_tokens"] == 35
    assert out["accepted_per_position"] == [17, 12, 6]
    assert round(out["draft_acceptance_rate"], 3) == 0.556
    assert round(out["mean_acceptance_length"], 2) == 2.67
    stats.check(57)


@settings(max_examples=50, deadline=None)
@given(st.lists(completions(), max_size=4))
def test_merged_is_the_sum(
    parts: list[tuple[list[tuple[int, int, int]], int]],
) -> None:
    total = SpeculationStats.merged(account(*part) for part in parts)
    total.check(sum(plain + sum(c for _, _, c in steps) for steps, plain in parts))
    assert total.num_spec_steps == sum(len(steps) for steps, _ in parts)


def test_merged_takes_the_larger_k() -> None:
    small, large = SpeculationStats(1), SpeculationStats(3)
    small.add_spec_step(1, 1, 2)
    large.add_spec_step(3, 3, 4)
    for order in ([small, large], [large, small]):
        total = SpeculationStats.merged(order)
        assert total.num_speculative_tokens == 3
        assert total.acceptance_histogram == [0, 1, 0, 1]
        assert total.drafted_per_position == [2, 1, 1]
    assert small.acceptance_histogram == [0, 1]


def output(*choices: SpeculationStats, tokens: int = 0, error: Any = None) -> RequestOutput:
    row = PromptRow(0, "0" * 16, 1, "a", SamplingParams(), prompt="x")
    made = tuple(
        ChoiceOutput(i, (0,) * tokens, "", "length", None, 0, stats)
        for i, stats in enumerate(choices)
    )
    return RequestOutput(row, (1, 2), made, error)


def test_run_weighs_per_token_and_per_request() -> None:
    run = RunStats()
    run.add(output(account([(4, 4, 5)] * 3, 0), tokens=15))
    run.add(output(account([(2, 0, 1)], 0), tokens=1))
    run.add(output(account([], 2), tokens=2))
    run.add(output(error=RequestError("invalid_value", "no", 3)))
    out = run.summary(2.0)
    assert out["rows"] == {
        "done": 4, "ok": 3, "failed": 1, "truncated": 0, "kept": 0, "errors": {"invalid_value": 1},
    }  # fmt: skip
    assert out["usage"] == {"prompt_tokens": 6, "completion_tokens": 18, "total_tokens": 24}
    assert out["completion_tokens_per_s"] == 9.0
    assert out["finish_reasons"] == {"length": 3}
    spec = out["speculative_decoding"]
    assert spec["mean_acceptance_length"] == 1 + 12 / 4
    assert spec["draft_acceptance_rate"] == 12 / 14
    assert spec["acceptance_per_position"] == [3 / 4, 3 / 4, 1, 1]
    # The row without spec steps has no acceptance, and does not count as 0.
    assert spec["per_request"] == {
        "num_requests": 2,
        "draft_acceptance_rate": 0.5,
        "mean_acceptance_length": 3.0,
        "completion_tokens": 6.0,
    }
    json.dumps(out, allow_nan=False)


def test_an_empty_run_has_nulls() -> None:
    out = RunStats().summary(0.0)
    assert out["completion_tokens_per_s"] is None
    assert out["speculative_decoding"]["per_request"]["mean_acceptance_length"] is None


@pytest.mark.parametrize(
    ("steps", "accepting", "warned"),
    [(299, 0, False), (300, 0, True), (300, 14, True), (300, 15, False), (5000, 300, False)],
)
def test_a_draft_of_which_nothing_is_accepted(steps: int, accepting: int, warned: bool) -> None:
    run = RunStats()
    parts = [(3, 1, 2)] * accepting + [(3, 0, 1)] * (steps - accepting)
    run.add(output(account(parts, 0), tokens=steps + accepting))
    assert (run.draft_warning is not None) is warned
    assert run.summary(1.0)["speculative_decoding"]["warning"] == run.draft_warning
    if warned:
        assert f"only {accepting} of {steps} first drafts" in str(run.draft_warning)


def test_a_rule_that_accepts_as_it_was_told_is_not_warned_of() -> None:
    run = RunStats()
    stats = SpeculationStats(3, faithful=False)
    for _ in range(500):
        stats.add_spec_step(3, 0, 1)
    run.add(output(stats, tokens=500))
    assert run.draft_warning is None


def test_a_run_without_drafts_has_none_to_warn_of() -> None:
    run = RunStats()
    run.add(output(account([], 1000), tokens=1000))
    assert run.draft_warning is None

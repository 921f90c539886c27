"""Ends of rows, accounts, samples and seeds, through the whole engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from e2e.engines import EngineShop
from e2e.harness import LoggedStep, make_row, run_all, step_log, tokens_of

from specgen.pipeline.engine import Engine
from specgen.pipeline.request import ChoiceOutput, PromptRow, RequestOutput
from specgen.stats import SpeculationStats

PROMPT = "the quick brown fox"
MAX_LEN = 64


@pytest.fixture(scope="module", params=["eagle3-greedy", "eagle1-gumbel", "none"])
def engine(request: pytest.FixtureRequest, engine_of: EngineShop) -> Engine:
    draft, _, sample = request.param.partition("-")
    return make_engine(engine_of, None if draft == "none" else draft, sample or "greedy")


def make_engine(engine_of: EngineShop, draft: str | None, sample: str) -> Engine:
    return engine_of("text", draft, draft_sample=sample, max_num_seqs=8, max_model_len=MAX_LEN)


@pytest.fixture(scope="module")
def drafting(engine_of: EngineShop) -> Engine:
    return make_engine(engine_of, "eagle3", "greedy")


def run_one(engine: Engine, prompt: str | Sequence[int] = PROMPT, **sampling: Any) -> ChoiceOutput:
    """The only choice of a single row."""
    output = run_all(engine, [make_row(0, prompt, **sampling)])[0]
    assert output.error is None, output.error
    (choice,) = output.choices
    return choice


LONG = {"temperature": 0.7, "max_tokens": 40, "ignore_eos": True}


@dataclass(frozen=True)
class Known:
    """A long completion of characters without repetition, and how its steps cut it up."""

    options: dict[str, Any]
    whole: ChoiceOutput
    log: list[LoggedStep]
    step: LoggedStep
    at: int
    """A token in the middle of what ``step`` committed, whose like was not seen before."""


@pytest.fixture(scope="module")
def known(drafting: Engine) -> Known:
    for seed in range(100):
        options = {**LONG, "seed": seed}
        with step_log(drafting) as log:
            whole = run_one(drafting, **options)
        if min(whole.token_ids) < 4:  # special tokens have no text
            continue
        for step in log:
            for at in range(step.start + 1, step.start + len(step.record.token_ids) - 1):
                if step.start > 4 and whole.token_ids[at] not in whole.token_ids[:at]:
                    return Known(options, whole, log, step, at)
    raise AssertionError("no completion with a new token inside a run of accepted drafts")


# -- ends -----------------------------------------------------------------------------------------


def test_max_tokens_ends_with_length_exactly(engine: Engine) -> None:
    for max_tokens in range(1, 12):
        choice = run_one(engine, max_tokens=max_tokens, ignore_eos=True)
        assert len(choice.token_ids) == max_tokens
        assert choice.finish_reason == "length"
        assert choice.stop_reason is None


def test_one_token_needs_no_spec_step(engine: Engine) -> None:
    stats = run_one(engine, max_tokens=1, ignore_eos=True).stats
    assert (stats.num_plain_tokens, stats.num_spec_steps, stats.num_draft_tokens) == (1, 0, 0)
    assert stats.draft_acceptance_rate is None


def test_a_stop_token_ends_the_row_wherever_it_falls(engine: Engine) -> None:
    whole = run_one(engine, temperature=0, max_tokens=30, ignore_eos=True)
    for stop in sorted(set(whole.token_ids)):
        at = whole.token_ids.index(stop)
        choice = run_one(
            engine, temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=[stop]
        )
        assert choice.token_ids == whole.token_ids[: at + 1]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        assert choice.text == engine._tokenizer.decode(choice.token_ids[:-1])
        # The same, where it is the last token that the row may have: still a stop.
        last = run_one(
            engine, temperature=0, max_tokens=at + 1, ignore_eos=True, stop_token_ids=[stop]
        )
        assert (last.token_ids, last.finish_reason) == (choice.token_ids, "stop")
        if at:
            short = run_one(
                engine, temperature=0, max_tokens=at, ignore_eos=True, stop_token_ids=[stop]
            )
            assert (len(short.token_ids), short.finish_reason) == (at, "length")


def test_a_stop_token_inside_an_accepted_run_cuts_it(drafting: Engine, known: Known) -> None:
    stop = known.whole.token_ids[known.at]
    choice = run_one(drafting, **known.options, stop_token_ids=[stop])
    assert choice.token_ids == known.whole.token_ids[: known.at + 1]
    assert choice.finish_reason == "stop"
    check_cut(choice, known)


def check_cut(choice: ChoiceOutput, known: Known) -> None:
    """The accounts of a completion that ends at ``known.at``."""
    assert choice.stats.num_cut == 1
    expected = SpeculationStats(3)
    for step in known.log[1 : known.log.index(known.step)]:
        num_sampled = step.record.num_sampled
        expected.add_spec_step(step.record.num_draft_tokens, num_sampled - 1, num_sampled)
    expected.add_spec_step(
        known.step.record.num_draft_tokens,
        known.step.record.num_sampled - 1,
        known.at + 1 - known.step.start,
    )
    assert choice.stats.acceptance_histogram == expected.acceptance_histogram
    assert choice.stats.drafted_per_position == expected.drafted_per_position


def test_a_stop_string_inside_an_accepted_run_cuts_ids_counts_and_text(
    drafting: Engine, known: Known
) -> None:
    text = drafting._tokenizer.decode(known.whole.token_ids)
    assert len(text) == len(known.whole.token_ids), "a token is a character here"
    stop = text[known.at - 1 : known.at + 1]
    choice = run_one(drafting, **known.options, stop=[stop])
    assert choice.token_ids == known.whole.token_ids[: known.at + 1]
    assert choice.text == text[: known.at - 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    check_cut(choice, known)


def test_a_stop_string_that_spans_steps(drafting: Engine, known: Known) -> None:
    """Every stretch of three characters of a completion stops it where it first ends."""
    text = drafting._tokenizer.decode(known.whole.token_ids)
    rows = [
        make_row(i, PROMPT, **known.options, stop=[text[i : i + 3], "never"])
        for i in range(len(text) - 3)
    ]
    ends = set()
    for output in run_all(drafting, rows, preempt_seed=0):
        (choice,) = output.choices
        start = text.index(output.row.sampling.stop[0])
        ends.add(start + 3)
        assert choice.token_ids == known.whole.token_ids[: start + 3]
        assert choice.text == text[:start]
        assert choice.finish_reason == "stop"
        choice.stats.check(start + 3)
    assert len(ends) > 20


def test_a_stop_string_completed_by_the_last_token_is_a_stop(
    drafting: Engine, known: Known
) -> None:
    text = drafting._tokenizer.decode(known.whole.token_ids)
    stop = text[4:7]
    last = text.index(stop) + 3
    options = {**known.options, "max_tokens": last}
    choice = run_one(drafting, **options, stop=[stop])
    assert (choice.finish_reason, len(choice.token_ids)) == ("stop", last)


@pytest.fixture(scope="module")
def eos_engine(engine_of: EngineShop, known: Known) -> Engine:
    """An engine whose model ends at two tokens of the known completion."""
    engine = engine_of.build("text", "eagle3", max_num_seqs=8, max_model_len=MAX_LEN)
    ends = {known.whole.token_ids[known.at], known.whole.token_ids[-1]}
    engine.config = replace(engine.config, eos_token_ids=tuple(sorted(ends)))
    return engine


def test_each_of_several_eos_ids_ends_a_row(eos_engine: Engine, known: Known) -> None:
    whole, ends = known.whole.token_ids, eos_engine.config.eos_token_ids
    first = min(whole.index(end) for end in ends)
    options = {**known.options, "ignore_eos": False}
    choice = run_one(eos_engine, **options)
    assert choice.token_ids == whole[: first + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert choice.text == eos_engine._tokenizer.decode(whole[:first])
    # A stop id of the row's own is named, next to the model's.
    own = run_one(eos_engine, **options, stop_token_ids=[whole[0]])
    assert (own.token_ids, own.stop_reason) == (whole[:1], whole[0])


def test_ignore_eos_goes_on(eos_engine: Engine, known: Known) -> None:
    choice = run_one(eos_engine, **known.options)
    assert choice.token_ids == known.whole.token_ids
    assert choice.finish_reason == "length"
    # The same id counts where the row asks for it itself, and then it is its reason.
    end = known.whole.token_ids[known.at]
    stopped = run_one(eos_engine, **known.options, stop_token_ids=[end])
    assert (len(stopped.token_ids), stopped.stop_reason) == (known.at + 1, end)


# -- lengths of prompts ---------------------------------------------------------------------------


def test_prompts_around_the_limit(engine: Engine) -> None:
    prompts = {length: (5,) * length for length in (MAX_LEN - 2, MAX_LEN - 1, MAX_LEN)}
    rows = [make_row(n, prompt, ignore_eos=True) for n, prompt in prompts.items()]
    outputs = {output.row.index: output for output in engine.generate(rows)}
    for length in (MAX_LEN - 2, MAX_LEN - 1):
        (choice,) = outputs[length].choices
        assert len(choice.token_ids) == MAX_LEN - length
        assert choice.finish_reason == "length"
    error = outputs[MAX_LEN].error
    assert error is not None
    assert error.code == "prompt_too_long"
    assert outputs[MAX_LEN].choices == ()


def test_completions_end_at_the_model_length(engine: Engine) -> None:
    output = run_all(engine, [make_row(0, (5,) * 10, max_tokens=1000, ignore_eos=True)])[0]
    assert len(output.choices[0].token_ids) == MAX_LEN - 10
    assert output.choices[0].finish_reason == "length"


# -- accounts -------------------------------------------------------------------------------------


def many_rows(**sampling: Any) -> list[PromptRow]:
    return [
        make_row(i, PROMPT[: 1 + i % 15], max_tokens=1 + i % 25, stop_token_ids=[9, 17], **sampling)
        for i in range(40)
    ]


@pytest.mark.parametrize("preempt_seed", [None, 7])
def test_accounts_explain_every_token(engine: Engine, preempt_seed: int | None) -> None:
    with step_log(engine) as log:
        outputs = run_all(engine, many_rows(), preempt_seed=preempt_seed)
    k = engine.config.num_speculative_tokens
    reasons = set()
    for output in outputs:
        (choice,) = output.choices
        stats = choice.stats
        reasons.add(choice.finish_reason)
        stats.check(len(choice.token_ids))
        steps = [step for step in log if step.request.row is output.row]
        spec = [step.record for step in steps if step.record.num_draft_tokens > 0]
        assert stats.num_spec_steps == len(spec)
        assert stats.num_draft_tokens == sum(record.num_draft_tokens for record in spec)
        assert stats.num_accepted_draft_tokens == sum(
            min(record.num_sampled - 1, len(record.token_ids)) for record in spec
        )
        assert len(stats.acceptance_histogram) == k + 1
        assert stats.num_plain_tokens == (1 if k else len(choice.token_ids))
    assert reasons == {"stop", "length"}


def test_a_failed_check_is_not_silent(engine: Engine) -> None:
    choice = run_one(engine, max_tokens=9, ignore_eos=True)
    with pytest.raises(AssertionError, match="completion tokens"):
        choice.stats.check(10)


# -- samples and seeds ----------------------------------------------------------------------------


def test_samples_of_a_row_differ_and_come_in_order(engine: Engine) -> None:
    output = run_all(engine, [make_row(0, PROMPT, n=12, max_tokens=20, ignore_eos=True)])[0]
    assert [choice.index for choice in output.choices] == list(range(12))
    assert len({choice.token_ids for choice in output.choices}) == 12


def test_fewer_samples_are_the_first_of_more(engine: Engine) -> None:
    def samples(n: int) -> list[tuple[int, ...]]:
        row = make_row(0, PROMPT, n=n, seed=11, max_tokens=20, ignore_eos=True)
        return tokens_of(run_all(engine, [row]))

    assert samples(10)[:3] == samples(3)
    assert samples(10)[:1] == samples(1)


def seeded(outputs: Sequence[RequestOutput]) -> dict[int, tuple[int, ...]]:
    return {output.row.index: output.choices[0].token_ids for output in outputs}


def test_seeds_fix_the_text_and_neighbours_do_not_change_it(engine: Engine) -> None:
    options = {"max_tokens": 20, "ignore_eos": True}
    row = make_row(3, PROMPT, seed=5, **options)
    alone = seeded(run_all(engine, [row]))[3]
    others = [make_row(i, "other " * i, **options) for i in (1, 2, 4, 5, 6)]
    same_seed = make_row(7, PROMPT, seed=5, **options)
    together = seeded(run_all(engine, [*others[:2], row, *others[2:], same_seed], preempt_seed=1))
    assert together[3] == alone
    assert together[7] == alone


def test_rows_without_seeds_differ_and_repeat(engine: Engine) -> None:
    rows = [make_row(i, PROMPT, max_tokens=20, ignore_eos=True) for i in range(10)]
    first, second = seeded(run_all(engine, rows)), seeded(run_all(engine, rows[::-1]))
    assert first == second
    assert len(set(first.values())) == 10
    seeds = {output.choices[0].seed for output in run_all(engine, rows)}
    assert len(seeds) == 10
    # The seed that is reported gives the same text as a seed of the row's own.
    reported = run_all(engine, rows[:1])[0].choices[0]
    again = run_one(engine, seed=reported.seed, max_tokens=20, ignore_eos=True)
    assert again.token_ids == reported.token_ids


@pytest.mark.parametrize("seed", [0, -1, 2**53 + 1, 2**63 - 1, -(2**63)])
def test_seeds_of_all_64_bits(engine: Engine, seed: int) -> None:
    options = {"max_tokens": 20, "ignore_eos": True}
    choice = run_one(engine, seed=seed, **options)
    assert choice.seed == seed
    neighbour = seed - 1 if seed > 0 else seed + 1
    assert run_one(engine, seed=neighbour, **options).token_ids != choice.token_ids


def test_greedy_needs_no_seed(engine: Engine) -> None:
    rows = [make_row(i, PROMPT, temperature=0, seed=i, max_tokens=20) for i in range(4)]
    assert len(set(tokens_of(run_all(engine, rows)))) == 1


def test_top_k_one_is_greedy(engine: Engine) -> None:
    greedy = run_one(engine, temperature=0, max_tokens=20)
    assert run_one(engine, temperature=1.3, top_k=1, max_tokens=20).token_ids == greedy.token_ids


# -- rows with a draft length of their own --------------------------------------------------------


def test_a_row_has_its_own_draft_length(drafting: Engine) -> None:
    for k in range(4):
        stats = run_one(drafting, max_tokens=30, ignore_eos=True, num_speculative_tokens=k).stats
        assert stats.num_speculative_tokens == k
        assert len(stats.acceptance_histogram) == k + 1
        assert (stats.num_plain_tokens == 30) == (k == 0)


def test_a_row_cannot_ask_for_more_drafts_than_the_run_has(drafting: Engine) -> None:
    row = make_row(0, PROMPT, num_speculative_tokens=4)
    (output,) = drafting.generate([row])
    assert output.error is not None
    assert output.error.code == "invalid_value"
    assert "at most the run's 3" in output.error.message
    assert "raise --num-speculative-tokens" in output.error.message


def test_rows_that_cannot_run_come_out_and_the_others_go_on(engine: Engine) -> None:
    rows = [
        make_row(0, ""),
        make_row(1, (5, 96)),
        make_row(2, PROMPT, max_tokens=3, ignore_eos=True),
        make_row(3, (5,) * 200),
    ]
    outputs = {output.row.index: output for output in engine.generate(rows)}
    codes = {i: None if o.error is None else o.error.code for i, o in outputs.items()}
    assert codes == {
        0: "empty_prompt",
        1: "token_id_out_of_range",
        2: None,
        3: "prompt_too_long",
    }

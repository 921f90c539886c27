"""The engine on a GPU: Triton's kernels and CUDA graphs under the proofs of tests/e2e."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.engines import TEXT_VOCAB, EngineShop
from e2e.harness import histogram_of, make_row, run_all, tokens_of
from e2e.laws import P_VALUE, chain_law, count_sequences, fit, sequence_law
from e2e.runs import PROMPT, SAMPLING, WIDTH, big_engine, chain_fits, chain_rows

from specgen.pipeline.engine import Engine
from specgen.pipeline.request import PromptRow

pytestmark = pytest.mark.gpu

NUM_TOKENS = 24
MIXED = [1 + (7 * i) % 40 for i in range(16)]  # prompt lengths, 1 to 40
DRAFTS = [("eagle1", "greedy"), ("eagle1", "gumbel"), ("eagle3", "greedy"), ("eagle3", "gumbel")]


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [
        tuple(torch.randint(4, TEXT_VOCAB, (length,), generator=generator).tolist())
        for length in MIXED
    ]


def rows(**sampling: Any) -> list[PromptRow]:
    return [
        make_row(i, prompt, max_tokens=NUM_TOKENS, **sampling) for i, prompt in enumerate(prompts())
    ]


def text_engine(engine_of: EngineShop, draft: str | None, sample: str, **config: Any) -> Engine:
    defaults = {"max_num_seqs": 16, "num_kv_blocks": 128}
    return engine_of("text", draft, draft_sample=sample, **{**defaults, **config})


SCHEDULES: dict[str, dict[str, Any]] = {
    "all": {},
    "three": {"max_num_seqs": 3},
    "eager": {"cuda_graphs": False},
    "chunked-crowded": {
        "max_num_batched_tokens": 17,
        "max_model_len": 80,
        "num_kv_blocks": 24,
        "block_size": 4,
    },
}


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> list[tuple[int, ...]]:
    """What transformers generates greedily on the CPU, one prompt at a time."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(checkpoints["text"], dtype=torch.float32).eval()
    out = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        out.append(tuple(whole[0, len(prompt) :].tolist()))
    return out


# -- equality -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draft", "sample"), [*DRAFTS, (None, "greedy")])
def test_greedy_tokens_equal_transformers(
    engine_of: EngineShop, expected: list[tuple[int, ...]], draft: str | None, sample: str
) -> None:
    engine = text_engine(engine_of, draft, sample)
    assert engine.describe()["kernel_backend"] == "triton"
    outputs = run_all(engine, rows(temperature=0.0))
    assert tokens_of(outputs) == expected
    assert engine._pipeline.graphs is not None
    assert engine._pipeline.graphs._graphs, "no decode step was captured"
    assert engine._pipeline.prefill_graphs is not None
    assert engine._pipeline.prefill_graphs._graphs, "no pass over prompt tokens was captured"
    assert tokens_of(run_all(engine, rows(temperature=0.0), preempt_seed=1)) == expected
    if draft is not None:
        accepted = sum(c.stats.num_accepted_draft_tokens for o in outputs for c in o.choices)
        assert accepted > 20


@pytest.mark.parametrize("schedule", ["three", "eager", "chunked-crowded"])
@pytest.mark.parametrize(("draft", "sample"), [("eagle1", "greedy"), ("eagle3", "gumbel")])
def test_a_schedule_changes_neither_tokens_nor_acceptance(
    engine_of: EngineShop,
    expected: list[tuple[int, ...]],
    draft: str,
    sample: str,
    schedule: str,
) -> None:
    """Graphs or none, batch, chunks and preemption: greedy and sampled tokens stay."""
    sampled: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "ignore_eos": True}
    reference = run_all(text_engine(engine_of, draft, sample), rows(**sampled))
    engine = text_engine(engine_of, draft, sample, **SCHEDULES[schedule])
    assert tokens_of(run_all(engine, rows(temperature=0.0))) == expected
    outputs = run_all(engine, rows(**sampled), preempt_seed=2)
    assert tokens_of(outputs) == tokens_of(reference)
    assert histogram_of(outputs) == histogram_of(reference)


@pytest.mark.parametrize(("draft", "sample"), DRAFTS)
def test_the_gpu_gives_the_tokens_of_the_cpu(
    engine_of: EngineShop, checkpoints: dict[str, Path], draft: str, sample: str
) -> None:
    """The noise is the same bit for bit; logits differ by rounding, which moves few tokens."""
    cpu = EngineShop(checkpoints, device="cpu", dtype="float32", kernel_backend="reference")
    sampled: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "ignore_eos": True}
    ours = tokens_of(run_all(text_engine(engine_of, draft, sample), rows(**sampled)))
    theirs = tokens_of(run_all(text_engine(cpu, draft, sample), rows(**sampled)))
    same = sum(mine == other for mine, other in zip(ours, theirs, strict=True))
    assert same >= len(ours) - 1


def test_rows_of_different_draft_lengths_share_a_graph(
    engine_of: EngineShop, expected: list[tuple[int, ...]]
) -> None:
    engine = text_engine(engine_of, "eagle3", "greedy")
    mixed = [
        make_row(i, p, temperature=0.0, max_tokens=NUM_TOKENS, num_speculative_tokens=i % 4)
        for i, p in enumerate(prompts())
    ]
    assert tokens_of(run_all(engine, mixed)) == expected


def test_a_wider_stop_list_replaces_the_graphs(engine_of: EngineShop) -> None:
    """More stop ids than a row holds widen a device tensor that captured graphs read."""
    engine = text_engine(engine_of, "eagle3", "greedy", max_num_seqs=8)
    options: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    whole = tokens_of(run_all(engine, rows(**options)))
    unused = [i for i in range(TEXT_VOCAB) if i not in whole[0]][:20]
    assert len(unused) == 20
    last = whole[0][-1]
    row = make_row(
        0, prompts()[0], max_tokens=NUM_TOKENS, stop_token_ids=[*unused, last], **options
    )
    (stopped,) = tokens_of(run_all(engine, [row]))
    assert stopped == whole[0][: whole[0].index(last) + 1]
    assert tokens_of(run_all(engine, rows(**options))) == whole


@pytest.mark.parametrize("schedule", ["all", "three", "eager", "chunked-crowded"])
@pytest.mark.parametrize(("draft", "sample"), [("eagle3", "gumbel"), (None, "greedy")])
def test_nothing_depends_on_how_late_records_are_read(
    engine_of: EngineShop, draft: str | None, sample: str, schedule: str
) -> None:
    """Late records on a device that is really elsewhere: buffers, graphs and slots are reused."""
    engine = text_engine(engine_of, draft, sample, **SCHEDULES[schedule])
    mixed = [
        make_row(i, p, max_tokens=3 + 5 * (i % 6), n=1 + i % 2, seed=i, ignore_eos=True)
        for i, p in enumerate(prompts())
    ]
    mixed += [
        make_row(16 + i, p, max_tokens=NUM_TOKENS, seed=i, stop=[*"ADetv7"])
        for i, p in enumerate(prompts())
    ]
    assert engine._in_flight.max_lag == 1
    results = []
    try:
        for lag, preempt_seed in ((0, None), (1, None), (2, None), (1, 4)):
            engine._in_flight.max_lag = lag
            outputs = run_all(engine, mixed, preempt_seed=preempt_seed)
            texts = [choice.text for output in outputs for choice in output.choices]
            results.append((tokens_of(outputs), histogram_of(outputs), texts))
    finally:
        engine._in_flight.max_lag = 1
    assert all(result == results[0] for result in results[1:])


# -- distribution ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "sample", "num_rows"), [("eagle3", "gumbel", 16_384), ("eagle1", "greedy", 16_384)]
)
def test_tokens_follow_the_target_jointly_and_at_every_place_of_a_step(
    engine_of: EngineShop, checkpoints: dict[str, Path], draft: str, sample: str, num_rows: int
) -> None:
    """As on the CPU: mixed k in one batch, everything preempted at random."""
    engine = big_engine(engine_of, "chain", draft, sample)
    law = chain_law(checkpoints["chain"], **SAMPLING)
    fits = chain_fits(engine, chain_rows(num_rows), law)
    assert set(fits) == {"joint", "first", "plain", "judged 0", "judged 1", "bonus"}
    for place, result in fits.items():
        assert result.p_value > P_VALUE, (place, result)
        if place != "first":
            assert result.detectable_tv < 0.02, (place, result)


@pytest.mark.parametrize(("draft", "sample"), [("eagle1", "gumbel"), ("eagle3", "greedy")])
def test_filtered_rows_follow_the_filtered_target(
    engine_of: EngineShop, checkpoints: dict[str, Path], draft: str, sample: str
) -> None:
    engine = big_engine(engine_of, "chain", draft, sample)
    sampling: dict[str, Any] = {"temperature": 0.7, "top_k": 4, "top_p": 0.9}
    law = chain_law(checkpoints["chain"], **sampling)
    for place, result in chain_fits(engine, chain_rows(3072, **sampling), law).items():
        assert result.p_value > P_VALUE, (place, result)


def test_the_joint_law_of_a_completion_is_exact_in_its_whole_context(
    engine_of: EngineShop, checkpoints: dict[str, Path]
) -> None:
    """First token, then k + 1 of a step or more: all 5^4 continuations of one prompt."""
    engine = big_engine(engine_of, "few", "eagle3", "gumbel")
    law = sequence_law(checkpoints["few"], PROMPT, WIDTH, temperature=0.8)
    batch = [
        make_row(i, PROMPT, n=64, max_tokens=WIDTH, ignore_eos=True, temperature=0.8)
        for i in range(1200)
    ]
    completions = tokens_of(run_all(engine, batch, preempt_seed=0))
    counts = count_sequences(completions, law.shape[0]).reshape(-1)
    result = fit(counts, counts.sum() * law.reshape(-1))
    assert result.p_value > P_VALUE, result
    assert result.detectable_tv < 0.03, result


# -- the host -------------------------------------------------------------------------------------


@contextmanager
def no_waiting(engine: Engine) -> Iterator[list[str]]:
    """Torch raises where a step makes the host wait; yields the names of the guarded calls."""
    owners: dict[str, Any] = {
        **dict.fromkeys(("prefill", "decode"), engine._runner),
        **dict.fromkeys(("admit", "write_block_tables", "deactivate"), engine._state),
        "push": engine._in_flight,
    }
    calls: list[str] = []

    def wrap(name: str) -> Callable[..., Any]:
        original = getattr(owners[name], name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return original(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, owner in owners.items():
            patch.setattr(owner, name, wrap(name))
        yield calls


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize(("draft", "sample"), [*DRAFTS, (None, "greedy")])
def test_a_step_does_not_wait_for_the_gpu(
    engine_of: EngineShop, draft: str | None, sample: str, cuda_graphs: bool
) -> None:
    engine = text_engine(engine_of, draft, sample, cuda_graphs=cuda_graphs)
    mixed = [
        make_row(i, p, max_tokens=8, temperature=0.5 * (i % 3), top_k=20 * (i % 2))
        for i, p in enumerate(prompts())
    ]
    warm = tokens_of(run_all(engine, mixed, preempt_seed=0))  # compiles, which may wait
    with no_waiting(engine) as calls:
        assert tokens_of(run_all(engine, mixed, preempt_seed=0)) == warm
    assert {"prefill", "decode", "admit", "write_block_tables", "deactivate", "push"} <= set(calls)


def test_a_planted_wait_is_noticed(engine_of: EngineShop, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of.build("text", "eagle1", cuda_graphs=False, max_num_seqs=4, num_kv_blocks=64)
    run_all(engine, rows(temperature=0.0)[:4])
    sampler = engine._runner._rejection_sampler
    original = sampler.verify

    def planted(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        logits.sum().item()
        return original(logits, *args, **kwargs)

    monkeypatch.setattr(sampler, "verify", planted)
    try:
        with no_waiting(engine), pytest.raises(RuntimeError, match="synchroniz"):
            run_all(engine, rows(temperature=0.0)[:4])
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- broken logits --------------------------------------------------------------------------------


def test_bad_target_logits_end_one_row_with_an_error(
    engine_of: EngineShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = text_engine(engine_of, "eagle3", "gumbel", cuda_graphs=False)
    options: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}
    good = tokens_of(run_all(engine, rows(**options)))
    target = engine._pipeline.target
    original = target.compute_logits
    calls = 0

    def spoiled(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        logits = original(hidden).clone()
        if calls == 3:
            logits[5 * 4] = float("nan")  # the first row of the sixth request, always judged
        calls += 1
        return logits

    monkeypatch.setattr(target, "compute_logits", spoiled)
    outputs = run_all(engine, rows(**options))
    bad = outputs.pop(5)
    assert bad.error is not None
    assert bad.error.code == "bad_logits"
    del good[5]
    assert tokens_of(outputs) == good

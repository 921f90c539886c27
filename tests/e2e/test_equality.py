"""Tokens that must be equal: to transformers, with and without a draft, under any schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.engines import TEXT_VOCAB, EngineShop
from e2e.harness import device_rows, histogram_of, make_row, run_all, step_log, tokens_of
from models.straight_line import Eagle1, Eagle3, draft_tokens
from models.tiny import load_state

from specgen.models.config import ConfigReader
from specgen.pipeline.engine import Engine
from specgen.pipeline.request import PromptRow, RequestOutput

NUM_TOKENS = 20
NUM_ROWS = 16
MIXED = [1 + (7 * i) % 40 for i in range(NUM_ROWS)]  # prompt lengths, 1 to 40


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [
        tuple(torch.randint(4, TEXT_VOCAB, (length,), generator=generator).tolist())
        for length in MIXED
    ]


def rows(**sampling: Any) -> list[PromptRow]:
    return [
        make_row(i, prompt, max_tokens=NUM_TOKENS, **{"temperature": 0.0, **sampling})
        for i, prompt in enumerate(prompts())
    ]


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> list[tuple[int, ...]]:
    """What transformers generates greedily, one prompt at a time."""
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


def speculated(outputs: Sequence[RequestOutput]) -> tuple[int, int]:
    """(drafts accepted, drafts rejected) over all rows."""
    parts = [choice.stats for output in outputs for choice in output.choices]
    accepted = sum(part.num_accepted_draft_tokens for part in parts)
    return accepted, sum(part.num_draft_tokens for part in parts) - accepted


#: What else may differ between two runs of the same rows without changing a token.
SCHEDULES: dict[str, dict[str, Any]] = {
    "one-by-one": {"max_num_seqs": 1},
    "three": {"max_num_seqs": 3},
    "all": {"max_num_seqs": 16},
    "chunked": {"max_num_seqs": 5, "max_num_batched_tokens": 13},
    "crowded": {"max_num_seqs": 8, "max_model_len": 80, "num_kv_blocks": 21, "block_size": 4},
    "chunked-crowded": {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 17,
        "max_model_len": 80,
        "num_kv_blocks": 24,
        "block_size": 4,
    },
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("draft", "draft_sample"),
    [("eagle1", "greedy"), ("eagle3", "greedy"), ("eagle3", "gumbel"), (None, "greedy")],
)
def test_greedy_tokens_equal_transformers(
    engine_of: EngineShop,
    expected: list[tuple[int, ...]],
    draft: str | None,
    draft_sample: str,
    schedule: str,
) -> None:
    engine = engine_of("text", draft, draft_sample=draft_sample, **SCHEDULES[schedule])
    outputs = run_all(engine, rows())
    assert tokens_of(outputs) == expected
    if draft is not None:
        assert min(speculated(outputs)) > 20, "drafts must be accepted and rejected both"


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("draft", ["eagle1", "eagle3"])
def test_any_draft_length_gives_the_same_greedy_tokens(
    engine_of: EngineShop, expected: list[tuple[int, ...]], draft: str, k: int
) -> None:
    engine = engine_of("text", draft, num_speculative_tokens=k, max_num_seqs=6)
    assert tokens_of(run_all(engine, rows())) == expected
    assert tokens_of(run_all(engine, rows(), preempt_seed=k)) == expected


@pytest.mark.parametrize("draft", ["eagle1", "eagle3"])
def test_rows_of_different_draft_lengths_share_a_batch(
    engine_of: EngineShop, expected: list[tuple[int, ...]], draft: str
) -> None:
    engine = engine_of("text", draft, num_speculative_tokens=3, max_num_seqs=16)
    mixed = [
        make_row(i, p, temperature=0.0, max_tokens=NUM_TOKENS, num_speculative_tokens=i % 4)
        for i, p in enumerate(prompts())
    ]
    outputs = run_all(engine, mixed, preempt_seed=5)
    assert tokens_of(outputs) == expected
    for output in outputs:
        stats = output.choices[0].stats
        assert stats.num_speculative_tokens == output.row.index % 4
        assert bool(stats.num_spec_steps) == bool(output.row.index % 4)


@pytest.mark.parametrize(("draft", "sample"), [("eagle1", "gumbel"), ("eagle3", "greedy")])
def test_greedy_rows_among_sampled_ones(
    engine_of: EngineShop, expected: list[tuple[int, ...]], draft: str, sample: str
) -> None:
    engine = engine_of("text", draft, draft_sample=sample, max_num_seqs=16)
    temperatures = [0.0, 1.0, 1e-6, 0.7]
    mixed = [
        make_row(i, p, temperature=temperatures[i % 4], top_p=0.9, max_tokens=NUM_TOKENS)
        for i, p in enumerate(prompts())
    ]
    tokens = tokens_of(run_all(engine, mixed))
    assert tokens[::2] == expected[::2]
    assert tokens[1::2] != expected[1::2]


# -- sampled tokens -------------------------------------------------------------------------------

SAMPLED = {"temperature": 1.0, "top_p": 0.95, "ignore_eos": True}
PAIRS = [("eagle1", "gumbel"), ("eagle3", "greedy"), ("eagle3", "gumbel"), (None, "greedy")]


@pytest.fixture(scope="module")
def sampled(engine_of: EngineShop) -> dict[tuple[str | None, str], list[RequestOutput]]:
    """Runs at temperature 1, one row after the other, in one piece each."""
    return {
        (draft, sample): run_all(
            engine_of("text", draft, draft_sample=sample, max_num_seqs=1), rows(**SAMPLED)
        )
        for draft, sample in PAIRS
    }


@pytest.mark.parametrize(
    ("schedule", "preempt_seed"),
    [("three", None), ("all", 3), ("chunked", None), ("chunked", 4), ("chunked-crowded", 5)],
)
@pytest.mark.parametrize(("draft", "draft_sample"), PAIRS)
def test_a_schedule_changes_neither_sampled_tokens_nor_acceptance(
    engine_of: EngineShop,
    sampled: dict[tuple[str | None, str], list[RequestOutput]],
    draft: str | None,
    draft_sample: str,
    schedule: str,
    preempt_seed: int | None,
) -> None:
    """Equal histograms row by row: a draft that lost its cache somewhere would accept less."""
    engine = engine_of("text", draft, draft_sample=draft_sample, **SCHEDULES[schedule])
    outputs = run_all(engine, rows(**SAMPLED), preempt_seed=preempt_seed)
    alone = sampled[draft, draft_sample]
    assert tokens_of(outputs) == tokens_of(alone)
    assert histogram_of(outputs) == histogram_of(alone)


def test_a_crowded_cache_does_preempt(
    engine_of: EngineShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crowded schedules above are what they claim to be."""
    engine = engine_of("text", "eagle3", draft_sample="greedy", **SCHEDULES["chunked-crowded"])
    preempted = []
    original = engine._scheduler._preempt
    monkeypatch.setattr(
        engine._scheduler, "_preempt", lambda r: (preempted.append(r), original(r))[1]
    )
    run_all(engine, rows())
    assert len(preempted) > 2


def test_more_rows_than_slots_and_generate_pull_lazily(
    engine_of: EngineShop, expected: list[tuple[int, ...]]
) -> None:
    engine = engine_of("text", "eagle3", draft_sample="greedy", max_num_seqs=3)
    pulled = []

    def source() -> Any:
        for row in rows():
            pulled.append(row.index)
            yield row

    outputs = []
    for output in engine.generate(source()):
        if not outputs:
            assert len(pulled) < NUM_ROWS, "all rows were read before the first was done"
        outputs.append(output)
    outputs.sort(key=lambda output: output.row.index)
    assert tokens_of(outputs) == expected


# -- the drafts themselves ------------------------------------------------------------------------


def reference_head(checkpoints: dict[str, Path], draft: str) -> tuple[Any, Any]:
    from transformers import LlamaForCausalLM

    config = dict(ConfigReader.from_directory(checkpoints[f"text-{draft}"]).data)
    theta = (config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
    make = Eagle1 if draft == "eagle1" else Eagle3
    head = make(
        load_state(checkpoints[f"text-{draft}"]), config, load_state(checkpoints["text"]), theta
    )
    return head, LlamaForCausalLM.from_pretrained(checkpoints["text"], dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("schedule", "preempt_seed"), [("all", None), ("chunked", 1), ("chunked-crowded", 2)]
)
@pytest.mark.parametrize("draft", ["eagle1", "eagle3"])
def test_every_draft_is_the_one_that_the_head_proposes(
    engine_of: EngineShop,
    checkpoints: dict[str, Path],
    draft: str,
    schedule: str,
    preempt_seed: int | None,
) -> None:
    """All k drafts of all steps against the head written down straight, over the true features."""
    k = 3
    engine = engine_of("text", draft, draft_sample="greedy", **SCHEDULES[schedule])
    head, model = reference_head(checkpoints, draft)
    proposals: list[tuple[int, int, list[int]]] = []  # row, committed tokens, drafts
    decode = engine._runner.decode

    def spy(requests: Any, *args: Any) -> torch.Tensor:
        for request, slot, n in device_rows(engine, requests):
            proposals.append((request.row.index, n, engine._state.draft_tokens[slot].tolist()))
        return decode(requests, *args)

    engine._runner.decode = spy  # type: ignore[method-assign]
    try:
        outputs = run_all(engine, rows(ignore_eos=True), preempt_seed=preempt_seed)
    finally:
        del engine._runner.decode  # type: ignore[method-assign]
    wholes = [
        torch.tensor([*output.prompt_token_ids, *output.choices[0].token_ids]) for output in outputs
    ]
    features = []
    with torch.no_grad():
        for whole in wholes:
            states = model(whole[None], output_hidden_states=True).hidden_states
            # EAGLE-3: streams entering blocks 0, 1 and 2 of three; EAGLE-1: behind the final norm.
            used = states[-1:] if draft == "eagle1" else states[:3]
            features.append(torch.cat(used, dim=-1)[0])
        checked = set()
        for row, n, drafts in proposals:
            if row % 3 or (row, n) in checked:  # every third row is plenty
                continue
            checked.add((row, n))
            wanted, _ = draft_tokens(head, wholes[row][:n], features[row][: n - 1], k)
            assert drafts == wanted, f"row {row} after {n} tokens"
    assert len(checked) > 40


def test_the_spy_sees_every_step(engine_of: EngineShop) -> None:
    """The log that other proofs rest on accounts for every token."""
    engine: Engine = engine_of("text", "eagle3", draft_sample="greedy", max_num_seqs=16)
    with step_log(engine) as log:
        outputs = run_all(engine, rows())
    logged = sum(len(step.record.token_ids) for step in log)
    assert logged == sum(map(len, tokens_of(outputs)))

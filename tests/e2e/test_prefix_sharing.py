"""Shared beginnings of prompts change neither tokens nor drafts, under any schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from e2e.engines import TEXT_VOCAB, EngineShop
from e2e.harness import histogram_of, make_row, run_all, tokens_of

from specgen.pipeline.engine import Engine
from specgen.pipeline.request import PromptRow

BLOCK = 4
NUM_TOKENS = 10
SCHEDULES: dict[str, dict[str, Any]] = {
    "all at once": {"max_num_seqs": 24},
    "a few at a time": {"max_num_seqs": 3},
    "chunked": {"max_num_seqs": 6, "max_num_batched_tokens": 11},
    "crowded": {"max_num_seqs": 8, "num_kv_blocks": 26, "max_model_len": 80},
}


def family_of_prompts() -> list[tuple[int, ...]]:
    """Prompts over one beginning, that part inside blocks, at their ends and just after them."""
    generator = torch.Generator().manual_seed(7)
    common = torch.randint(4, TEXT_VOCAB, (22,), generator=generator).tolist()
    prompts = [
        (*common[:length], *torch.randint(4, TEXT_VOCAB, (extra,), generator=generator).tolist())
        for length in (22, 21, 20, 19, 17, 16, 9, 22, 22)
        for extra in (0, 1, 6)
    ]
    return [tuple(prompt) for prompt in prompts]


def rows(num_samples: int = 1) -> list[PromptRow]:
    return [
        make_row(i, prompt, temperature=(i % 3) / 2, max_tokens=NUM_TOKENS, n=num_samples)
        for i, prompt in enumerate(family_of_prompts())
    ]


@pytest.fixture(scope="module")
def engine(engine_of: EngineShop) -> Callable[..., Engine]:
    def build(draft: str | None, sample: str, **config: Any) -> Engine:
        return engine_of("text", draft, draft_sample=sample, block_size=BLOCK, **config)

    return build


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("draft", "sample"), [("eagle1", "gumbel"), ("eagle3", "greedy"), (None, "greedy")]
)
def test_sharing_changes_no_token_and_no_draft(
    engine: Callable[..., Engine], draft: str | None, sample: str, schedule: str
) -> None:
    alone = run_all(engine(draft, sample, prefix_caching=False, max_num_seqs=1), rows())
    shared_engine = engine(draft, sample, **SCHEDULES[schedule])
    before = shared_engine.num_prompt_tokens_shared
    shared = run_all(shared_engine, rows())
    assert tokens_of(shared) == tokens_of(alone)
    assert histogram_of(shared) == histogram_of(alone)
    num_prompt_tokens = sum(len(prompt) for prompt in family_of_prompts())
    assert shared_engine.num_prompt_tokens_shared - before > num_prompt_tokens // 3


def prefilled_caches(engine: Engine, prompts: list[tuple[int, ...]]) -> list[list[torch.Tensor]]:
    """Target and draft cache entries of each prompt's tokens, right after all prefills."""
    for i, prompt in enumerate(prompts):
        engine.add_request(make_row(i, prompt, temperature=0.0, max_tokens=NUM_TOKENS))
    while engine.num_waiting or engine._scheduler.prefilling:
        engine.step()
    caches = engine._pipeline.caches
    entries = []
    for request in sorted(engine._scheduler.running, key=lambda r: r.row.index):
        blocks = torch.tensor(request.block_ids)
        length = len(request.prompt_token_ids)
        layers = [half for layer in (*caches.target, *caches.draft) for half in layer]
        entries.append([half[blocks].flatten(0, 1)[:length] for half in layers])
    while engine.has_unfinished():
        engine.step()
    return entries


@pytest.mark.parametrize("draft", ["eagle1", "eagle3"])
def test_shared_entries_are_those_that_a_row_would_compute(
    engine: Callable[..., Engine], draft: str
) -> None:
    prompts = family_of_prompts()
    alone = prefilled_caches(
        engine(draft, "greedy", prefix_caching=False, max_num_seqs=30), prompts
    )
    shared = prefilled_caches(engine(draft, "greedy", max_num_seqs=30), prompts)
    assert len(shared) == len(alone) == len(prompts)
    for mine, theirs in zip(shared, alone, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_sharing_survives_preemption(engine: Callable[..., Engine]) -> None:
    alone = run_all(engine("eagle3", "gumbel", prefix_caching=False, max_num_seqs=1), rows())
    shared = run_all(engine("eagle3", "gumbel", max_num_seqs=9), rows(), preempt_seed=2)
    assert tokens_of(shared) == tokens_of(alone)
    assert histogram_of(shared) == histogram_of(alone)


def test_samples_of_a_row_share_their_prompt(engine: Callable[..., Engine]) -> None:
    many = engine("eagle3", "gumbel", max_num_seqs=24)
    before = many.num_prompt_tokens_shared
    outputs = run_all(many, [make_row(0, tuple(range(4, 37)), temperature=1.0, max_tokens=6, n=8)])
    # 33 tokens are eight blocks and the last token; seven samples find them computed.
    assert many.num_prompt_tokens_shared - before == 7 * 32
    assert len({choice.token_ids for choice in outputs[0].choices}) > 1


def test_the_flag_switches_sharing_off(engine: Callable[..., Engine]) -> None:
    single = engine("eagle3", "greedy", prefix_caching=False, max_num_seqs=8)
    run_all(single, rows())
    assert single.num_prompt_tokens_shared == 0

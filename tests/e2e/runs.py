"""Runs of the tiny targets at full width, and what is tested of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from e2e.engines import EngineShop
from e2e.harness import LoggedStep, make_row, run_all, step_log, tokens_of
from e2e.laws import Fit, next_token_fit, window_fit

from specgen.pipeline.engine import Engine
from specgen.pipeline.request import PromptRow

K = 2
WIDTH = K + 2
PROMPT = (4, 3, 2)
NUM_TOKENS = 8 * WIDTH
SAMPLING = {"temperature": 0.8}

Pair = tuple[int, int]


def big_engine(
    engine_of: EngineShop,
    model: str,
    draft: str | None,
    draft_sample: str,
    num_speculative_tokens: int | str = K,
) -> Engine:
    return engine_of(
        model,
        draft,
        draft_sample=draft_sample,
        num_speculative_tokens=num_speculative_tokens,
        max_model_len=len(PROMPT) + NUM_TOKENS,
        max_num_seqs=1024,
        max_num_batched_tokens=16384,
        num_kv_blocks=1024 * 3,  # 16 tokens each
    )


def by_place(log: Sequence[LoggedStep]) -> dict[str, list[Pair]]:
    """(token before, token) by the place in its step that a token was emitted at.

    Whether a step reaches a place depends on its earlier tokens only, so at each of them tokens
    must follow the target given the token before.
    """
    places: dict[str, list[Pair]] = defaultdict(list)
    for step in log:
        tokens = [*PROMPT, *step.request.output_token_ids]
        start = len(PROMPT) + step.start
        d = step.record.num_draft_tokens
        for i in range(len(step.record.token_ids)):
            if d == 0:
                place = "plain" if step.start else "first"
            else:
                place = "bonus" if i == d else f"judged {i}"
            places[place].append((tokens[start + i - 1], tokens[start + i]))
    return places


def chain_rows(num_rows: int, **sampling: Any) -> list[PromptRow]:
    """Rows of eight windows each; k = 0, 1 and 2 in turn unless it is given."""
    return [
        make_row(
            i,
            PROMPT,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            **{"num_speculative_tokens": (2, 1, 2, 0, 2)[i % 5], **SAMPLING, **sampling},
        )
        for i in range(num_rows)
    ]


def chain_fits(engine: Engine, rows: Sequence[PromptRow], law: np.ndarray) -> dict[str, Fit]:
    """Run rows of the chain; test the joint law and the law at every place of a step."""
    completions = []
    places: dict[str, list[Pair]] = defaultdict(list)
    for at in range(0, len(rows), 1024):  # in portions, so that preemption strikes all phases
        with step_log(engine) as log:
            outputs = run_all(engine, rows[at : at + 1024], preempt_seed=at)
        completions += tokens_of(outputs)
        for place, pairs in by_place(log).items():
            places[place] += pairs
    fits = {place: next_token_fit(pairs, law) for place, pairs in places.items()}
    return {"joint": window_fit(completions, PROMPT, law, WIDTH), **fits}

"""k changes from step to step under CUDA graphs: tokens, the draft's cache and the law stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.engines import EngineShop
from e2e.harness import run_all, tokens_of
from e2e.laws import P_VALUE, chain_law
from e2e.lengths import LongPauses, RandomLength, changing, entry_log
from e2e.runs import SAMPLING, big_engine, chain_fits, chain_rows
from e2e.test_equality import rows

pytestmark = pytest.mark.gpu

# Only a run whose length is chosen has steps without drafts, and keeps their pairs.
AUTO: dict[str, Any] = {
    "num_speculative_tokens": "auto:3",
    "max_num_seqs": 16,
    "num_kv_blocks": 128,
}
CROWDED = {
    "max_num_batched_tokens": 17,
    "max_model_len": 80,
    "num_kv_blocks": 24,
    "block_size": 4,
}


@pytest.mark.parametrize("policy", [RandomLength, LongPauses])
@pytest.mark.parametrize("schedule", [{}, {"max_num_seqs": 3}, CROWDED])
@pytest.mark.parametrize("draft", ["eagle1", "eagle3"])
def test_tokens_and_the_drafts_cache_do_not_depend_on_k(
    engine_of: EngineShop,
    draft: str,
    schedule: dict[str, Any],
    policy: type[RandomLength],
) -> None:
    alone = engine_of("text", draft, max_num_seqs=1, num_kv_blocks=128)
    with entry_log(alone) as true:
        expected = tokens_of(run_all(alone, rows(ignore_eos=True)))
    engine = engine_of("text", draft, **{**AUTO, **schedule})
    for seed in range(2):
        changing(engine, policy(seed))
        with entry_log(engine, true) as checked:
            outputs = run_all(engine, rows(ignore_eos=True), preempt_seed=seed or None)
        assert tokens_of(outputs) == expected
        assert len(checked.keys() & true.keys()) > 100
    assert engine._pipeline.num_graphs > 3


@pytest.mark.parametrize(("draft", "sample"), [("eagle3", "gumbel"), ("eagle1", "greedy")])
def test_the_law_holds_while_k_changes(
    engine_of: EngineShop, checkpoints: dict[str, Path], draft: str, sample: Any
) -> None:
    engine = big_engine(engine_of, "chain", draft, sample, num_speculative_tokens="auto:2")
    changing(engine, RandomLength(3, 2))
    law = chain_law(checkpoints["chain"], **SAMPLING)
    fits = chain_fits(engine, chain_rows(8192), law)
    assert set(fits) == {"joint", "first", "plain", "judged 0", "judged 1", "bonus"}
    for place, result in fits.items():
        assert result.p_value > P_VALUE, (place, result)

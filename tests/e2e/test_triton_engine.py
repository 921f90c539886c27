"""The engine on Triton's kernels, in the interpreter: the tokens of the torch twins."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from e2e.engines import EngineShop
from e2e.harness import histogram_of, make_row, run_all, tokens_of

from specgen.pipeline.draft_length import FixedDraftLength

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton's interpreter runs without a GPU"
)


@pytest.mark.parametrize(("draft", "sample"), [("eagle3", "gumbel"), ("eagle1", "greedy")])
def test_triton_and_torch_give_the_same_tokens(
    engine_of: EngineShop, draft: str, sample: str
) -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.9},
        {"temperature": 0.8, "top_k": 3, "top_p": 0.9},
        {"temperature": 0.0},
    ]
    rows = [
        make_row(i, (4, 3, 2, 4, 3, 2)[: 2 * i + 1], max_tokens=6, ignore_eos=True, **sampling)
        for i, sampling in enumerate(settings)
    ]
    common = {"num_speculative_tokens": 2, "draft_sample": sample, "max_num_seqs": 3}
    common |= {"max_num_batched_tokens": 5, "max_model_len": 16}
    outputs = {
        backend: run_all(
            engine_of("few", draft, kernel_backend=backend, **common), rows, preempt_seed=1
        )
        for backend in ("triton", "reference")
    }
    assert tokens_of(outputs["triton"]) == tokens_of(outputs["reference"])
    assert histogram_of(outputs["triton"]) == histogram_of(outputs["reference"])


def test_triton_and_torch_agree_while_k_changes(engine_of: EngineShop) -> None:
    """Steps without drafts between others: pairs that are kept before the head's cache has them."""
    pattern = (2, 0, 0, 2, 1, 2)

    class Pattern(FixedDraftLength):
        def choose(self, num_rows: int, limit: int) -> int:
            del num_rows, limit
            return next(self.lengths)

        def __init__(self) -> None:
            self.lengths = itertools.cycle(pattern)

    rows = [
        make_row(i, (4, 3, 2), max_tokens=9, ignore_eos=True, temperature=0.9) for i in range(2)
    ]
    outputs = {}
    for backend in ("triton", "reference"):
        engine = engine_of.build(
            "few",
            "eagle3",
            kernel_backend=backend,
            num_speculative_tokens="auto:2",
            draft_sample="gumbel",
            max_num_seqs=2,
            max_model_len=16,
        )
        engine._scheduler.draft_length = Pattern()
        outputs[backend] = run_all(engine, rows)
    assert tokens_of(outputs["triton"]) == tokens_of(outputs["reference"])
    assert histogram_of(outputs["triton"]) == histogram_of(outputs["reference"])
    assert all(o.choices[0].stats.num_spec_steps for o in outputs["triton"])

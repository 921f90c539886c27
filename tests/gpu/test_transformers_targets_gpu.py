"""Targets that run through transformers, on a GPU: the Triton attention under their forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.engines import PLAIN_HEAD, TEXT, TEXT_VOCAB
from e2e.harness import make_row, run_all, tokens_of
from models.tiny import make_eagle1, make_target

from specgen.config import EngineConfig
from specgen.pipeline.engine import Engine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("family", "options"),
    [("gemma2", {"sliding_window": 9, "attn_logit_softcapping": 2.0}), ("phi3", {})],
)
def test_greedy_tokens_equal_those_of_the_cpu(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    path = make_target(tmp_path / "target", family, with_tokenizer=True, **TEXT, **options)
    head = make_eagle1(tmp_path / "head", path, **PLAIN_HEAD)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i, length in enumerate((3, 9, 40)):
        prompt = torch.randint(4, TEXT_VOCAB, (length,), generator=generator).tolist()
        rows.append(make_row(i, prompt, temperature=0.0, max_tokens=12, ignore_eos=True))
    tokens = []
    for device in ("cpu", "cuda"):
        engine = Engine(
            EngineConfig(
                model=str(path),
                draft_model=str(head),
                device=device,
                dtype="float32",
                max_model_len=80,
                max_num_seqs=4,
            )
        )
        assert not engine.describe()["cuda_graphs"]
        tokens.append(tokens_of(run_all(engine, rows)))
    assert tokens[0] == tokens[1]
    assert len({token for row in tokens[0] for token in row}) >= 4

"""Acceptance of the first draft against its closed forms, p and q from independent forwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from e2e.engines import EngineShop
from e2e.harness import make_row, run_all, step_log
from e2e.laws import P_VALUE, filtered, fit, target_logits
from models.straight_line import Eagle1, Eagle3, draft_tokens
from models.tiny import load_state
from scipy import stats

from specgen.models.config import ConfigReader

PROMPT = (4, 3, 2, 4)
TEMPERATURE = 0.9
NUM_ROWS = 30_720
VOCAB_SIZE = 5


def first_draft_law(
    checkpoints: dict[str, Path], draft: str, committed: tuple[int, ...]
) -> np.ndarray:
    """Logits [V] of the first draft after ``committed``; -inf outside the draft vocabulary."""
    from transformers import LlamaForCausalLM

    path = checkpoints[f"few-{draft}"]
    config = dict(ConfigReader.from_directory(path).data)
    theta = (config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
    head: Any = (Eagle1 if draft == "eagle1" else Eagle3)(
        load_state(path), config, load_state(checkpoints["few"]), theta
    )
    model = LlamaForCausalLM.from_pretrained(checkpoints["few"], dtype=torch.float32).eval()
    tokens = torch.tensor(committed)
    with torch.no_grad():
        states = model(tokens[None, :-1], output_hidden_states=True).hidden_states
        used = states[-1:] if draft == "eagle1" else states[:3]
        _, logits = draft_tokens(head, tokens, torch.cat(used, dim=-1)[0], 1)
    out = np.full(VOCAB_SIZE, -np.inf)
    for draft_id, value in enumerate(logits[0].tolist()):
        out[head.target_id(draft_id)] = value
    return out


def holds(counts: np.ndarray, law: np.ndarray) -> bool:
    """Whether counts fit a law, which may leave no choice."""
    if law.max() > 1 - 1e-6:
        return counts[law.argmax()] == counts.sum()
    return fit(counts, counts.sum() * law).p_value > P_VALUE


@pytest.mark.parametrize("sample", ["greedy", "gumbel"])
@pytest.mark.parametrize("draft", ["eagle1", "eagle3"])
def test_first_position_acceptance_and_what_comes_of_it(
    engine_of: EngineShop, checkpoints: dict[str, Path], draft: str, sample: str
) -> None:
    """Rate, and the laws of accepted and of recovered tokens, given the first token."""
    engine = engine_of(
        "few",
        draft,
        draft_sample=sample,
        num_speculative_tokens=1,
        max_model_len=16,
        max_num_seqs=1024,
        max_num_batched_tokens=16384,
        num_kv_blocks=2048,
    )
    rows = [
        make_row(i, PROMPT, n=64, temperature=TEMPERATURE, max_tokens=3, ignore_eos=True)
        for i in range(NUM_ROWS // 64)
    ]
    with step_log(engine) as log:
        run_all(engine, rows)
    # The one step with a draft behind the first token: accepted or not, and the token.
    accepted = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    recovered = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    for step in log:
        if step.start == 1:
            first, second = step.request.output_token_ids[:2]
            (accepted if step.record.num_sampled == 2 else recovered)[first, second] += 1
    assert accepted.sum() + recovered.sum() == NUM_ROWS
    rates = []
    for first in range(VOCAB_SIZE):
        logits = target_logits(checkpoints["few"], [[*PROMPT, first]])
        p = filtered(logits, TEMPERATURE)[0]
        z = first_draft_law(checkpoints, draft, (*PROMPT, first))
        q = filtered(z[None], TEMPERATURE)[0] if sample == "gumbel" else np.eye(5)[z.argmax()]
        kept = np.minimum(p, q) if sample == "gumbel" else p * q
        rate = kept.sum()  # 1 - TV(p, q), or p(argmax q)
        residual = np.maximum(p - q, 0) if sample == "gumbel" else p * (1 - q)
        count, total = accepted[first].sum(), accepted[first].sum() + recovered[first].sum()
        p_value = stats.binomtest(int(count), int(total), rate).pvalue
        assert p_value > P_VALUE, f"after {first}: accepted {count / total:.4f}, law {rate:.4f}"
        rates.append(rate)
        if sample == "gumbel":
            assert holds(accepted[first], kept / rate)
        else:
            assert accepted[first, z.argmax()] == count
        assert holds(recovered[first], residual / residual.sum())
    assert 0.01 < min(rates) < min(rates) + 0.05 < max(rates) < 0.95, "rates that tell nothing"

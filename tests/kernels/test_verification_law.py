"""Emitted tokens obey the target's law at every position kind, and jointly.

The loop of :mod:`sampling_law` runs here through the torch twins; ``tests/gpu`` runs it through
Triton. The last tests plant faults and show that these tests see them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
from sampling_law import (
    ACCEPTED,
    BONUS,
    FIRST,
    KIND_NAMES,
    RECOVERED,
    decode,
    joint_p_value,
    kind_p_value,
    lengths_from_discarded_drafts,
    make_toy,
)

from specgen.kernels.reference import gumbel, logits, rejection
from specgen.kernels.streams import TARGET

NUM_ROWS = 200_000
SMALLEST_P = 1e-4
SAMPLINGS = [
    pytest.param({}, id="plain"),
    pytest.param({"temperature": 0.6}, id="cold"),
    pytest.param({"temperature": 1.4, "top_k": 3}, id="top-k"),
    pytest.param({"top_p": 0.8}, id="top-p"),
    pytest.param({"temperature": 0.8, "top_k": 3, "top_p": 0.9}, id="both"),
]


@dataclass(frozen=True)
class Twins:
    gumbel: ModuleType = gumbel
    logits: ModuleType = logits
    rejection: ModuleType = rejection


@pytest.mark.parametrize("draft_sample", ["greedy", "gumbel"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_tokens_follow_the_target(draft_sample: str, sampling: dict[str, float]) -> None:
    k = 2
    toy = make_toy(4, **sampling)
    emitted = decode(
        Twins(),
        toy,
        draft_sample=draft_sample,
        num_rows=NUM_ROWS,
        num_tokens=k + 2,
        k=k,
        lengths=lengths_from_discarded_drafts(k),
    )
    assert joint_p_value(emitted.tokens, toy) > SMALLEST_P
    for kind in (FIRST, ACCEPTED, RECOVERED, BONUS):
        p_value, num = kind_p_value(emitted, toy, kind, draft_sample)
        assert num > 10_000, KIND_NAMES[kind]
        assert p_value > SMALLEST_P, KIND_NAMES[kind]


@pytest.mark.parametrize("draft_sample", ["greedy", "gumbel"])
@pytest.mark.parametrize("k", [1, 3])
def test_fixed_length_joint_law(draft_sample: str, k: int) -> None:
    toy = make_toy(3, seed=4)
    emitted = decode(
        Twins(), toy, draft_sample=draft_sample, num_rows=NUM_ROWS, num_tokens=k + 2, k=k
    )
    assert joint_p_value(emitted.tokens, toy) > SMALLEST_P


def test_a_bias_of_total_variation_0_02_is_seen() -> None:
    """Move 0.02 of the mass of the last token and the joint test must reject it."""
    toy = make_toy(4)
    emitted = decode(Twins(), toy, draft_sample="gumbel", num_rows=NUM_ROWS, num_tokens=4, k=2)
    tokens = emitted.tokens.copy()
    assert joint_p_value(tokens, toy) > SMALLEST_P
    others = tokens[:, -1] != 0
    moved = others & (np.random.default_rng(0).random(NUM_ROWS) < 0.02 / others.mean())
    assert moved.mean() == pytest.approx(0.02, abs=0.002)
    tokens[moved, -1] = 0
    assert joint_p_value(tokens, toy) < SMALLEST_P


def test_drafts_on_the_target_stream_are_seen() -> None:
    """The published fault: draft and recovered token drawn from the same noise."""
    toy = make_toy(4)
    emitted = decode(
        Twins(),
        toy,
        draft_sample="gumbel",
        num_rows=NUM_ROWS,
        num_tokens=4,
        k=2,
        draft_stream=TARGET,
        use_block_index=False,
    )
    assert kind_p_value(emitted, toy, RECOVERED, "gumbel")[0] < 1e-12
    assert joint_p_value(emitted.tokens, toy) < 1e-12


def test_noise_of_discarded_drafts_is_not_used_again() -> None:
    """Without j in the address, a draft length that looks at discarded drafts biases the law."""
    toy = make_toy(4)
    emitted = decode(
        Twins(),
        toy,
        draft_sample="gumbel",
        num_rows=NUM_ROWS,
        num_tokens=4,
        k=2,
        lengths=lengths_from_discarded_drafts(2),
        use_block_index=False,
    )
    assert joint_p_value(emitted.tokens, toy) < 1e-12


def test_sampled_drafts_judged_as_greedy_with_their_q_are_seen() -> None:
    """Greedy drafts judged by the ratio rule: drawing one way and judging another is biased."""
    toy = make_toy(4)
    honest = rejection.rejection_sample

    class Wrong:
        @staticmethod
        def rejection_sample(target_logits, drafts, num, draft_logits, *rest):  # type: ignore[no-untyped-def]
            return honest(target_logits, drafts, num, target_logits[:, :-1] * 0.5, *rest)

    kernels = Twins(rejection=Wrong)  # type: ignore[arg-type]
    emitted = decode(kernels, toy, draft_sample="greedy", num_rows=NUM_ROWS, num_tokens=4, k=2)
    assert joint_p_value(emitted.tokens, toy) < 1e-12

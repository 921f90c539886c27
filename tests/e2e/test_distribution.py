"""The engine's tokens follow the target's distribution, whatever the draft and the schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from e2e.engines import EngineShop
from e2e.harness import make_row, run_all, tokens_of
from e2e.laws import P_VALUE, chain_law, count_sequences, fit, next_token_fit, sequence_law
from e2e.runs import NUM_TOKENS, PROMPT, SAMPLING, WIDTH, big_engine, chain_fits, chain_rows

from specgen.kernels.reference import gumbel, rejection
from specgen.kernels.streams import DRAFT, TARGET
from specgen.pipeline import drafter


@pytest.mark.parametrize(
    ("draft", "draft_sample", "num_rows"),
    [("eagle3", "gumbel", 15_600), ("eagle1", "greedy", 11_000), (None, "greedy", 2_500)],
)
def test_tokens_follow_the_target_jointly_and_at_every_place_of_a_step(
    engine_of: EngineShop,
    checkpoints: dict[str, Path],
    draft: str | None,
    draft_sample: str,
    num_rows: int,
) -> None:
    """Several rounds a row, rows of k = 0, 1 and 2 in one batch, everything preempted at random."""
    engine = big_engine(engine_of, "chain", draft, draft_sample)
    law = chain_law(checkpoints["chain"], **SAMPLING)
    fits = chain_fits(engine, chain_rows(num_rows), law)
    places = set(fits) - {"joint"}
    assert places == {"first", "plain"} | ({"judged 0", "judged 1", "bonus"} if draft else set())
    for place, result in fits.items():
        assert result.p_value > P_VALUE, (place, result)
    assert fits["joint"].detectable_tv < (0.02 if draft_sample == "gumbel" else 0.05), fits
    if draft is not None:
        for place in places - {"first"}:
            assert fits[place].detectable_tv < 0.02, (place, fits[place])


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.5},
    {"temperature": 0.5, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 4, "top_p": 0.9},
    {"temperature": 0.3, "top_p": 0.95},
]


@pytest.mark.parametrize(("draft", "draft_sample"), [("eagle1", "gumbel"), ("eagle3", "greedy")])
def test_every_row_follows_its_own_temperature_and_filters(
    engine_of: EngineShop, checkpoints: dict[str, Path], draft: str, draft_sample: str
) -> None:
    engine = big_engine(engine_of, "chain", draft, draft_sample)
    num_kinds = len(SETTINGS)
    rows = [
        make_row(i, PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True, **SETTINGS[i % num_kinds])
        for i in range(1024 * num_kinds)
    ]
    completions = tokens_of(run_all(engine, rows, preempt_seed=1))
    for kind, sampling in enumerate(SETTINGS):
        law = chain_law(checkpoints["chain"], **sampling)
        pairs = [
            pair
            for completion in completions[kind::num_kinds]
            for pair in zip((PROMPT[-1], *completion), completion, strict=False)
        ]
        result = next_token_fit(pairs, law)
        assert result.p_value > P_VALUE, (sampling, result)
        assert result.detectable_tv < 0.02


@pytest.mark.parametrize(
    ("draft", "draft_sample", "num_rows"),
    [("eagle1", "gumbel", 61_440), ("eagle3", "greedy", 46_080)],
)
def test_the_joint_law_of_a_completion_is_exact_in_its_whole_context(
    engine_of: EngineShop,
    checkpoints: dict[str, Path],
    draft: str,
    draft_sample: str,
    num_rows: int,
) -> None:
    """First token, then k + 1 of a step or more: all 5^4 continuations of one prompt."""
    engine = big_engine(engine_of, "few", draft, draft_sample)
    law = sequence_law(checkpoints["few"], PROMPT, WIDTH, temperature=0.8)
    samples = 64  # share the seed of their row
    rows = [
        make_row(
            i,
            PROMPT,
            n=samples,
            max_tokens=WIDTH,
            ignore_eos=True,
            num_speculative_tokens=(2, 1, 2)[i % 3],
            temperature=0.8,
        )
        for i in range(num_rows // samples)
    ]
    completions = tokens_of(run_all(engine, rows, preempt_seed=2))
    counts = count_sequences(completions, law.shape[0])
    result = fit(counts.reshape(-1), num_rows * law.reshape(-1))
    assert result.p_value > P_VALUE, result
    assert result.detectable_tv < 0.035, result


# -- the tests above can fail ---------------------------------------------------------------------


def smallest_p_value(
    engine_of: EngineShop, checkpoints: dict[str, Path], num_speculative_tokens: int
) -> float:
    """The verdict of the first test above, over a shorter run of sampled drafts."""
    rows = chain_rows(3072, num_speculative_tokens=num_speculative_tokens)
    engine = big_engine(engine_of, "chain", "eagle3", "gumbel")
    fits = chain_fits(engine, rows, chain_law(checkpoints["chain"], **SAMPLING))
    return min(result.p_value for result in fits.values())


@pytest.mark.parametrize("k", [1, 2])
def test_a_shorter_run_without_a_fault_passes(
    engine_of: EngineShop, checkpoints: dict[str, Path], k: int
) -> None:
    assert smallest_p_value(engine_of, checkpoints, k) > P_VALUE


def test_noise_shared_by_draft_and_target_is_noticed(
    engine_of: EngineShop, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter, "DRAFT", TARGET)
    assert smallest_p_value(engine_of, checkpoints, 1) < P_VALUE**2


def test_an_acceptance_uniform_used_twice_is_noticed(
    engine_of: EngineShop, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = rejection._uniforms

    def reused(*args: Any) -> torch.Tensor:
        u = original(*args)
        return u[:, :1].expand_as(u)

    monkeypatch.setattr(rejection, "_uniforms", reused)
    assert smallest_p_value(engine_of, checkpoints, 2) < P_VALUE**2


def test_drafts_from_another_distribution_than_they_are_judged_by_are_noticed(
    engine_of: EngineShop, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = gumbel.gumbel_sample

    def hotter(logits: torch.Tensor, temperature: torch.Tensor, *args: Any) -> Any:
        stream = args[3]
        return original(logits, temperature + 0.4 * (stream == DRAFT), *args)

    monkeypatch.setattr(gumbel, "gumbel_sample", hotter)
    assert smallest_p_value(engine_of, checkpoints, 2) < P_VALUE**2


def test_a_shift_of_two_percent_is_noticed() -> None:
    """The declared power: samples of a law that is 0.02 off, in one sample size with the above."""
    rng = np.random.default_rng(0)
    law = rng.dirichlet(np.full(625, 3.0))
    order = rng.permutation(625)
    up, down = order[:312], order[312:]
    shifted = law.copy()
    shifted[up] *= 1 + 0.02 / law[up].sum()
    shifted[down] *= 1 - 0.02 / law[down].sum()
    assert np.abs(shifted - law).sum() / 2 == pytest.approx(0.02)
    found = [fit(rng.multinomial(122_880, shifted), 122_880 * law) for _ in range(50)]
    assert np.mean([result.p_value < P_VALUE for result in found]) > 0.8
    fair = [fit(rng.multinomial(122_880, law), 122_880 * law) for _ in range(50)]
    assert all(result.p_value > P_VALUE for result in fair)

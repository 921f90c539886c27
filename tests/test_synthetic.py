"""Rates of the synthetic rule, from flag to conditional rates."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.config import EngineConfig
from specgen.errors import UsageError
from specgen.resolve import resolve
from specgen.synthetic import conditional_rates, parse_synthetic_acceptance, synthetic_rates


def test_a_mean_length_fills_ones_the_fraction_and_zeros() -> None:
    assert synthetic_rates(2.5, 3) == (1.0, 0.5, 0.0)
    assert synthetic_rates(1.0, 3) == (0.0, 0.0, 0.0)
    assert synthetic_rates(4.0, 3) == (1.0, 1.0, 1.0)


@given(st.integers(1, 8).flatmap(lambda k: st.tuples(st.just(k), st.floats(1.0, k + 1.0))))
def test_the_rates_sum_to_the_length(case: tuple[int, float]) -> None:
    k, length = case
    rates = synthetic_rates(length, k)
    assert len(rates) == k
    assert 1.0 + sum(rates) == pytest.approx(length)
    # Judged one after the other, the conditional rates give them back.
    product = 1.0
    for rate, conditional in zip(rates, conditional_rates(rates), strict=True):
        product *= conditional
        assert product == pytest.approx(rate)


def test_conditional_rates() -> None:
    assert conditional_rates((0.8, 0.4, 0.0, 0.0)) == (0.8, 0.5, 0.0, 0.0)


def test_parsing() -> None:
    assert parse_synthetic_acceptance("2.5") == 2.5
    assert parse_synthetic_acceptance("0.9,0.5") == (0.9, 0.5)
    assert parse_synthetic_acceptance("0.9") == (0.9,)
    for text in ("", "a", "1,,2", "1;2"):
        with pytest.raises(ValueError, match="float"):
            parse_synthetic_acceptance(text)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (0.5, "mean length of at least 1, got 0.5"),
        (math.inf, "got inf"),
        (math.nan, "got nan"),
        ((), "rates must be from 0 to 1"),
        ((0.5, 1.5), "rates must be from 0 to 1, got 0.5, 1.5"),
        ((0.5, math.nan), "from 0 to 1"),
        ((0.4, 0.5), "must not increase, got 0.4, 0.5"),
        ((0.9, 0.5), "gives 2 rates, --num-speculative-tokens is 3"),
        (4.5, "3 drafts a step yield at most 4 tokens"),
    ],
)
def test_impossible_acceptance_is_refused(asked: float | tuple[float, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        synthetic_rates(asked, 3)


def test_config_wants_rule_and_acceptance_together() -> None:
    with pytest.raises(UsageError, match="belong together"):
        EngineConfig(rejection_sample="synthetic")
    with pytest.raises(UsageError, match="belong together"):
        EngineConfig(synthetic_acceptance=2.0)
    for settings in (
        {"rejection_sample": "synthetic"},
        {"synthetic_acceptance": 1.0},
        {"rejection_sample": "synthetic", "synthetic_acceptance": 1.0},
    ):
        with pytest.raises(UsageError, match="needs a draft: --no-draft is given"):
            EngineConfig(no_draft=True, **settings)
    config = resolve(EngineConfig(rejection_sample="synthetic", synthetic_acceptance=2.25))
    assert config.synthetic_rates == (1.0, 0.25)  # as many drafts as the length needs
    config = resolve(
        EngineConfig(
            rejection_sample="synthetic", synthetic_acceptance=2.25, num_speculative_tokens=3
        )
    )
    assert config.synthetic_rates == (1.0, 0.25, 0.0)
    assert resolve(EngineConfig()).synthetic_rates is None

"""Rates of the ``synthetic`` rule: speed at a known acceptance, whatever the models would do.

Rates are unconditional: entry i is the share of spec steps in which drafts 0..i are all accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from specgen.errors import UsageError
from specgen.wording import counted

__all__ = [
    "MAX_SPECULATIVE_TOKENS",
    "SyntheticAcceptance",
    "check_synthetic_acceptance",
    "conditional_rates",
    "parse_synthetic_acceptance",
    "synthetic_rates",
]

#: A mean acceptance length, or one rate for each draft position.
SyntheticAcceptance = float | tuple[float, ...]

#: Drafts of a step, of any rule.
MAX_SPECULATIVE_TOKENS = 32

_FLAG = "--synthetic-acceptance"


def parse_synthetic_acceptance(text: str) -> SyntheticAcceptance:
    """`2.5` is a mean acceptance length; `0.9,0.6,0.4`, or one number below 1, are rates.

    Raises:
        ValueError: it is neither.
    """
    values = tuple(float(part) for part in text.split(","))
    return values[0] if len(values) == 1 and values[0] >= 1.0 else values


def check_synthetic_acceptance(asked: SyntheticAcceptance) -> None:
    """Check what can be checked without knowing k.

    Raises:
        UsageError: rates outside [0, 1] or increasing, or a length below 1.
    """
    if not isinstance(asked, tuple):
        if not 1.0 <= asked < float("inf"):
            raise UsageError(
                f"{_FLAG} must be a mean length of at least 1, got {asked:g}",
                "a step yields one token where no draft is accepted",
            )
        return
    if len(asked) == 1 and not 0.0 <= asked[0] <= 1.0:
        raise UsageError(
            f"{_FLAG}: one number is a mean length of at least 1, or the rate of one draft, "
            f"got {asked[0]:g}",
            "give a number from 0 on",
        )
    if not asked or not all(0.0 <= rate <= 1.0 for rate in asked):
        raise UsageError(
            f"{_FLAG}: rates must be from 0 to 1, got {_listed(asked)}",
            "several numbers are rates, one a draft; one number, such as 2.5, is a mean length",
        )
    if any(later > rate for rate, later in pairwise(asked)):
        raise UsageError(
            f"{_FLAG}: rates must not increase, got {_listed(asked)}",
            "each is the share of steps that accept this draft and all before it",
        )


def synthetic_rates(asked: SyntheticAcceptance, num_speculative_tokens: int) -> tuple[float, ...]:
    """The k unconditional rates; a mean length L fills whole ones, the fraction, then zeros.

    The mean acceptance length of a run is 1 plus their sum.

    Raises:
        UsageError: not one rate a draft, or a length beyond k + 1.
    """
    k = num_speculative_tokens
    check_synthetic_acceptance(asked)
    if isinstance(asked, tuple):
        if len(asked) != k:
            raise UsageError(
                f"{_FLAG} gives {counted(len(asked), 'rate')}, --num-speculative-tokens is {k}",
                f"give {counted(k, 'rate')}, or a mean length from 1 to {k + 1}, or leave out "
                "--num-speculative-tokens",
            )
        return asked
    if asked > k + 1:
        needed, most = math.ceil(asked) - 1, MAX_SPECULATIVE_TOKENS
        raise UsageError(
            f"{_FLAG} {asked:g}: {counted(k, 'draft')} a step yield at most {k + 1} tokens",
            f"give --num-speculative-tokens {needed}"
            if needed <= most
            else f"give a length of at most {most + 1}, what {most} drafts yield",
        )
    return tuple(min(max(asked - 1.0 - i, 0.0), 1.0) for i in range(k))


def conditional_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """Rate of each position once those before it were accepted: r_i / r_(i-1), and 0 for 0/0."""
    before = (1.0, *rates)
    return tuple(
        rate / last if last > 0.0 else 0.0 for rate, last in zip(rates, before, strict=False)
    )


def _listed(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)

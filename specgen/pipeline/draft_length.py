"""How many tokens to draft in a step: k, fixed or chosen for the batch at hand.

A step with k drafts takes the longer the more rows it has, and yields 1 to k + 1 tokens a row.
With few rows the target's weights are read anyway and drafts are nearly free; with many, each draft
costs as much as a token, and k = 0 is best. :func:`best_draft_length` weighs one against the other;
:class:`AutoDraftLength` knows both sides: step times (:mod:`.step_times`), and the acceptance of
recent drafts by position.

The choice looks at the number of rows, at times and at tokens that are committed. It never looks at
a draft that is to be judged, so it leaves the distribution of tokens as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from specgen.pipeline.step_record import RowRecord
from specgen.pipeline.step_times import MeasureStep, StepTimes

__all__ = [
    "AutoDraftLength",
    "DraftLength",
    "FixedDraftLength",
    "best_draft_length",
    "expected_tokens",
]

# A longer k must promise this much more than the present one, or it would come and go with the luck
# of drafts. A shorter one need not: with drafts that are never accepted any length seems as good as
# k = 0 if that was never timed.
_MARGIN = 0.01
# The first step with more drafts than the one before it has fewer to judge, so a change there and
# back costs a part of a step. Within so many steps it must pay.
_PAYS_WITHIN = 24
# A length is left after so many steps at the earliest, so that one that waited for the host is not
# all that is known of it. (The last has not been seen then, and the first may have had no time.)
_FEWEST_STEPS = 4
# Until drafts were judged: what heads usually reach, with the weight of so many drafts. Of one row
# each step judges one, and a useless head is to be found out within some twenty steps.
_PRIOR_RATE, _PRIOR_WEIGHT = 0.7, 6.0
# A position counts as one that has been judged so often with the rate of the one before it.
_NEIGHBOUR_WEIGHT = 16.0
# Drafts after which older ones count half as much.
_HALF_LIFE = 4096.0
# Without drafts nothing is learned of them: now and then a pair of steps tries one. The more rows a
# step has, the more such a pair tells, and costs.
_PROBE_EVERY, _PROBE_EVERY_OF_A_ROW, _PROBE_STEPS = 256, 8, 2


def expected_tokens(acceptance: Sequence[float], k: int) -> float:
    """Tokens that a row gains in a step with k drafts.

    Args:
        acceptance: chance of each position to be accepted once those before it were.
    """
    total = reached = 1.0
    for rate in acceptance[:k]:
        reached *= rate
        total += reached
    return total


def best_draft_length(
    step_seconds: Sequence[float], acceptance: Sequence[float], current: int | None = None
) -> int:
    """The k with the most tokens a second if that is worth leaving the one in use; without one the
    shortest of those as good within :data:`_MARGIN`.

    Args:
        step_seconds: of a step with 0, 1, ... drafts; at least one.
        acceptance: as of :func:`expected_tokens`, one less or more.
        current: the k in use, if any.
    """
    tokens = [expected_tokens(acceptance, k) for k in range(len(step_seconds))]
    rates = [gained / seconds for gained, seconds in zip(tokens, step_seconds, strict=True)]
    if current is None or current >= len(rates) or not rates[current]:
        return next(k for k in range(len(rates)) if (1 + _MARGIN) * rates[k] >= max(rates))

    def gain(k: int) -> float:
        """What a change gives beyond what it must."""
        less, more = sorted((tokens[k], tokens[current]))
        cost = (1 - less / more) / _PAYS_WITHIN
        return rates[k] / rates[current] - 1 - max(cost, _MARGIN if k > current else 0.0)

    best = max(range(len(rates)), key=gain)
    return best if gain(best) >= 0 else current


class DraftLength(Protocol):
    """Chooses k, step by step."""

    def choose(self, num_rows: int, limit: int) -> int:
        """The k of the next decode step.

        Args:
            num_rows: rows of the step.
            limit: the most drafts that any of them wants.
        """
        ...

    def observe(
        self, records: Iterable[RowRecord], num_rows: int, k: int, seconds: float | None
    ) -> None:
        """Learn from a decode step of k drafts that took so many seconds, if that is known."""
        ...


class FixedDraftLength:
    """Always the same k."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._k = num_speculative_tokens

    def choose(self, num_rows: int, limit: int) -> int:
        """See :class:`DraftLength`; 0 where no row wants a draft."""
        del num_rows
        return self._k if limit else 0

    def observe(
        self, records: Iterable[RowRecord], num_rows: int, k: int, seconds: float | None
    ) -> None:
        """Nothing to learn."""


class AutoDraftLength:
    """The best k up to a limit.

    Args:
        max_k: the limit.
        max_num_rows: rows of the largest step.
        measure: times a step of inert rows; called once for every k and a few sizes.
    """

    def __init__(self, max_k: int, max_num_rows: int, measure: MeasureStep) -> None:
        self._max_k = max_k
        self._times = StepTimes(max_k, max_num_rows, measure)
        self._acceptance = _Acceptance(max_k)
        self._current: int | None = None
        self._num_steps = 0  # with the present k, one after the other
        self._num_plain_steps = 0

    def choose(self, num_rows: int, limit: int) -> int:
        """See :class:`DraftLength`."""
        limit = min(limit, self._max_k)
        if limit == 0:
            return 0
        seconds = self._times.of(num_rows)[: limit + 1]
        k = self._current
        if k is None or k > limit or seconds[k] == math.inf or self._num_steps >= _FEWEST_STEPS:
            k = best_draft_length(seconds, self._acceptance.rates(), k)
        self._num_steps = self._num_steps + 1 if k == self._current else 1
        self._current = k
        if k > 0:
            self._num_plain_steps = 0
            return k
        return self._probe(seconds, num_rows)

    def observe(
        self, records: Iterable[RowRecord], num_rows: int, k: int, seconds: float | None
    ) -> None:
        """See :class:`DraftLength`."""
        if k > 0:
            self._acceptance.add(records)
        if seconds is not None:
            self._times.correct(num_rows, k, seconds)

    def _probe(self, seconds: Sequence[float], num_rows: int) -> int:
        """A draft now and then, where one would pay if the draft had become a good one."""
        if best_draft_length(seconds[:2], [_PRIOR_RATE]) == 0:
            self._num_plain_steps = 0
            return 0
        self._num_plain_steps += 1
        every = max(_PROBE_EVERY, _PROBE_EVERY_OF_A_ROW * num_rows)
        if self._num_plain_steps <= every:
            return 0
        if self._num_plain_steps >= every + _PROBE_STEPS:
            self._num_plain_steps = 0
        return 1


class _Acceptance:
    """Rates of acceptance by position, each given that the positions before it were accepted.

    A position of which little is known is thought to be like the one before it. What is known of
    positions that are not drafted any more fades with the rest, so that they are tried again.
    """

    def __init__(self, max_k: int) -> None:
        self._accepted = [0.0] * max_k
        self._judged = [0.0] * max_k

    def rates(self) -> list[float]:
        rates = []
        before, weight = _PRIOR_RATE, _PRIOR_WEIGHT
        for accepted, judged in zip(self._accepted, self._judged, strict=True):
            before = (accepted + weight * before) / (judged + weight)
            weight = _NEIGHBOUR_WEIGHT
            rates.append(before)
        return rates

    def add(self, records: Iterable[RowRecord]) -> None:
        judged, accepted = [0] * len(self._judged), [0] * len(self._judged)
        for _, num_sampled, num_draft_tokens, _ in records:
            for position in range(min(num_sampled, num_draft_tokens)):
                judged[position] += 1
                accepted[position] += position < num_sampled - 1
        keep = 0.5 ** (judged[0] / _HALF_LIFE)
        for position, count in enumerate(judged):
            self._judged[position] = keep * self._judged[position] + count
            self._accepted[position] = keep * self._accepted[position] + accepted[position]

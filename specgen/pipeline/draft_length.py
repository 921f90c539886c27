"""How many tokens to draft in a step: k, fixed or chosen for the batch at hand.

A step with k drafts takes the longer the more rows it has, and yields 1 to k + 1 tokens a row.
With few rows the target's weights are read anyway and drafts are nearly free; with many, each draft
costs as much as a token, and k = 0 is best. :func:`best_draft_length` weighs one against the other;
:class:`AutoDraftLength` knows both sides: step times from inert steps measured once for a few batch
sizes and corrected by the steps that run, and the acceptance of recent drafts by position.

The choice looks at the number of rows, at times and at tokens that are committed. It never looks at
a draft that is to be judged, so it leaves the distribution of tokens as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specgen.pipeline.step_record import RowRecord

__all__ = [
    "AutoDraftLength",
    "DraftLength",
    "FixedDraftLength",
    "best_draft_length",
    "expected_tokens",
]

MeasureStep = Callable[[int, int], float]
"""(rows, k) -> seconds of a step whose rows are all inert."""

# A longer k must promise this much more than the present one: a change costs a step without drafts.
_MARGIN = 1.025
# Of lengths that are nearly as good the shortest is taken: a GPU at its power limit runs steps of
# many tokens slower than they were measured, and few drafts leave less to be thrown away.
_NEARLY = 0.98
# Until drafts were judged: what heads usually reach, with the weight of so many drafts. Of one row
# each step judges one, and a useless head is to be found out within some twenty steps.
_PRIOR_RATE, _PRIOR_WEIGHT = 0.7, 6.0
# A position counts as one that has been judged so often with the rate of the one before it.
_NEIGHBOUR_WEIGHT = 16.0
# Drafts after which older ones count half as much.
_HALF_LIFE = 4096.0
# Without drafts nothing is learned of them: now and then a pair of steps tries one.
_PROBE_EVERY, _PROBE_STEPS = 256, 2
# How fast the correction of step times follows once it is known, and how often it may exceed what
# was expected: a step that waited for the host is not the device's.
_FOLLOW, _OUTLIER = 0.1, 2.0
# The first steps with a k tell what is special to it.
_STEPS_OF_A_LENGTH = 8


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
    """The k with the most tokens a second, or the shortest of those nearly as good.

    Args:
        step_seconds: of a step with 0, 1, ... drafts; at least one.
        acceptance: as of :func:`expected_tokens`, one less or more.
        current: the k in use, which stays unless a longer one is clearly better.
    """

    def rate(k: int) -> float:
        return expected_tokens(acceptance, k) / step_seconds[k]

    most = max(map(rate, range(len(step_seconds))))
    best = next(k for k in range(len(step_seconds)) if rate(k) >= _NEARLY * most)
    if current is None or current >= len(step_seconds) or best < current:
        return best
    return best if rate(best) > _MARGIN * rate(current) else current


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
        self._times = _StepTimes(max_k, max_num_rows, measure)
        self._acceptance = _Acceptance(max_k)
        self._current: int | None = None
        self._num_plain_steps = 0

    def choose(self, num_rows: int, limit: int) -> int:
        """See :class:`DraftLength`."""
        limit = min(limit, self._max_k)
        if limit == 0:
            return 0
        seconds = self._times.of(num_rows)[: limit + 1]
        k = best_draft_length(seconds, self._acceptance.rates(), self._current)
        self._current = k
        if k > 0:
            self._num_plain_steps = 0
            return k
        return self._probe(seconds)

    def observe(
        self, records: Iterable[RowRecord], num_rows: int, k: int, seconds: float | None
    ) -> None:
        """See :class:`DraftLength`."""
        if k > 0:
            self._acceptance.add(records)
        if seconds is not None:
            self._times.correct(num_rows, k, seconds)

    def _probe(self, seconds: Sequence[float]) -> int:
        """A draft now and then, where one would pay if the draft had become a good one."""
        if best_draft_length(seconds[:2], [_PRIOR_RATE]) == 0:
            self._num_plain_steps = 0
            return 0
        self._num_plain_steps += 1
        if self._num_plain_steps <= _PROBE_EVERY:
            return 0
        if self._num_plain_steps == _PROBE_EVERY + _PROBE_STEPS:
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


@dataclass
class _Extra:
    """Seconds a row, beyond inert steps, of the steps of about as many rows: ``common`` of those
    with any k, and what each k that was tried adds to it, with the number of steps that told."""

    common: float = 0.0
    num_steps: int = 0
    of_k: dict[int, tuple[float, int]] = field(default_factory=dict)
    last_k: int = 0


class _StepTimes:
    """Seconds of a step by rows and k.

    Inert rows cost what their matrix products cost, but no reading of the cache. That depends on
    the lengths of rows and hardly on k. And a GPU at its power limit slows down, the more so the
    more tokens a step has. So the first steps with a k tell what is special to it, all others what
    is common. Of a k that has not been tried the best is thought: a longer one to have no more
    beyond its inert time than the last one has, a shorter one only its share of that.
    """

    def __init__(self, max_k: int, max_num_rows: int, measure: MeasureStep) -> None:
        self._max_k = max_k
        self._sizes = _sizes(max_num_rows)
        self._measure = measure
        self._inert: dict[int, list[float]] = {}
        self._extras: dict[int, _Extra] = {}  # by size

    def of(self, num_rows: int) -> list[float]:
        inert, extra = self._inert_of(num_rows), self._extra_of(num_rows)
        return [
            seconds + num_rows * self._beyond(extra, inert, k) for k, seconds in enumerate(inert)
        ]

    def correct(self, num_rows: int, k: int, seconds: float) -> None:
        inert, extra = self._inert_of(num_rows), self._extra_of(num_rows)
        if not math.isfinite(inert[k]):
            return
        expected = inert[k] + num_rows * self._beyond(extra, inert, k)
        beyond = max(min(seconds, _OUTLIER * expected) - inert[k], 0.0) / num_rows
        if not extra.of_k:
            extra.of_k[k] = 0.0, _STEPS_OF_A_LENGTH  # the first k is what others differ from
        own, num_steps = extra.of_k.get(k, (0.0, 0))
        if num_steps < _STEPS_OF_A_LENGTH:
            own += (beyond - extra.common - own) / (num_steps + 1)
            extra.of_k[k] = own, num_steps + 1
        else:
            follow = max(_FOLLOW, 1 / (extra.num_steps + 1))
            extra.common += follow * (beyond - own - extra.common)
            extra.num_steps += 1
        extra.last_k = k

    def _beyond(self, extra: _Extra, inert: Sequence[float], k: int) -> float:
        """Seconds a row that a step with k drafts takes beyond its inert time."""
        if k in extra.of_k or not extra.of_k:
            return max(extra.common + extra.of_k.get(k, (0.0, 0))[0], 0.0)
        known = max(extra.common + extra.of_k[extra.last_k][0], 0.0)
        return known * min(inert[k] / inert[extra.last_k], 1.0)

    def _extra_of(self, num_rows: int) -> _Extra:
        return self._extras.setdefault(self._above(num_rows), _Extra())

    def _above(self, num_rows: int) -> int:
        return next(size for size in self._sizes if size >= num_rows)

    def _inert_of(self, num_rows: int) -> list[float]:
        """Between two sizes that were measured, a straight line."""
        above = self._above(num_rows)
        at = self._measured(above)
        if above == num_rows or above == self._sizes[0]:
            return at
        below = self._sizes[self._sizes.index(above) - 1]
        part = (num_rows - below) / (above - below)
        return [(1 - part) * b + part * a for b, a in zip(self._measured(below), at, strict=True)]

    def _measured(self, num_rows: int) -> list[float]:
        if num_rows not in self._inert:
            self._inert[num_rows] = [self._measure(num_rows, k) for k in range(self._max_k + 1)]
        return self._inert[num_rows]


def _sizes(max_num_rows: int) -> tuple[int, ...]:
    """Batch sizes to measure: powers of four, then of two, where steps begin to grow with rows."""
    sizes = [1, 4, 16, 32]
    while sizes[-1] < max_num_rows:
        sizes.append(2 * sizes[-1])
    return (*(size for size in sizes if size < max_num_rows), max_num_rows)

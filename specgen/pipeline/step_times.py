"""What a step of so many rows and k drafts takes: measured once, corrected by steps that run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["MeasureStep", "StepTimes"]

MeasureStep = Callable[[int, int], float]
"""(rows, k) -> seconds of a step whose rows are all inert; infinite if it does not fit."""

# All below in shares of the inert step without drafts, as standard deviations.
# What real steps take beyond inert ones: the reading of the cache, the same for every k; the
# slowing down of a GPU at its power limit, in proportion to the step; what is special to a k.
_COMMON, _SLOWDOWN, _SPECIAL = 0.3, 0.2, 0.03
# How far the first and the last of them move from step to step, as contexts and clocks do.
_COMMON_DRIFT, _SPECIAL_DRIFT = 3e-3, 1e-3
# How well one step tells, in shares of its own time, at best: beside other work a machine's steps
# differ more. A third of them is to be beyond one deviation of what was expected; the variance
# grows and shrinks by so much, as a logarithm, until that is so.
_NOISE, _NOISE_FOLLOWS, _BEYOND = 0.02, 1 / 12, 0.32
# A step may be off by so many deviations. One that is off by more, which may have waited for the
# host or for a graph, is believed to be off by these, and makes what is common the less sure.
_LARGEST_SURPRISE, _DOUBT = 3.0, 0.03
# Of the first steps with a k only the middle one counts: one that waited would be believed, since
# nothing else is known.
_FIRST_STEPS = 3
# The least that a step takes, in inert ones.
_LEAST = 0.5
# What is not known is thought to be so many deviations better: then it will be tried.
_OPTIMISM = 2.0


class StepTimes:
    """Seconds of a step by rows and k.

    Args:
        max_k: the most drafts of a step.
        max_num_rows: rows of the largest step.
        measure: times a step of inert rows; called once for every k and a few sizes.
    """

    def __init__(self, max_k: int, max_num_rows: int, measure: MeasureStep) -> None:
        self._max_k = max_k
        self._sizes = _sizes(max_num_rows)
        self._measure = measure
        self._inert: dict[int, list[float]] = {}
        self._beyond: dict[int, _Beyond] = {}  # by size

    def of(self, num_rows: int) -> list[float]:
        """Seconds of a step of so many rows with 0 .. max_k drafts, at best.

        A draft more never makes a step faster. So if a short step's time is thought too long, long
        ones are, too, and the short one will be tried.
        """
        inert, beyond = self._inert_of(num_rows), self._beyond_of(num_rows)
        seconds, most = [], 0.0
        for k, alone in enumerate(inert):
            if math.isfinite(alone):
                most = max(most, alone + beyond.at_best(k, num_rows), _LEAST * alone)
            seconds.append(most if math.isfinite(alone) else alone)
        return seconds

    def correct(self, num_rows: int, k: int, seconds: float) -> None:
        """Learn from a step that took so long."""
        inert, beyond = self._inert_of(num_rows)[k], self._beyond_of(num_rows)
        if math.isfinite(inert):
            beyond.learn(k, seconds - inert, num_rows)

    def _beyond_of(self, num_rows: int) -> _Beyond:
        size = self._above(num_rows)
        if size not in self._beyond:
            self._beyond[size] = _Beyond(self._measured(size), size)
        return self._beyond[size]

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


class _Beyond:
    """What steps of about as many rows take beyond inert ones, a row, for every k at once.

    Inert rows cost what their matrix products cost, but no reading of the cache, and not the clock
    of real work. Each step tells of its own k, and less of the others: a Kalman filter (Kalman
    1960) over the values of all k, which are related by what they have in common. So a k that was
    never run is known by those that were, and one that was keeps what is special to it while the
    rest moves with the steps that run.

    Args:
        inert: seconds of an inert step of ``num_rows`` by k; infinite ones are never asked for.
    """

    def __init__(self, inert: Sequence[float], num_rows: int) -> None:
        shortest = next(filter(math.isfinite, inert), 1.0)
        self._scale = shortest / num_rows
        ratio = np.array([t if math.isfinite(t) else shortest for t in inert]) / shortest
        self._ratio = ratio
        self._noise = _NOISE**2
        self._drift = _COMMON_DRIFT**2 + _SPECIAL_DRIFT**2 * np.eye(len(ratio))
        self._mean = np.zeros(len(ratio))
        self._first: list[list[float]] = [[] for _ in ratio]
        self._covariance = (
            _COMMON**2 + _SLOWDOWN**2 * np.outer(ratio, ratio) + np.diag((_SPECIAL * ratio) ** 2)
        )

    def at_best(self, k: int, num_rows: int) -> float:
        """Seconds of a step of so many rows with the benefit of the doubt; may be negative."""
        doubt = _OPTIMISM * math.sqrt(float(self._covariance[k, k]))
        return (float(self._mean[k]) - doubt) * self._scale * num_rows

    def learn(self, k: int, seconds: float, num_rows: int) -> None:
        """A step with k drafts took so many seconds beyond an inert one."""
        beyond = seconds / (self._scale * num_rows)
        first = self._first[k]
        if len(first) < _FIRST_STEPS:
            first.append(beyond)
            if len(first) < _FIRST_STEPS:
                return
            beyond = statistics.median(first)
        self._covariance = self._covariance + self._drift
        column = self._covariance[:, k]
        ratio = float(self._ratio[k])
        variance = float(column[k]) + self._noise * ratio**2
        surprise = beyond - float(self._mean[k])
        most = _LARGEST_SURPRISE * math.sqrt(variance)
        believed = max(-most, min(surprise, most))
        self._mean = self._mean + column * (believed / variance)
        # Counted, not squared: a few steps that waited would make all the others untrustworthy.
        is_beyond = surprise**2 > variance
        self._noise *= math.exp(_NOISE_FOLLOWS * (is_beyond - _BEYOND))
        self._noise = max(self._noise, _NOISE**2)
        if abs(surprise) <= most:
            self._covariance = self._covariance - np.outer(column, column) / variance
        else:
            self._covariance = self._covariance + _DOUBT**2


def _sizes(max_num_rows: int) -> tuple[int, ...]:
    """Batch sizes to measure: from 4 on powers of two, as step times begin to grow with rows."""
    sizes = [1, 4]
    while sizes[-1] < max_num_rows:
        sizes.append(2 * sizes[-1])
    return (*(size for size in sizes if size < max_num_rows), max_num_rows)

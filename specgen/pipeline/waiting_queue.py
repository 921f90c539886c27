"""Rows that wait for a slot, in the order in which they are to get one.

Nobody waits for a single answer of a file, so the order is free to serve the whole: the rows that
may run longest go first. Begun last, one of them would run on alone when all others are done, with
the device as good as empty. How long a row may run is its ``max_tokens``; a row without one may run
longest of all. Rows that may run equally long keep their order, and a row that gave way comes
first. The order reaches as far as rows are read ahead.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable, Iterator

from specgen.pipeline.request import Request

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """A queue that is sorted by the longest possible completion."""

    def __init__(self) -> None:
        self._returning: deque[Request] = deque()
        self._fresh: list[Request] = []  # the next one last

    def __len__(self) -> int:
        """Rows that wait."""
        return len(self._returning) + len(self._fresh)

    def __iter__(self) -> Iterator[Request]:
        """All of them, the next one first."""
        yield from self._returning
        yield from reversed(self._fresh)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue new rows."""
        for request in requests:
            bisect.insort_left(self._fresh, request, key=_longest)

    def put_back(self, request: Request) -> None:
        """Queue a row that gave way, before all others."""
        self._returning.appendleft(request)

    @property
    def first(self) -> Request:
        """The next row."""
        return self._returning[0] if self._returning else self._fresh[-1]

    def pop(self) -> Request:
        """Take the next row."""
        return self._returning.popleft() if self._returning else self._fresh.pop()

    def remove(self, request: Request) -> None:
        """Take out this row."""
        (self._returning if request in self._returning else self._fresh).remove(request)

    def clear(self) -> None:
        """Take out all rows."""
        self._returning.clear()
        self._fresh.clear()


def _longest(request: Request) -> float:
    max_tokens = request.row.sampling.max_tokens
    return math.inf if max_tokens is None else max_tokens

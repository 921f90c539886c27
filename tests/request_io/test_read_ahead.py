from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from specgen.errors import InputError
from specgen.request_io.read_ahead import ReadAhead
from specgen.request_io.source import RawLine


def line(i: int, size: int = 1) -> RawLine:
    return RawLine("in", i, b"x" * size, "0" * 16)


def test_order_and_the_error_after_it() -> None:
    def lines() -> Iterator[RawLine]:
        yield from map(line, range(10_000))
        raise InputError("damaged")

    ahead = ReadAhead(lines())
    assert [next(ahead).line for _ in range(10_000)] == list(range(10_000))
    for _ in range(2):
        with pytest.raises(InputError, match="damaged"):
            next(ahead)
        assert ahead.ready()


def test_ready_only_with_a_line_or_the_end() -> None:
    go = threading.Semaphore(0)

    def lines() -> Iterator[RawLine]:
        for i in range(2):
            go.acquire()
            yield line(i)
        go.acquire()

    ahead = ReadAhead(lines())
    for i in range(2):
        assert not ahead.ready()
        go.release()
        assert next(ahead).line == i
    go.release()
    assert list(ahead) == []
    assert ahead.ready()


def test_little_is_held() -> None:
    taken = []

    def lines() -> Iterator[RawLine]:
        for i in range(100):
            taken.append(i)
            yield line(i, 2**22)

    ahead = ReadAhead(lines())
    for i in range(100):
        assert next(ahead).line == i
        assert len(taken) <= i + 7

"""Words for people."""

from __future__ import annotations

import re

__all__ = ["counted", "first_line", "legible", "printable"]

# Control characters, and those that reorder what stands around them.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def counted(number: int, noun: str) -> str:
    """`1 row`, `2 rows`, `1,000 rows`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def first_line(error: Exception) -> str:
    """What an error says, without the story behind it; its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def printable(text: str) -> str:
    """Text of unknown origin in one line that does nothing to a terminal or a log."""
    return _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], text)


def legible(text: str) -> str:
    """Text of the command line as UTF-8 can hold it: bytes that are none become U+FFFD.

    Names of files may hold any bytes. Python keeps those that are no text as lone surrogates, which
    neither JSON nor a terminal can.
    """
    return text.encode(errors="surrogateescape").decode(errors="replace")

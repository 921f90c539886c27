"""The optional fast parser, used only where it cannot differ from the strict one.

orjson keeps the last of two equal keys, turns integers beyond 64 bits into floats, and writes NaN
as null. So a line is parsed by it only if nothing in it could be of that kind; everything else, and
everything that it refuses, goes to the strict parser, whose word counts.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable
from typing import Any

__all__ = ["dump", "is_json", "load", "parse"]

# A space between key and colon, which the count of keys would miss.
_SPACED_COLON = re.compile(rb'"[ \t\n\r]+:')
# Integers that do not fit in 64 bits have become floats beyond this.
_SAFE_FLOAT = 2.0**53
_PLAIN = frozenset({int, str, bool, type(None)})
#: Parts of an output line that are made here, of counts and text: no NaN can be in them.
_OWN_PARTS = frozenset({"choices", "usage", "metrics", "response"})


def _load() -> tuple[Callable[[bytes], Any] | None, Callable[[Any], bytes] | None]:
    try:
        orjson: Any = importlib.import_module("orjson")
    except ImportError:
        return None, None
    return orjson.loads, orjson.dumps


_LOADS, _DUMPS = _load()


def parse(data: bytes) -> dict[str, Any] | None:
    """The object a line holds; None where the strict parser must look at it."""
    if _LOADS is None or _SPACED_COLON.search(data):
        return None
    try:
        value = _LOADS(data)
    except ValueError:
        return None
    # Each key is followed by a colon, so that fewer keys than `":` mean equal keys, or text that
    # looks like one.
    if type(value) is not dict or data.count(b'":') != _count_keys(value):
        return None
    return value


def load(data: bytes) -> Any:
    """The value of a line that was written here; of other lines, whichever the parser makes of it.

    Raises:
        ValueError: it is not one JSON text in UTF-8.
    """
    if _LOADS is not None:
        try:
            return _LOADS(data)
        except ValueError:
            pass  # a lone surrogate, say, is for the other one
    try:
        return json.loads(data.decode())
    except RecursionError as error:
        raise ValueError("too many levels") from error


def is_json(data: bytes) -> bool:
    """Whether the bytes are one JSON text in UTF-8; numbers and keys may be of any kind."""
    try:
        load(data)
    except ValueError:
        return False
    return True


def _count_keys(value: dict[str, Any]) -> int:
    """Keys of all objects; -1 if there is a number that may have been too large."""
    count, stack = 0, [value]
    while stack:
        item: Any = stack.pop()
        if type(item) is dict:
            count += len(item)
            item = item.values()
        elif set(map(type, item)) <= _PLAIN:
            continue
        for inner in item:
            kind = type(inner)
            if kind is dict or kind is list:
                stack.append(inner)
            elif kind is float and not -_SAFE_FLOAT < inner < _SAFE_FLOAT:
                return -1
    return count


def dump(record: dict[str, Any]) -> bytes | None:
    """A record as JSON; None where there is no fast parser.

    Raises:
        ValueError: a NaN or an infinity, which JSON has not.
    """
    if _DUMPS is None:
        return None
    stack: list[Any] = [{k: v for k, v in record.items() if k not in _OWN_PARTS}]
    while stack:
        item = stack.pop()
        values = item.values() if type(item) is dict else item
        if set(map(type, values)) <= _PLAIN:
            continue
        for value in values:
            kind = type(value)
            if kind is dict or kind is list:
                stack.append(value)
            elif kind is float and not math.isfinite(value):
                raise ValueError(f"{value} is no JSON number")
    return _DUMPS(record)

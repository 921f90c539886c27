"""JSON as it is defined, and no more: what other parsers let pass would change a row in silence.

Duplicate keys, NaN and infinities, integers beyond 64 bits, floats beyond their range, lone
surrogates and invalid UTF-8 are refused, each with a message that says where.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from specgen.request_io import fast_json

__all__ = ["RefusedError", "kind_of", "parse_object"]

# Beyond these a JSON number is no longer an integer to most readers of the output.
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
#: Objects and lists within each other; parsers and encoders give up at different depths.
MAX_DEPTH = 200
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class RefusedError(Exception):
    """A line that cannot become a row: code for programs, message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def parse_object(data: bytes) -> dict[str, Any]:
    """The object that a line holds.

    Raises:
        RefusedError: it holds anything else.
    """
    value = fast_json.parse(data)
    if value is None:
        value = _parse_strictly(data)
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    """Refuse what could be read, but not be written again inside an output line."""
    stack = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise RefusedError("invalid_json", "line is nested too deeply")
        for inner in item.values() if isinstance(item, dict) else item:
            if isinstance(inner, dict | list):
                stack.append((inner, depth + 1))


def _parse_strictly(data: bytes) -> dict[str, Any]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RefusedError(
            "invalid_json",
            f"line is not valid UTF-8: byte {data[error.start]:#04x} at {error.start}",
        ) from error
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise RefusedError(
            "invalid_json",
            f"line is not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}",
        ) from error
    except RecursionError as error:
        raise RefusedError("invalid_json", "line is nested too deeply") from error
    if not isinstance(value, dict):
        raise RefusedError("not_an_object", f"line must be a JSON object, got {kind_of(value)}")
    if _SURROGATE_ESCAPE.search(data):
        _refuse_surrogates(value)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    obj = dict(pairs)
    if len(obj) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise RefusedError("duplicate_key", f'"{_printable(key)}" is given twice')
            seen.add(key)
    return obj


def _parse_int(digits: str) -> int:
    # Python refuses to convert thousands of digits with an error of its own.
    value = int(digits) if len(digits) <= 20 else None
    if value is None or not _INT_MIN <= value <= _INT_MAX:
        raise RefusedError("invalid_value", f"integer {_short(digits)} does not fit in 64 bits")
    return value


def _parse_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise RefusedError("invalid_value", f"number {_short(digits)} is too large")
    return value


def _parse_constant(name: str) -> float:
    raise RefusedError("invalid_json", f"line is not valid JSON: {name} is no JSON number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys,
    parse_int=_parse_int,
    parse_float=_parse_float,
    parse_constant=_parse_constant,
)


def _refuse_surrogates(obj: dict[str, Any]) -> None:
    """Refuse half of a UTF-16 pair anywhere: it is no character and cannot be written as UTF-8."""
    stack: list[tuple[str, Any]] = list(obj.items())
    for key in obj:
        _check_text("a key", key)
    while stack:
        name, value = stack.pop()
        if isinstance(value, str):
            _check_text(f'"{_printable(name)}"', value)
        elif isinstance(value, list):
            stack += [(name, item) for item in value]
        elif isinstance(value, dict):
            for key, item in value.items():
                _check_text(f'"{_printable(name)}"', key)
                stack.append((name, item))


def _check_text(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        raise RefusedError(
            "invalid_value", f"{what} holds {code}, half of a surrogate pair"
        ) from error


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def kind_of(value: Any) -> str:
    """A value for a message: itself if it is short and simple, else what kind it is."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        # A line that is no object is refused before its surrogates are.
        text = json.dumps(_printable(value), ensure_ascii=False)
        return "a string" if len(value) > 40 else text
    return json.dumps(value)


def _short(digits: str) -> str:
    return digits if len(digits) <= 24 else digits[:20] + "…"

"""The fast parser may only ever say what the strict one says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.request_io import fast_json, strict_json
from specgen.request_io.strict_json import RefusedError

pytestmark = pytest.mark.skipif(fast_json._LOADS is None, reason="orjson is not installed")


def strictly(data: bytes) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_json, "_LOADS", None)
        try:
            return strict_json.parse_object(data)
        except RefusedError as refused:
            return refused.code


def same(left: Any, right: Any) -> bool:
    """Equality that tells 1 from 1.0 and from true, and 0.0 from -0.0."""
    return repr(left) == repr(right)


HARD = [
    b'{"a":1,"a":2}', b'{"a" :1,"a":2}', b'{"a":1,"\\u0061":2}', b'{"b":{"a":1,"a":2}}',
    b'{"b":[{"a":1,"a":2}]}', b'{"x":"\\":","a":1}', b'{"x":"\\":","a":1,"a":2}',
    b'{"a":123456789012345678901}', b'{"a":-9223372036854775809}', b'{"a":18446744073709551615}',
    b'{"a":18446744073709551616}', b'{"a":1e400}', b'{"a":-1e400}', b'{"a":1E+308}',
    b'{"a":1e-400}', b'{"a":NaN}', b'{"a":Infinity}', b'{"a":-0}', b'{"a":-0.0}', b'{"a":1.0}',
    b'{"a":01}', b'{"a":"\\ud800"}', b'{"a":"\\ud83d\\ude00"}', b'{"\\udc00":1}', b'{"a":"\xff"}',
    b'{"a":"\x00"}', b'{"a":"\\u0000"}', b'{"a":"\xe2\x80\xa8"}', b'\xef\xbb\xbf{}', b"{}", b"[]",
    b"1", b"null", b"", b'{"a":1}x', b' {"a":1}\r', b'\x0b{}', b'{"a":1,}', b"{'a':1}",
    b'{"a":tru}', b'{"a"\t:1,"a"\n:1}', b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}",
    b'{"a":' + b"[" * 20000, b'{"":1,"":2}', b'{"a":0.1234567890123456789}',
    b'{"a":' + b"9" * 400 + b'}', b'{"a":1' + b"0" * 400 + b'.5}',
]  # fmt: skip


@pytest.mark.parametrize("data", HARD)
def test_hard_cases(data: bytes) -> None:
    quick = fast_json.parse(data)
    assert quick is None or same(quick, strictly(data))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(
    obj=st.dictionaries(st.text(max_size=4), JSON, max_size=5),
    spaces=st.booleans(),
    edit=st.tuples(st.integers(0, 400), st.integers(0, 3), st.binary(max_size=3)),
)
def test_mutated_lines(obj: dict[str, Any], spaces: bool, edit: tuple[int, int, bytes]) -> None:
    text = json.dumps(obj, separators=(", ", " : ") if spaces else (",", ":"), ensure_ascii=False)
    data = text.encode("utf-8", "surrogatepass")
    at, length, put = edit
    at %= len(data) + 1
    for line in (data, data[:at] + put + data[at + length :]):
        quick = fast_json.parse(line)
        assert quick is None or same(quick, strictly(line))


@settings(max_examples=100, deadline=None)
@given(obj=st.dictionaries(st.text(max_size=4), JSON, max_size=5))
def test_what_is_written_is_read_back(obj: dict[str, Any]) -> None:
    try:
        known = strictly(json.dumps(obj).encode("utf-8", "surrogatepass"))
    except UnicodeEncodeError:
        return
    if isinstance(known, dict):
        written = fast_json.dump(known)
        assert written is not None
        assert same(json.loads(written), known)


def test_it_is_used() -> None:
    assert fast_json.parse(b'{"prompt":"a","custom_id":"q1","max_tokens":5,"temperature":0.7}')
    assert fast_json.parse(b'{"messages": [{"role": "user", "content": "hi"}]}')


@pytest.mark.parametrize("fast", [True, False])
def test_what_is_json(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr(fast_json, "_LOADS", None)
    for good in (b'{"a":1}', b'{"a":"\\ud800"}', b'{"a":1,"a":2}', b'{"a":123456789012345678901}'):
        assert fast_json.is_json(good), good
    for bad in (b"", b'{"a":1}x', b'{"a":"\x00"}', b'{"a":"\xff"}', b'{"a":1,}', b'{"a":"\n"}'):
        assert not fast_json.is_json(bad), bad

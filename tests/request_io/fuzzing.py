"""Hostile lines, and what must hold of the reader for any of them."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specgen.errors import RequestError
from specgen.pipeline.request import PromptRow, RequestOutput
from specgen.request_io.partial import read_head
from specgen.request_io.reader import ReadOptions, read_rows
from specgen.request_io.record import encode, to_record

SENTINEL = {"prompt": "sentinel \u2028 \U0001f600", "custom_id": "s", "max_tokens": 7, "seed": 3}

CORPUS: Sequence[bytes] = [
    *(
        json.dumps(row, ensure_ascii=False).encode()
        for row in (
            SENTINEL,
            {"prompt": [1, 2, 3], "temperature": 0.5, "stop": ["a", "b"], "n": 2},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
            {"prompt_token_ids": [5] * 40, "lang": {"a": [None, True, {"b": "\u0000"}]}},
            {
                "custom_id": "b", "method": "POST", "url": "/v1/chat/completions",
                "body": {"messages": [{"role": "user", "content": "y"}], "top_p": 0.9},
            },
            {"prompt": "x", "speculative": {"num_speculative_tokens": 0}, "input": 1, "index": 2},
        )
    ),
    b'{"prompt": NaN}', b'{"prompt": "a", "x": 1e999}',
    b'{"prompt": "a", "x": 123456789012345678901}',
    b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "\\ud800"}', b'{"prompt": "\xff\xfe"}',
    b'"\\ud800"',
    b'{"prompt": "a\x00b"}', b'{"prompt": "a\\u0000b"}', b'\xef\xbb\xbf{"prompt": "bom"}',
    b'{"prompt": "cr"}\r', b"\r", b"{}", b"[]", b"null", b"0", b'""', b"\x00" * 20, b"{" * 300,
    b'{"prompt": "a", "x": ' + b"[" * 150 + b"]" * 150 + b"}",
    b'{"prompt": "a", "x": ' + b"[" * 10_000,
    b'{"prompt": "a", "x": ' + b"[" * 900 + b"]" * 900 + b"}", b'{"prompt": "\xe2\x80\xa8"}',
    b"\x1e{}",
    b'{"prompt": true}', b'{"prompt": "a", "seed": 18446744073709551615}',
    b'{"prompt": "a", "n": 1.0}',
    b'{"prompt": "a", "stop_token_ids": [-1]}', b'{"prompt":"a","max_tokens":null,"top_k":null}',
]  # fmt: skip

_DEFAULTS = ReadOptions()
_TOKENS = [
    b'"', b"\\", b"{", b"}", b"[", b"]", b":", b",", b"\n", b"\r", b"\r\n", b"\x00", b"\xff",
    b"\xef\xbb\xbf",
    b"\xe2\x80\xa8", b"\xc2\x85", b"NaN", b"-Infinity", b"1e999", b"9" * 30, b"\\ud800",
    b"\\u0000", b"null",
    b"true", b"[" * 500, b'"prompt":', b'"messages":[', b'"n":', b'"body":{', b'"index":1,',
    b"\x1f\x8b",
    b"\x28\xb5\x2f\xfd", b" " * 9, b"\x0b", b"\x85", b"\xed\xa0\x80", b"\xf4\x90\x80\x80",
]  # fmt: skip


def mutate(line: bytes, noise: random.Random) -> bytes:
    """A few random edits: bytes flipped, cut, doubled, tokens put in, two lines spliced."""
    data = bytearray(line)
    for _ in range(noise.randrange(1, 5)):
        at = noise.randrange(len(data) + 1)
        end = min(len(data), at + noise.choice([1, 1, 2, 5, 20]))
        match noise.randrange(6):
            case 0:
                data[at:end] = noise.randbytes(end - at)
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = data[at:end]
            case 3:
                data[at:at] = noise.choice(_TOKENS)
            case 4:
                data[at:end] = noise.choice(_TOKENS)
            case _:
                other = noise.choice(CORPUS)
                data[at:] = other[noise.randrange(len(other) + 1) :]
    return bytes(data)


def reference_lines(data: bytes) -> list[tuple[int, bytes]]:
    """Number and content of the lines that are not blank, by the words of the specification."""
    found = []
    parts = data.split(b"\n")
    for number, part in enumerate(parts, start=1):
        if number == 1:
            part = part.removeprefix(b"\xef\xbb\xbf")
        part = part.removesuffix(b"\r")
        if part.strip():
            found.append((number, part))
    return found


def check_file(path: Path, data: bytes, options: ReadOptions = _DEFAULTS) -> int:
    """Read a file of such lines and assert what must hold; returns how many rows were good."""
    # Plain bytes that begin like a compressed file would be taken for one.
    if data[:2] == b"\x1f\x8b" or data[:4] == b"\x28\xb5\x2f\xfd":
        data = b"\n" + data
    if data[1:4] == b"\x2a\x4d\x18":
        data = b"\n" + data
    path.write_bytes(data)
    items = list(read_rows([str(path)], options))
    expected = reference_lines(data)
    assert len(items) == len(expected), "a line was lost, or counted twice"
    num_good = 0
    for index, (item, (number, content)) in enumerate(zip(items, expected, strict=True)):
        row: Any = item.row if isinstance(item, RequestOutput) else item
        assert isinstance(row, PromptRow)
        assert (row.index, row.line, row.source) == (index, number, str(path))
        assert row.input_hash == hashlib.blake2b(content, digest_size=8).hexdigest()
        if isinstance(item, RequestOutput):
            assert item.error is not None
            assert item.error.line == number
            output = item
        else:
            num_good += 1
            given = [row.prompt, row.prompt_token_ids, row.messages]
            assert sum(value is not None for value in given) == 1
            # Whatever the line carries must be writable, good row or not.
            output = RequestOutput(row, (), (), RequestError("x", "y", number))
        line = encode(to_record(output))
        assert b"\n" not in line
        head = read_head(line)
        assert head is not None
        assert (head.index, head.input_hash, head.failed) == (index, row.input_hash, True)
        json.loads(line)
        if content == CORPUS[0] and options.prompt_field == "prompt":
            assert isinstance(item, PromptRow), "a good line was refused"
            text = item.prompt or (item.messages or [])[-1]["content"]
            assert text == SENTINEL["prompt"]
            assert item.sampling.max_tokens == 7
    return num_good


def random_file(noise: random.Random, num_lines: int) -> bytes:
    """Mutated lines, with good ones between them."""
    parts = []
    for _ in range(num_lines):
        parts.append(mutate(noise.choice(CORPUS), noise))
        if noise.random() < 0.2:
            parts.append(CORPUS[0])
    return noise.choice([b"", b"\xef\xbb\xbf"]) + noise.choice([b"\n", b"\r\n"]).join(parts)

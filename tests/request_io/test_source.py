from __future__ import annotations

import gzip
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from specgen.errors import InputError, UsageError
from specgen.request_io import source
from specgen.request_io.source import check_inputs, count_rows, read_lines

TEXT = (
    b'\xef\xbb\xbf{"a": 1}\r\n'
    b"\n"
    b" \t \r\n"
    + '{"a": "x\u2028y\u0085z"}\n'.encode()
    + b'{"a": "\x0b\x0c"}\r\r\n'
    + b'\xef\xbb\xbf{"a": 2}'
)
LINES = [
    (1, b'{"a": 1}'),
    (4, '{"a": "x\u2028y\u0085z"}'.encode()),
    (5, b'{"a": "\x0b\x0c"}\r'),
    (6, b'\xef\xbb\xbf{"a": 2}'),
]


def plain(data: bytes) -> bytes:
    return data


def gzip_members(data: bytes) -> bytes:
    return gzip.compress(data[:20]) + gzip.compress(b"") + gzip.compress(data[20:])


def zstd_frames(data: bytes) -> bytes:
    compress = zstandard.ZstdCompressor().compress
    user_frame = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    return compress(data[:20]) + user_frame + compress(data[20:])


def zstd_after_user_frame(data: bytes) -> bytes:
    user_frame = b"\x5f\x2a\x4d\x18" + (0).to_bytes(4, "little")
    return user_frame + zstandard.ZstdCompressor().compress(data)


PACKERS = [plain, gzip_members, zstd_frames, zstd_after_user_frame]


@pytest.mark.parametrize("pack", PACKERS)
def test_lines(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "in"  # the name says nothing; the first bytes do
    path.write_bytes(pack(TEXT))
    lines = list(read_lines([str(path)]))
    assert [(line.line, line.data) for line in lines] == LINES
    assert {line.source for line in lines} == {str(path)}
    assert all(len(line.digest) == 16 for line in lines)
    assert count_rows([str(path), str(path)]) == 8


def test_digest_depends_on_the_bytes_without_line_end(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b'{"a": 1}\r\n{"a": 1}\n{"a":1}\n')
    first, second, third = read_lines([str(path)])
    assert first.digest == second.digest != third.digest


def test_several_inputs_keep_their_own_line_numbers(tmp_path: Path) -> None:
    paths = []
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"\n1\n")
        paths.append(str(tmp_path / name))
    assert [(line.source, line.line) for line in read_lines(paths)] == [(p, 2) for p in paths]


def test_a_pipe_is_read_once_and_not_counted(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_inputs([str(pipe)])
    assert count_rows([str(pipe)]) is None

    def feed() -> None:
        with open(pipe, "wb", buffering=0) as file:
            for byte in zstd_frames(TEXT):
                file.write(bytes([byte]))

    thread = threading.Thread(target=feed)
    thread.start()
    assert [(line.line, line.data) for line in read_lines([str(pipe)])] == LINES
    thread.join()


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_a_cut_file_is_an_error_and_not_an_end(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    noise = random.Random(0)
    data = b"".join(b'{"prompt": "%d"}\n' % noise.getrandbits(200) for _ in range(40_000))
    path = tmp_path / "in"
    path.write_bytes(pack(data)[:-100])
    read: list[source.RawLine] = []
    with pytest.raises(InputError, match="cannot be read further") as error:
        read.extend(read_lines([str(path)]))
    assert len(read) > 1000
    assert f"{path}:" in error.value.message
    assert error.value.hint is not None
    assert "damaged or incomplete" in error.value.hint
    with pytest.raises(InputError, match="cannot be read further"):
        count_rows([str(path)])
    assert count_rows([str(path)], limit=10) == 10


def test_large_inputs_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"1\n" * 50)
    monkeypatch.setattr(source, "_COUNT_AT_MOST_BYTES", 100)
    assert count_rows([str(path)]) == 50
    assert count_rows([str(path), str(path)]) is None
    path.write_bytes(gzip.compress(b"1\n" * 50))
    assert count_rows([str(path)]) is None
    assert count_rows(["-"]) is None
    with pytest.raises(InputError):
        count_rows([str(tmp_path / "missing")])


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_bytes_after_the_compressed_data_are_an_error(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "in"
    path.write_bytes(pack(b"1\n") + b"rubbish that is no frame")
    with pytest.raises(InputError, match="cannot be read"):
        list(read_lines([str(path)]))


@pytest.mark.parametrize("size", [-1, 0, 1, 2, 3, 5000])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_line_that_is_too_long_costs_itself_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, start: bytes, end: bytes
) -> None:
    monkeypatch.setattr(source, "MAX_LINE_BYTES", 100)
    path = tmp_path / "in"
    path.write_bytes(start + b"x" * (100 + size) + end + (b'{"a": 1}' if end else b""))
    lines = list(read_lines([str(path)]))
    assert [line.line for line in lines] == ([1, 2] if end else [1])
    # A byte-order mark may make a line at the limit look longer than it is; never shorter.
    assert lines[0].too_long == (size > 0) or (start and lines[0].too_long)
    if not lines[0].too_long:
        assert len(lines[0].data) == 100 + size
    if end:
        assert lines[1].data == b'{"a": 1}'


def test_unreadable_inputs(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.jsonl")
    with pytest.raises(InputError, match=r"missing\.jsonl: cannot be read: No such file"):
        check_inputs([missing])
    with pytest.raises(InputError, match="is a directory"):
        check_inputs([str(tmp_path)])
    with pytest.raises(InputError, match="cannot be read"):
        check_inputs(["nul\0byte"])
    with pytest.raises(UsageError, match="only once"):
        check_inputs(["-", "-"])
    with pytest.raises(UsageError, match="no input"):
        check_inputs([])
    with pytest.raises(InputError, match="No such file"):
        list(read_lines([missing]))


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "in"
    for data in (b"", b"\n\n", b"\xef\xbb\xbf"):
        path.write_bytes(data)
        assert list(read_lines([str(path)])) == []


ENCODINGS = {
    "utf-16": (b"", "UTF-16"),  # with the mark that Python writes
    "utf-16-be": (b"\xfe\xff", "UTF-16"),
    "utf-32": (b"", "UTF-32"),
    "utf-32-be": (b"\x00\x00\xfe\xff", "UTF-32"),
}


@pytest.mark.parametrize("encoding", [*ENCODINGS, "utf-16-le", "utf-32-le", "UTF-16BE", "UTF-32BE"])
@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("text", ['{"prompt": "a"}\n', '\n\n{"prompt": "ü"}\n'])
def test_another_encoding_is_one_error_with_a_way_out(
    tmp_path: Path, pack: Callable[[bytes], bytes], encoding: str, text: str
) -> None:
    unmarked = "".join(encoding.upper().rsplit("-", encoding.count("-") - 1))
    mark, name = ENCODINGS.get(encoding, (b"", unmarked))
    path = tmp_path / "in.jsonl"
    path.write_bytes(pack(mark + text.encode(encoding)))
    with pytest.raises(InputError, match=rf"in\.jsonl: is {name}, ") as error:
        list(read_lines([str(path)]))
    assert f"iconv -f {name} -t UTF-8" in str(error.value.hint)


def test_bytes_that_only_resemble_a_mark_cost_one_row(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xff{"prompt": "a"}\n{"prompt": "b"}\n')
    assert len(list(read_lines([str(path)]))) == 2

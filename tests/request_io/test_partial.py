from __future__ import annotations

import json
import os
import random
import tracemalloc
from pathlib import Path

import pytest

from specgen.request_io import partial
from specgen.request_io.partial import Head, LineReader, RowIndex, ScanResult, read_head, scan
from specgen.request_io.shard import Shard


def line(index: int, status: str = "ok", size: int = 0) -> bytes:
    record = {"index": index, "input_hash": f"{index:016x}", "status": status, "text": "é" * size}
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def scan_bytes(
    tmp_path: Path, data: bytes, shard: Shard | None = None
) -> tuple[ScanResult, RowIndex]:
    path = tmp_path / "x.partial"
    path.write_bytes(data)
    rows = RowIndex(shard or Shard())
    with open(path, "rb") as file:
        return scan(file.fileno(), rows), rows


def test_heads() -> None:
    assert read_head(line(7)) == Head(7, "0000000000000007", False)
    assert read_head(line(7, "error")) == Head(7, "0000000000000007", True)
    for other in (b"", b"{}\n", line(7)[1:], line(7).replace(b'"ok"', b'"so"'), b"\0" * 100):
        assert read_head(other) is None


@pytest.mark.parametrize("buffer", [1 << 20, 100, 7])
def test_every_line_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer: int) -> None:
    monkeypatch.setattr(partial, "_SCAN_BYTES", buffer)
    monkeypatch.setattr(partial, "_WINDOW_BYTES", max(buffer, partial.HEAD_BYTES))
    noise = random.Random(3)
    order = list(range(60))
    noise.shuffle(order)
    lines = {i: line(i, noise.choice(["ok", "error"]), noise.randrange(90)) for i in order}
    data = b"".join(lines[i] for i in order)
    for torn in (b"", b'{"index":99', line(99)[:-1]):
        result, rows = scan_bytes(tmp_path, data + torn)
        assert (result.size, result.num_lines, result.num_damaged) == (len(data), 60, 0)
        assert not result.in_order
        assert rows.count() == 60
        assert rows.offset(99) == -1
        with open(tmp_path / "x.partial", "rb") as file:
            reader = LineReader(file.fileno())
            for index in noise.sample(order, 60):
                assert reader.line(rows.offset(index)) == lines[index]
                head = reader.head(rows.offset(index))
                assert head == read_head(lines[index])
        assert list(rows.missing(62)) == [60, 61]


def test_the_last_line_of_a_row_counts(tmp_path: Path) -> None:
    data = line(0, "error") + line(1) + line(0, size=3)
    result, rows = scan_bytes(tmp_path, data)
    assert (result.num_lines, rows.count(), rows.drop_failed()) == (3, 2, 0)
    assert rows.offset(0) == len(line(0, "error") + line(1))
    result, rows = scan_bytes(tmp_path, line(0) + line(0, "error"))
    assert rows.drop_failed() == 1
    assert rows.offset(0) == -1


@pytest.mark.parametrize(
    "damaged",
    [
        b"\n",
        b"nonsense\n",
        line(1)[:40] + b"\n",
        line(1)[:60] + b"\0\0\0" + line(1)[60:],
        b"\0" * 5000 + b"\n",
        b'{"index":1e3,"input_hash":"0000000000000001","status":"ok"}\n',
        b'{"index":01,"input_hash":"0000000000000001","status":"ok"}\n',
        *(
            b'{"index":%d,"input_hash":"0000000000000001","status":"ok"}\n' % index
            for index in (10**9, 10**12, 10**18 - 1)
        ),
    ],
)
def test_damaged_lines_are_left_out(tmp_path: Path, damaged: bytes) -> None:
    result, rows = scan_bytes(tmp_path, line(0) + damaged + line(2))
    assert (result.num_lines, result.num_damaged) == (3, 1)
    assert list(rows.missing(3)) == [1]


def test_rows_may_be_far_ahead_of_those_before_them(tmp_path: Path) -> None:
    for shard in (Shard(), Shard(2, 999)):
        indices = [shard.index(position) for position in (0, 500_000)]
        result, rows = scan_bytes(tmp_path, b"".join(map(line, indices)), shard)
        assert result.num_damaged == 0
        assert [rows.offset(index) for index in indices] == [0, len(line(indices[0]))]


def test_rows_of_other_shards_do_not_belong_here(tmp_path: Path) -> None:
    shard = Shard(2, 3)
    result, rows = scan_bytes(tmp_path, line(1) + line(2) + line(7), shard)
    assert result.num_damaged == 1
    assert list(rows.missing(4)) == [4, 10]


def test_a_file_cut_by_another_program_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(line(0)[:50])
    with open(path, "rb") as file, pytest.raises(OSError, match="cut off"):
        LineReader(file.fileno()).line(0)


def test_ten_bytes_of_memory_a_row(tmp_path: Path) -> None:
    num_rows = 50_000
    path = tmp_path / "x"
    with open(path, "wb") as file:
        for index in range(num_rows):
            file.write(line(index))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        rows = RowIndex()
        with open(path, "rb") as file:
            scan(file.fileno(), rows)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert rows.count() == num_rows
    assert held < 10 * num_rows


def test_a_long_line_is_not_copied_once_a_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "_SCAN_BYTES", 1000)
    data = line(0) + line(1, size=40_000) + line(2)
    reads: list[int] = []
    real = os.pread

    def spy(fd: int, size: int, offset: int) -> bytes:
        got = real(fd, size, offset)
        reads.append(len(got))
        return got

    monkeypatch.setattr(os, "pread", spy)
    result, rows = scan_bytes(tmp_path, data)
    assert (result.num_lines, rows.count()) == (3, 3)
    assert sum(reads) < 3 * len(data)

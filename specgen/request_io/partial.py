"""What a file of output rows holds, found by the heads of its lines.

Every output line begins with its index, the hash of its input line and its status, in this order.
So a resume keeps no rows of an earlier run: it notes where each row's line begins, eight bytes a
row, and reads a head again when the row's turn comes. It parses lines only to find damaged ones.
"""

from __future__ import annotations

import errno
import os
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from specgen.request_io.fast_json import is_json
from specgen.request_io.shard import WHOLE, Shard

__all__ = ["HEAD_BYTES", "Head", "LineReader", "RowIndex", "ScanResult", "read_head", "scan"]

#: No head is longer: keys, a 64-bit index, 16 hex digits, a status.
HEAD_BYTES = 96

# No line is shorter than its head, and rows are read ahead by far fewer than this: an index beyond
# both is a damaged one, and must not become the length of a list.
_HEAD_AT_LEAST = 57
_AHEAD_AT_MOST = 1 << 20

_SCAN_BYTES = 4 << 20
_WINDOW_BYTES = 1 << 16
_HEAD = re.compile(
    rb'\{"index":(0|[1-9]\d{0,17}),"input_hash":"([0-9a-f]{16})","status":"(ok|error)"'
)


@dataclass(frozen=True, slots=True)
class Head:
    """The first keys of an output line."""

    index: int
    input_hash: str
    failed: bool


def read_head(line: bytes) -> Head | None:
    """The head of a line, or of its first `HEAD_BYTES`; None if it is no line of an output."""
    found = _HEAD.match(line)
    if found is None:
        return None
    return Head(int(found[1]), found[2].decode(), found[3] == b"error")


class RowIndex:
    """Where the line of each row begins: eight bytes a row, whether it failed included.

    Args:
        shard: the rows that count; others are refused.
    """

    def __init__(self, shard: Shard = WHOLE) -> None:
        self.shard = shard
        # offset * 2 + failed; -1 for rows that have no line.
        self._entries = array("q")

    def __len__(self) -> int:
        """Rows up to the last one that was put, of this shard."""
        return len(self._entries)

    def put(self, index: int, offset: int, failed: bool) -> None:
        """Note a line; a later line of the same row replaces it."""
        entries, position = self._entries, self.shard.position(index)
        if position >= len(entries):
            entries.extend([-1] * (position + 1 - len(entries)))
        entries[position] = offset << 1 | failed

    def offset(self, index: int) -> int:
        """Where the row's line begins; -1 if it has none."""
        position = self.shard.position(index)
        return self._entries[position] >> 1 if position < len(self._entries) else -1

    def failed(self, index: int) -> bool:
        """Whether the row's line is that of a failed row."""
        return self.offset(index) >= 0 and bool(self._entries[self.shard.position(index)] & 1)

    def drop(self, index: int) -> None:
        """Forget the row's line."""
        self._entries[self.shard.position(index)] = -1

    def count_failed(self) -> int:
        """Rows whose line is that of a failed row."""
        return sum(entry >= 0 and entry & 1 for entry in self._entries)

    def drop_failed(self) -> int:
        """Forget the lines of failed rows; returns how many."""
        entries, dropped = self._entries, 0
        for position, entry in enumerate(entries):
            if entry >= 0 and entry & 1:
                entries[position] = -1
                dropped += 1
        return dropped

    def truncate(self, num_rows: int) -> None:
        """Forget rows beyond the first `num_rows` of the shard."""
        del self._entries[num_rows:]

    def count(self, num_rows: int | None = None) -> int:
        """Rows that have a line, all or among the first `num_rows` of the shard."""
        entries = self._entries if num_rows is None else self._entries[:num_rows]
        return len(entries) - entries.count(-1)

    def missing(self, num_rows: int) -> Iterator[int]:
        """Indices of the shard's first `num_rows` rows that have no line."""
        for position in range(num_rows):
            if position >= len(self._entries) or self._entries[position] < 0:
                yield self.shard.index(position)

    def offsets(self) -> Iterator[int]:
        """Beginnings of lines in input order; rows without one are left out."""
        return (entry >> 1 for entry in self._entries if entry >= 0)


class LineReader:
    """Lines at given offsets of a file, through one window: quick where neighbours are near."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._window = b""
        self._start = 0

    def head(self, offset: int) -> Head | None:
        """Head of the line at `offset`."""
        place = offset - self._start
        if not 0 <= place <= len(self._window) - HEAD_BYTES:
            self._load(offset)
            place = 0
        return read_head(self._window[place : place + HEAD_BYTES])

    def line(self, offset: int) -> bytes:
        """The line at `offset`, its end included.

        Raises:
            OSError: the file ends before the line does.
        """
        place = offset - self._start
        if not 0 <= place < len(self._window):
            self._load(offset)
            place = 0
        end = self._window.find(b"\n", place)
        if end >= 0:
            return self._window[place : end + 1]
        parts: list[bytes] = []
        at = offset
        while True:
            part = os.pread(self._fd, _SCAN_BYTES, at)
            if not part:
                raise OSError(errno.EIO, "a line is cut off: another program changed the file")
            end = part.find(b"\n")
            if end >= 0:
                # What comes next is likely the line after.
                self._window, self._start = part, at
                return b"".join((*parts, part[: end + 1]))
            parts.append(part)
            at += len(part)

    def _load(self, offset: int) -> None:
        self._window = os.pread(self._fd, _WINDOW_BYTES, offset)
        self._start = offset


@dataclass(slots=True)
class ScanResult:
    """What a scan found.

    Attributes:
        size: bytes of whole lines; what follows is a torn line.
        num_lines: whole lines.
        num_damaged: lines among them that are no rows of this output; they are not indexed.
        in_order: whether the indexed lines come in ascending order of their rows.
        last_index: row of the last indexed line; -1 without one.
    """

    size: int = 0
    num_lines: int = 0
    num_damaged: int = 0
    in_order: bool = True
    last_index: int = -1


def scan(fd: int, rows: RowIndex, *, whole: bool = False) -> ScanResult:
    """Put every line of a file into `rows`.

    Args:
        fd: the file.
        rows: takes the lines.
        whole: parse each line too, so that a hole or garbage inside one is found.

    A line without a proper head or end, of a row that cannot be that far on, or with a NUL (which
    JSON never holds, but blocks that a power failure kept from the disk do), counts as damaged: its
    row will be generated again.
    """
    result = ScanResult()
    most_lines = os.fstat(fd).st_size // _HEAD_AT_LEAST + _AHEAD_AT_MOST
    end_index = most_lines * rows.shard.count
    rest, at = b"", 0
    while chunk := os.pread(fd, _SCAN_BYTES, at):
        at += len(chunk)
        if chunk.find(b"\n") < 0 and rest:
            # Joined only once, when the line ends: a long line must not be copied per chunk.
            rest = _join_line(fd, result.size, at)
            at = result.size + len(rest)
        else:
            rest += chunk
        end = rest.rfind(b"\n") + 1
        if end:
            _scan_lines(rest, end, result, rows, whole, end_index)
            rest = rest[end:]
    return result


def _join_line(fd: int, start: int, at: int) -> bytes:
    """Bytes from `start` up to the chunk in which the line that begins there ends."""
    parts = [os.pread(fd, at - start, start)]
    while chunk := os.pread(fd, _SCAN_BYTES, at):
        parts.append(chunk)
        at += len(chunk)
        if b"\n" in chunk:
            break
    return b"".join(parts)


def _scan_lines(
    data: bytes, end: int, result: ScanResult, rows: RowIndex, whole: bool, end_index: int
) -> None:
    match, find, owns, put = _HEAD.match, data.find, rows.shard.owns, rows.put
    base = result.size
    has_nul = data.find(b"\0", 0, end) >= 0
    start, last, in_order = 0, result.last_index, result.in_order
    while start < end:
        stop = find(b"\n", start)
        head = match(data, start, stop)
        result.num_lines += 1
        if (
            head is None
            or data[stop - 1] != 125  # }
            or (index := int(head[1])) >= end_index
            or not owns(index)
            or (has_nul and find(b"\0", start, stop) >= 0)
            or (whole and not is_json(data[start:stop]))
        ):
            result.num_damaged += 1
        else:
            put(index, base + start, head[3] == b"error")
            in_order &= index > last
            last = index
        start = stop + 1
    result.size = base + end
    result.last_index, result.in_order = last, in_order

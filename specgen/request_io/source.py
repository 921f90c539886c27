"""Input bytes: files, stdin, gzip and zstd, split into raw lines that know where they came from.

Only ``\\n`` ends a line, so that U+2028, a form feed or a lone carriage return inside a prompt
stays inside it. Nothing here holds more than one line and one buffer of a file.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import os
import stat
import sys
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, cast

from specgen.errors import InputError, UsageError
from specgen.wording import legible

__all__ = [
    "MAX_LINE_BYTES",
    "STDIN",
    "InputState",
    "RawLine",
    "check_inputs",
    "count_rows",
    "hash_rows",
    "read_lines",
]

STDIN = "-"
#: A longer line is no prompt but a file of another kind; it becomes one error row.
MAX_LINE_BYTES = 64 * 2**20

_BUFFER_BYTES = 1 << 20
_COUNT_AT_MOST_BYTES = 512 * 2**20
_BOM = b"\xef\xbb\xbf"
# Byte-order marks, the longer ones first, and what two letters look like without one: 0 is a zero.
_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_ZEROS = {"1000": "UTF-32LE", "0001": "UTF-32BE", "1010": "UTF-16LE", "0101": "UTF-16BE"}
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_MAGIC_BYTES = 4
_WAYS_OUT: dict[type[Exception], str] = {
    FileNotFoundError: "check the name; relative names start from the current folder",
    PermissionError: "let this user read it: chmod u+r, or ask its owner",
}


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line that is not blank.

    Attributes:
        source: the file as the user named it; `<stdin>` for standard input.
        line: line number in that file, from 1, blank lines counted.
        data: its bytes without line end and byte-order mark; empty if `too_long`.
        digest: 16 hex digits of a hash of those bytes.
        too_long: whether it exceeds `MAX_LINE_BYTES`.
    """

    source: str
    line: int
    data: bytes
    digest: str
    too_long: bool = False


class InputState:
    """Size and time of the input's files, to see whether they have changed while they were read.

    Args:
        paths: inputs; those that are no regular files are not watched.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._files = {path: state for path in paths if (state := _file_state(path)) is not None}

    def check(self) -> list[str]:
        """Files that have been changed since, though none has lost lines.

        Raises:
            InputError: a file is shorter than it was, so that lines were missed.
        """
        changed = []
        for path, before in self._files.items():
            now = _file_state(path)
            if now == before:
                continue
            if now is not None and now[0] < before[0]:
                raise InputError(
                    f"{path}: was {before[0]:,} bytes when the run began, and is {now[0]:,} now",
                    "restore it and give the same command again",
                )
            changed.append(path)
        return changed


def _file_state(path: str) -> tuple[int, int] | None:
    """Size and time of a regular file; None of anything else, or if it is gone."""
    if path == STDIN:
        return None
    try:
        info = os.stat(path)
    except OSError:
        return None
    return (info.st_size, info.st_mtime_ns) if stat.S_ISREG(info.st_mode) else None


class _Chunks(io.RawIOBase):
    """A raw stream over a function that returns what is at hand, with some bytes put before it."""

    def __init__(self, read: Callable[[int], bytes | None], prefix: bytes = b"") -> None:
        self._read = read
        self._prefix = prefix

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._prefix:
            chunk = self._prefix[: len(buffer)]
            self._prefix = self._prefix[len(chunk) :]
        else:
            chunk = self._read(len(buffer)) or b""
        buffer[: len(chunk)] = chunk
        return len(chunk)


class _ZstdReader(io.RawIOBase):
    """All frames of a zstd stream, one after another; a cut frame is an error, not an end."""

    def __init__(self, compressed: io.RawIOBase) -> None:
        import zstandard

        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._compressed = compressed
        self._frame = self._new_frame()
        self._inside = False
        self._input = b""
        self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._output:
            if not self._input:
                self._input = self._compressed.read(_BUFFER_BYTES) or b""
                if not self._input:
                    if self._inside:
                        raise EOFError("compressed file ended before the end of its last frame")
                    return 0
            self._output = self._frame.decompress(self._input)
            self._inside = not self._frame.eof
            self._input = b"" if self._inside else self._frame.unused_data
            if not self._inside:
                self._frame = self._new_frame()
        chunk = self._output[: len(buffer)]
        self._output = self._output[len(chunk) :]
        buffer[: len(chunk)] = chunk
        return len(chunk)


def source_name(path: str) -> str:
    """How messages call an input."""
    return "<stdin>" if path == STDIN else legible(path)


def _reason(error: BaseException) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def check_inputs(paths: Sequence[str]) -> None:
    """Refuse inputs that cannot be read, before anything slow begins.

    Raises:
        UsageError: no input at all, or standard input named twice.
        InputError: a file that is missing, unreadable, or a directory.
    """
    if not paths:
        raise UsageError("no input given", "name a JSONL file, or - for standard input")
    if sum(path == STDIN for path in paths) > 1:
        raise UsageError("standard input (-) can be read only once")
    for path in paths:
        if path == STDIN:
            continue
        try:
            mode = os.stat(path).st_mode
            if stat.S_ISDIR(mode):
                raise InputError(f"{path}: is a directory", "name the files in it: DIR/*.jsonl")
            if stat.S_ISREG(mode):
                with open(path, "rb"):
                    pass
            elif not os.access(path, os.R_OK):
                raise PermissionError(None, "Permission denied")
        except (OSError, ValueError) as error:
            raise InputError(
                f"{path}: cannot be read: {_reason(error)}", _WAYS_OUT.get(type(error))
            ) from error


def _open_plain(path: str) -> BinaryIO:
    if path != STDIN:
        return open(path, "rb", buffering=0)
    stdin = sys.stdin
    if stdin is None:
        raise InputError("<stdin>: standard input is closed")
    buffer = stdin.buffer
    # The raw file returns what a pipe holds now; the buffered one would wait for a full buffer.
    return cast(BinaryIO, getattr(buffer, "raw", buffer))


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    """Decompressed bytes of one input."""
    plain = _open_plain(path)
    try:
        head = b""
        while len(head) < _MAGIC_BYTES and (more := plain.read(_MAGIC_BYTES - len(head))):
            head += more
        raw: io.RawIOBase = _Chunks(plain.read, head)
        if head.startswith(_GZIP_MAGIC):
            members = gzip.GzipFile(fileobj=io.BufferedReader(raw, _BUFFER_BYTES))
            # read() would lose what it has already decompressed when it meets damage.
            raw = _Chunks(members.read1)
        elif head == _ZSTD_MAGIC or _is_skippable_frame(head):
            raw = _ZstdReader(raw)
        with io.BufferedReader(raw, _BUFFER_BYTES) as stream:
            _refuse_other_encodings(path, stream.peek(_MAGIC_BYTES)[:_MAGIC_BYTES])
            yield cast(BinaryIO, stream)
    finally:
        if path != STDIN:
            plain.close()


def _refuse_other_encodings(path: str, head: bytes) -> None:
    """None of its lines could be read, and what each of them said would not name the cause."""
    zeros = "".join(str(int(byte != 0)) for byte in head)
    found = next(
        (name for mark, name in _MARKS.items() if head.startswith(mark)), _ZEROS.get(zeros)
    )
    if found is not None:
        raise InputError(
            f"{source_name(path)}: is {found}, and JSONL is UTF-8",
            f"convert it: iconv -f {found} -t UTF-8",
        )


def _is_skippable_frame(head: bytes) -> bool:
    """Whether a zstd stream begins with a frame of user data, as seekable archives do."""
    return len(head) == _MAGIC_BYTES and head[1:] == b"\x2a\x4d\x18" and head[0] >> 4 == 5


def read_lines(paths: Sequence[str]) -> Generator[RawLine]:
    """Lines of all inputs in order, blank ones skipped.

    Raises:
        InputError: a file that cannot be opened, is not UTF-8, or whose compressed data is damaged.
    """
    for path in paths:
        source, line = source_name(path), 0
        try:
            with _open(path) as stream:
                while chunk := stream.readline(MAX_LINE_BYTES + 2):
                    line += 1
                    ended = chunk.endswith(b"\n")
                    data = chunk.removeprefix(_BOM) if line == 1 else chunk
                    data = data.removesuffix(b"\n").removesuffix(b"\r")
                    if len(data) > MAX_LINE_BYTES or (
                        not ended and len(chunk) == MAX_LINE_BYTES + 2
                    ):
                        digest = _digest_of_rest(data, stream, ended)
                        yield RawLine(source, line, b"", digest, too_long=True)
                    elif data.strip():
                        digest = hashlib.blake2b(data, digest_size=8).hexdigest()
                        yield RawLine(source, line, data, digest)
        except InputError:
            raise
        except (OSError, EOFError, zlib.error) as error:
            raise _damaged(source, line, error) from error
        except Exception as error:
            # zstandard is imported only for zstd input, so its error cannot be named above.
            if type(error).__module__.partition(".")[0] != "zstandard":
                raise
            raise _damaged(source, line, error) from error


def _damaged(source: str, line: int, error: BaseException) -> InputError:
    where = f"{source}: cannot be read" if not line else f"{source}:{line}: cannot be read further"
    hint = None
    if not isinstance(error, OSError) or isinstance(error, gzip.BadGzipFile):
        hint = "the compressed file is damaged or incomplete; test it with gzip -t or zstd -t"
    return InputError(f"{where}: {_reason(error)}", hint)


def _digest_of_rest(start: bytes, stream: BinaryIO, ended: bool) -> str:
    digest = hashlib.blake2b(start, digest_size=8)
    while not ended and (more := stream.readline(_BUFFER_BYTES)):
        ended = more.endswith(b"\n")
        digest.update(more.removesuffix(b"\n"))
    return digest.hexdigest()


def hash_rows(paths: Sequence[str], limit: int | None = None) -> str:
    """32 hex digits over the hashes of the rows of all inputs, in order.

    Raises:
        InputError: an input cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for raw in itertools.islice(read_lines(paths), limit):
        digest.update(bytes.fromhex(raw.digest))
    return digest.hexdigest()


def count_rows(paths: Sequence[str], limit: int | None = None) -> int | None:
    """Lines that are not blank, at most `limit`.

    Returns None where counting would take long, or use up an input that can be read only once.

    Raises:
        InputError: an input turns out to be unreadable or damaged: better now than hours later.
    """
    size = 0
    for path in paths:
        if path == STDIN:
            return None
        try:
            info = os.stat(path)
            if not stat.S_ISREG(info.st_mode):
                return None
            with open(path, "rb") as file:
                head = file.read(_MAGIC_BYTES)
        except OSError as error:
            raise _damaged(path, 0, error) from error
        compressed = head.startswith(_GZIP_MAGIC) or head == _ZSTD_MAGIC
        # Decompression runs about ten times slower than a scan.
        size += info.st_size * (10 if compressed else 1)
    if size > _COUNT_AT_MOST_BYTES:
        return None
    return sum(1 for _ in itertools.islice(read_lines(paths), limit))

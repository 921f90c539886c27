"""Output lines on their way to a descriptor, each in one piece."""

from __future__ import annotations

import errno
import io
import os
import select
from collections.abc import Callable
from typing import Any, BinaryIO, cast

import jsonlines

from specgen.errors import OutputError
from specgen.request_io.record import encode

__all__ = ["json_lines", "write_all", "write_failed"]


_HINTS = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or that of the file system",
    errno.EROFS: "choose an output on a file system that can be written",
}


def write_failed(path: str | None, what: str, error: Exception) -> OutputError:
    """The error of an output: its name, what could not be done, and why."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    hint = _HINTS.get(error.errno) if isinstance(error, OSError) and error.errno else None
    return OutputError(f"{path or '<stdout>'}: {what}: {reason}", hint)


def write_all(fd: int, data: bytes) -> None:
    """Write everything, however little the system takes at a time."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # a full pipe that another program has set not to block
            _wait_until_writable(fd)


def _wait_until_writable(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll()


class _LineSink(io.RawIOBase):
    """Gathers what jsonlines writes in pieces, and passes each line on in one piece."""

    def __init__(self, deliver: Callable[[bytes], None]) -> None:
        self._deliver = deliver
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        line, self._parts = b"".join(self._parts), []
        if line:
            self._deliver(line)


def json_lines(deliver: Callable[[bytes], None]) -> jsonlines.Writer:
    """A writer of records that passes each line to `deliver` as one piece of bytes."""
    return jsonlines.Writer(cast(BinaryIO, _LineSink(deliver)), dumps=encode, flush=True)

"""Where finished rows go: standard output, pipes and devices here, files in `file_writer`."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from specgen.errors import OutputError
from specgen.request_io.file_writer import FileWriter, OutputOptions
from specgen.request_io.lines import json_lines, write_all, write_failed
from specgen.request_io.partial import Head
from specgen.request_io.place import Stream, check_apart, find_place
from specgen.request_io.source import STDIN

__all__ = ["RowWriter", "StreamWriter", "open_writer"]


class RowWriter(Protocol):
    """Takes each row of the output once."""

    #: Where the rows go, for messages; None is standard output.
    path: str | None

    @property
    def num_rows(self) -> int:
        """Rows that the output holds now, of earlier runs and this one."""

    @property
    def num_failed(self) -> int:
        """Failed rows among them."""

    @property
    def created(self) -> int:
        """When the output was begun, by its first run: seconds since 1970."""

    def keep(self, index: int, input_hash: str) -> Head | None:
        """The row's line that an earlier run left, if it stays in the output."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one row; it is in the hands of the system when this returns."""

    def earlier_lines(self) -> Iterator[bytes]:
        """Lines of earlier runs that stay in the output, in any order."""

    def finish(self, num_rows: int, meta: Mapping[str, Any]) -> None:
        """Complete the output of an input of `num_rows` rows; `meta` describes the run."""

    def abort(self) -> str | None:
        """Stop early and keep what was written; returns where it lies, None if nowhere."""


def open_writer(
    path: str | None,
    options: OutputOptions | None = None,
    *,
    inputs: tuple[str, ...] = (),
    notify: Callable[[str], None] = lambda _: None,
) -> RowWriter:
    """The writer that fits an `-o` argument.

    Args:
        path: file to write; None or `-` is standard output. Symbolic links are resolved.
        options: what to do about earlier outputs of that name; streams have none.
        inputs: paths that the run reads, which must not be replaced.
        notify: takes remarks for the user, such as the disk space the last pass needs.

    Raises:
        UsageError: the output exists, was made with other settings, or would overwrite an input.
        OutputComplete: the output is finished, and `options.resume` is content with it.
        OutputError: it cannot be created.
    """
    place = find_place(path)
    if isinstance(place, Stream):
        return StreamWriter(place.path, place.fd, owned=place.owned)
    assert path is not None
    try:
        check_apart(path, place, (p for p in inputs if p != STDIN), "is an input of this run")
        return FileWriter(place, path, options, notify=notify)
    except (OSError, ValueError) as error:
        raise write_failed(path, "cannot be created", error) from error


class StreamWriter:
    """Rows in completion order to a descriptor; each line is written as soon as it is finished.

    Args:
        path: name for messages; None is standard output.
        fd: descriptor to write to; None is that of standard output.
        owned: whether to close it at the end.

    A reader that has gone away raises `BrokenPipeError`, any other failure `OutputError`.
    """

    def __init__(self, path: str | None, fd: int | None, *, owned: bool = False) -> None:
        self.path = path
        self._fd = fd
        self._owned = owned
        if fd is None and sys.stdout is None:
            raise OutputError("<stdout>: is closed", "give -o FILE")
        self._lines = json_lines(self._deliver)
        self._num_rows = self._num_failed = 0
        self._created = int(time.time())

    @property
    def num_rows(self) -> int:
        """Rows written."""
        return self._num_rows

    @property
    def num_failed(self) -> int:
        """Failed rows among them."""
        return self._num_failed

    @property
    def created(self) -> int:
        """When the stream was opened: seconds since 1970."""
        return self._created

    def keep(self, index: int, input_hash: str) -> Head | None:
        """None: a stream has no earlier run."""
        del index, input_hash
        return None

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one row."""
        self._lines.write(record)
        self._num_rows += 1
        self._num_failed += record["status"] == "error"

    def _deliver(self, line: bytes) -> None:
        try:
            if self._fd is not None:
                write_all(self._fd, line)
                return
            try:
                fd = sys.stdout.fileno()
            except (io.UnsupportedOperation, AttributeError):
                # Captured output, as in tests and notebooks.
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            else:
                write_all(fd, line)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise write_failed(self.path, "cannot be written", error) from error

    def earlier_lines(self) -> Iterator[bytes]:
        """None."""
        return iter(())

    def finish(self, num_rows: int, meta: Mapping[str, Any]) -> None:
        """Close an owned descriptor; a stream has no place for `meta`."""
        del num_rows, meta
        self.abort()

    def abort(self) -> None:
        """Close an owned descriptor."""
        if self._owned and self._fd is not None:
            fd, self._fd = self._fd, None
            with contextlib.suppress(OSError):
                os.close(fd)

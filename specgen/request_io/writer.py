"""Where finished rows go: a stream, or a file that is complete once it has its name.

`FileWriter` appends every row to `OUT.partial` as it finishes, one whole line a write, so that a
killed job keeps what it finished and no line is ever torn in a finished file. At the end the rows
are put in input order and the file takes its name. `StreamWriter` serves stdout, pipes and devices.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import shutil
import stat
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import jsonlines

from specgen.errors import OutputError, UsageError
from specgen.request_io.record import encode

__all__ = ["FileWriter", "RowWriter", "StreamWriter", "open_writer"]

_FSYNC_SECONDS = 5.0
_COPY_BYTES = 1 << 20
_FD_PATH = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")


class RowWriter(Protocol):
    """Takes each row of the output once."""

    #: Where the rows go, for messages; None is standard output.
    path: str | None

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one row; it is in the hands of the system when this returns."""

    def finish(self, num_rows: int, meta: Mapping[str, Any]) -> None:
        """Complete the output, which holds rows 0..num_rows-1; `meta` describes the run."""

    def abort(self) -> str | None:
        """Stop early and keep what was written; returns where it lies, None if nowhere."""


def open_writer(
    path: str | None,
    *,
    overwrite: bool = False,
    inputs: tuple[str, ...] = (),
    notify: Callable[[str], None] = lambda _: None,
) -> RowWriter:
    """The writer that fits an `-o` argument.

    Args:
        path: file to write; None or `-` is standard output. Symbolic links are resolved.
        overwrite: whether a finished or partial output of that name may be replaced.
        inputs: paths that the run reads, which must not be replaced.
        notify: takes remarks for the user, such as the disk space the last pass needs.

    Raises:
        UsageError: the output exists, or is an input.
        OutputError: it cannot be created.
    """
    if path in (None, "-", "/dev/stdout"):
        return StreamWriter(None, None)
    assert path is not None
    if found := _FD_PATH.fullmatch(path):
        return StreamWriter(path, int(found.group(1)))
    try:
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode if target.exists() else None
        if mode is not None and stat.S_ISDIR(mode):
            raise OutputError(f"{path}: is a directory", "give a file name")
        if mode is not None and not stat.S_ISREG(mode):
            return StreamWriter(path, os.open(target, os.O_WRONLY), owned=True)
        for source in inputs:
            if source != "-" and _same_file(source, target):
                raise UsageError(f"{path}: is an input of this run", "choose another output")
        return FileWriter(target, path, overwrite=overwrite, notify=notify)
    except (OSError, ValueError) as error:
        raise _failed(path, "cannot be created", error) from error


def _same_file(source: str, target: Path) -> bool:
    resolved = Path(os.path.realpath(source))
    return resolved in (target, _beside(target, ".partial"), _beside(target, ".meta.json"))


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(target.name + suffix)


def _failed(path: str | None, what: str, error: Exception) -> OutputError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    hint = None
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space"
    return OutputError(f"{path or '<stdout>'}: {what}: {reason}", hint)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


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


def _json_lines(deliver: Callable[[bytes], None]) -> jsonlines.Writer:
    return jsonlines.Writer(cast(BinaryIO, _LineSink(deliver)), dumps=encode, flush=True)


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
        self._lines = _json_lines(self._deliver)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one row."""
        self._lines.write(record)

    def _deliver(self, line: bytes) -> None:
        try:
            if self._fd is not None:
                _write_all(self._fd, line)
                return
            try:
                fd = sys.stdout.fileno()
            except (io.UnsupportedOperation, AttributeError):
                # Captured output, as in tests and notebooks.
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            else:
                _write_all(fd, line)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _failed(self.path, "cannot be written", error) from error

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


class FileWriter:
    """Rows into `OUT.partial`, then in input order into `OUT`.

    Memory grows by 16 bytes a row: where its line begins and how long it is.

    Args:
        target: the resolved path of `OUT`.
        path: the name the user gave, for messages.
        overwrite: replace a finished `OUT` (only at the end) and a leftover `OUT.partial`.
        notify: takes remarks for the user.

    Raises:
        UsageError: `OUT` or `OUT.partial` exists and `overwrite` is off, or another run writes it.
        OSError: `OUT.partial` cannot be created.
    """

    def __init__(
        self,
        target: Path,
        path: str,
        *,
        overwrite: bool = False,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.path: str | None = path
        self._target = target
        self._partial = _beside(target, ".partial")
        self._sorted = _beside(target, ".sorted")
        self._notify = notify
        self._refuse_existing(overwrite)
        self._fd = self._open_partial(overwrite)
        self._size = 0
        self._offsets = array("q")
        self._lengths = array("q")
        self._in_order = True
        self._last_index = -1
        self._lines = _json_lines(self._deliver)
        self._dirty = False
        self._sync_error: OSError | None = None
        self._stop_sync = threading.Event()
        self._syncer = threading.Thread(target=self._sync_loop, name="fsync", daemon=True)
        self._syncer.start()

    def _refuse_existing(self, overwrite: bool) -> None:
        if overwrite:
            return
        if self._target.exists():
            raise UsageError(f"{self.path}: exists", "choose another -o, or give --overwrite")
        if self._partial.exists():
            raise UsageError(
                f"{self._partial}: left by a run that did not finish",
                "keep the rows you need from it, then give --overwrite to start again",
            )

    def _open_partial(self, overwrite: bool) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(self._partial, flags if overwrite else flags | os.O_EXCL, 0o666)
        try:
            _lock(fd)
            # Between open and lock its writer may have finished and renamed it: then this
            # descriptor is the finished output, which must not be emptied.
            if not os.path.samestat(os.fstat(fd), os.stat(self._partial)):
                raise FileNotFoundError
            os.ftruncate(fd, 0)
        except (BlockingIOError, FileNotFoundError):
            os.close(fd)
            raise UsageError(
                f"{self._partial}: another run is writing it", "choose another output"
            ) from None
        return fd

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one row.

        Raises:
            OutputError: the disk is full or fails; the file then ends with the row before.
        """
        index = int(record["index"])
        grow = index + 1 - len(self._offsets)
        if grow > 0:
            self._offsets.extend([-1] * grow)
            self._lengths.extend([0] * grow)
        assert self._offsets[index] < 0, f"row {index} is written twice"
        start = self._size
        self._lines.write(record)
        self._offsets[index] = start
        self._lengths[index] = self._size - start
        self._in_order &= index > self._last_index
        self._last_index = index

    def _deliver(self, line: bytes) -> None:
        try:
            if self._sync_error is not None:
                raise self._sync_error
            _write_all(self._fd, line)
        except OSError as error:
            # Never leave half a line behind.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise _failed(str(self._partial), "cannot be written", error) from error
        self._size += len(line)
        self._dirty = True

    def _sync_loop(self) -> None:
        while not self._stop_sync.wait(_FSYNC_SECONDS):
            if self._dirty:
                self._dirty = False
                try:
                    os.fsync(self._fd)
                except OSError as error:
                    self._sync_error = error
                    return

    def _end_sync(self) -> None:
        self._stop_sync.set()
        self._syncer.join()

    def finish(self, num_rows: int, meta: Mapping[str, Any]) -> None:
        """Put rows 0..num_rows-1 in input order and give the file its name.

        Raises:
            OutputError: no space for the ordered copy, or the disk fails; `OUT.partial` stays.
        """
        missing = [i for i, offset in enumerate(self._offsets) if offset < 0]
        assert len(self._offsets) == num_rows, (len(self._offsets), num_rows)
        assert not missing, f"rows without an output line: {missing[:10]}"
        self._end_sync()
        ordered = self._partial
        try:
            os.fsync(self._fd)
            if not self._in_order:
                self._write_sorted()
                ordered = self._sorted
            self._write_meta(meta)
            os.rename(ordered, self._target)
            if ordered != self._partial:
                os.unlink(self._partial)
            _sync_directory(self._target.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._sorted.unlink(missing_ok=True)
            raise _failed(self.path, "cannot be completed", error) from error
        finally:
            self._close()

    def _write_sorted(self) -> None:
        free = shutil.disk_usage(self._target.parent).free
        if free < self._size:
            raise OutputError(
                f"{self.path}: input order needs {self._size:,} bytes of disk, {free:,} are free",
                f"all rows are in {self._partial}, in completion order",
            )
        if self._size >= 1 << 30:
            self._notify(f"putting {self._size:,} bytes in input order ({free:,} bytes are free)")
        with open(self._sorted, "wb", buffering=_COPY_BYTES) as out:
            for offset, length in self._runs():
                while length:
                    chunk = os.pread(self._fd, min(length, _COPY_BYTES), offset)
                    if not chunk:
                        raise OSError(errno.EIO, f"{self._partial} was cut by another program")
                    out.write(chunk)
                    offset += len(chunk)
                    length -= len(chunk)
            out.flush()
            os.fsync(out.fileno())

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Stretches of the partial file in input order; neighbours are joined into one."""
        start, length = 0, 0
        for offset, size in zip(self._offsets, self._lengths, strict=True):
            if offset == start + length:
                length += size
            else:
                if length:
                    yield start, length
                start, length = offset, size
        if length:
            yield start, length

    def _write_meta(self, meta: Mapping[str, Any]) -> None:
        final = _beside(self._target, ".meta.json")
        scratch = _beside(self._target, ".meta.json.tmp")
        with open(scratch, "w", encoding="utf-8") as file:
            json.dump(meta, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(scratch, final)

    def abort(self) -> str | None:
        """Keep `OUT.partial`, unless no row was written."""
        if self._fd < 0:
            return None
        self._end_sync()
        kept: str | None = str(self._partial)
        with contextlib.suppress(OSError):
            if self._size:
                os.fsync(self._fd)
            else:
                os.unlink(self._partial)
                kept = None
        self._close()
        return kept

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                os.close(fd)


def _lock(fd: int) -> None:
    """Take the file for this process, where the file system knows locks.

    Raises:
        BlockingIOError: another process has it.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise


def _sync_directory(directory: Path) -> None:
    """Make a rename durable, where the file system can."""
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

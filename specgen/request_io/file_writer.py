"""A file that is complete once it has its name, and whose making survives everything.

`FileWriter` appends every row to `OUT.partial` as it finishes, one whole line a write, so that a
killed job keeps what it finished. `OUT.partial.meta.json` says under which settings. At the end the
rows are put in input order and the file takes its name. A later run of the same command finds the
partial file and goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from specgen.errors import OutputError, UsageError
from specgen.request_io.durable import lock, read_json, sync_directory, what_is_wrong, write_json
from specgen.request_io.earlier import Digests, check_input, refuse_end, refuse_other
from specgen.request_io.fingerprint import Fingerprint, differences
from specgen.request_io.lines import json_lines, write_all, write_failed
from specgen.request_io.partial import Head, LineReader, RowIndex, read_head, scan
from specgen.request_io.place import beside
from specgen.request_io.shard import WHOLE, Shard
from specgen.wording import counted

__all__ = ["FileWriter", "OutputComplete", "OutputOptions"]

_FSYNC_SECONDS = 5.0
_COPY_BYTES = 1 << 20
_FEW_DAMAGED = 10
_START_AGAIN = "give --overwrite to start again"


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What to do about an earlier output of the same name, and how to end.

    Attributes:
        overwrite: start again; a finished output stays until the new one is complete. Cut off, the
            new one is gone on with where this is not set.
        resume: be content with a finished output.
        retry_errors: generate failed rows of an earlier run again, in a finished output too.
        order: `input` puts rows in input order at the end; `completion` leaves them as finished.
        shard: the rows that this output holds.
        fingerprint: makes the settings that earlier rows must have been made with; asked only when
            they are needed, because it looks at models.
        digests: hashes of the input's first lines, which earlier rows must have been made of.
    """

    overwrite: bool = False
    resume: bool = False
    retry_errors: bool = False
    order: Literal["input", "completion"] = "input"
    shard: Shard = WHOLE
    fingerprint: Callable[[], Fingerprint] = dict
    digests: Digests = lambda _: None


class OutputComplete(Exception):  # noqa: N818 - nothing is wrong
    """The output is finished, so there is nothing to do.

    Args:
        meta: what its `OUT.meta.json` says; empty without one.
    """

    def __init__(self, meta: dict[str, Any]) -> None:
        super().__init__()
        self.meta = meta


class FileWriter:
    """Rows into `OUT.partial`, then in input order into `OUT`.

    Memory grows by 8 bytes a row: where its line begins.

    Args:
        target: the resolved path of `OUT`.
        path: the name the user gave, for messages.
        options: what to do about earlier outputs.
        notify: takes remarks for the user.

    Raises:
        UsageError: `OUT` exists, or `OUT.partial` was made under other settings or of another
            input, or another run is writing it.
        OutputComplete: `OUT` is there and `options.resume`.
        OSError: `OUT.partial` cannot be created.
    """

    def __init__(
        self,
        target: Path,
        path: str,
        options: OutputOptions | None = None,
        *,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.path: str | None = path
        self._options = options or OutputOptions()
        self._target = target
        self._partial = beside(target, ".partial")
        self._partial_meta = beside(target, ".partial.meta.json")
        self._sorted = beside(target, ".sorted")
        self._replaces = False
        self._meta = beside(target, ".meta.json")
        self._notify = notify
        self._created = int(time.time())
        self._rows = RowIndex(self._options.shard)
        self._size = 0
        self._num_lines = 0
        self._num_rows = self._num_failed = 0
        self._earlier_size = 0
        self._input_checked = False
        self._in_order = True
        self._last_index = -1
        self._fd = self._open()
        self._lines = json_lines(self._deliver)
        self._reader = LineReader(self._fd)
        self._dirty = False
        self._sync_error: OSError | None = None
        self._stop_sync = threading.Event()
        self._syncer = threading.Thread(target=self._sync_loop, name="fsync", daemon=True)
        self._syncer.start()

    @property
    def num_rows(self) -> int:
        """Rows that the file holds now, of earlier runs and this one."""
        return self._num_rows

    @property
    def num_failed(self) -> int:
        """Failed rows among them."""
        return self._num_failed

    @property
    def created(self) -> int:
        """When the output was begun, by its first run: seconds since 1970."""
        return self._created

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        # As it will be read back: tuples are lists in JSON.
        found: dict[str, Any] = json.loads(json.dumps(dict(self._options.fingerprint())))
        return found

    # -- opening: what an earlier run left ------------------------------------------------------

    def _open(self) -> int:
        overwrite = self._options.overwrite
        replaces = self._target.exists() and (overwrite or self._is_replacement())
        self._replaces = replaces
        if self._target.exists() and not replaces:
            self._reopen_finished()
        fd = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            lock(fd)
            # Between open and lock its writer may have finished and renamed it: then this
            # descriptor is the finished output, which must not be touched.
            if not os.path.samestat(os.fstat(fd), os.stat(self._partial)):
                raise FileNotFoundError
            if self._target.exists() and not replaces:
                os.unlink(self._partial)
                raise FileNotFoundError
            if overwrite:
                _ = self._fingerprint  # if it cannot be had, the old rows stay
                self._discard(fd)
            if os.fstat(fd).st_size:
                self._take_up(fd)
            else:
                self._note_settings()
        except (BlockingIOError, FileNotFoundError):
            os.close(fd)
            raise UsageError(
                f"{self._partial}: another run is writing it", "choose another output"
            ) from None
        except BaseException:
            if not os.fstat(fd).st_size:
                os.unlink(self._partial)
            os.close(fd)
            raise
        return fd

    def _is_replacement(self) -> bool:
        """Whether an `OUT.partial` was going to replace the finished `OUT` when it was cut off."""
        with contextlib.suppress(OSError):
            meta = read_json(self._partial_meta) or {}
            return meta.get("replaces") is True and self._partial.stat().st_size > 0
        return False

    def _discard(self, fd: int) -> None:
        """Empty the partial output, not without a word."""
        if num_lines := scan(fd, RowIndex()).num_lines:
            self._notify(f"discarding {counted(num_lines, 'finished row')} of {self._partial}")
        os.ftruncate(fd, 0)

    def _reopen_finished(self) -> None:
        """`OUT` exists: be content, refuse, or make it a partial output with rows to retry."""
        options = self._options
        if not options.resume and not options.retry_errors:
            raise UsageError(
                f"{self.path}: exists",
                "choose another -o, or give --resume to keep it, --retry-errors or --overwrite",
            )
        meta = read_json(self._meta)
        if meta is None:
            hint = _START_AGAIN
            if self._partial_meta.exists() and not self._partial.exists():
                hint = f"if it is the partial output under another name, call it {self._partial}"
            raise UsageError(
                f"{self.path}: {what_is_wrong(self._meta)}, so its settings are unknown", hint
            )
        self._compare(meta, str(self.path))
        rows = RowIndex(options.shard)
        num_rows = int(meta.get("num_rows", 0))
        with open(self._target, "rb") as file:
            found = scan(file.fileno(), rows, whole=True)
            cut = found.size != os.fstat(file.fileno()).st_size
            num_whole = rows.count()
            # One line more, to see whether there are more now.
            now = check_input(rows, file.fileno(), options.digests, str(self.path), num_rows + 1)
        expected = options.shard.num_rows(num_rows)
        problem = None
        if cut or found.num_damaged or not num_whole == expected == found.num_lines:
            problem = f"not complete: {num_whole:,} of {expected:,} rows are whole"
        elif now is not None and now.num_changed:
            problem = f"{counted(now.num_changed, 'row')} of changed input lines"
        elif now is not None and now.num_lines > num_rows:
            problem = f"complete for {counted(num_rows, 'row')}, but the input has more"
        if not options.retry_errors:
            if problem is not None:
                raise UsageError(
                    f"{self.path}: {problem}",
                    "--retry-errors runs what is missing, --overwrite starts again",
                )
            self._clear_leftovers()
            raise OutputComplete(meta)
        if not rows.drop_failed() and problem is None:
            raise OutputComplete(meta)
        self._created = int(meta.get("created", self._created))
        self._note_settings()
        os.rename(self._target, self._partial)

    def _clear_leftovers(self) -> None:
        """Remove what a run killed just after it had completed `OUT` left beside it."""
        for path in (self._partial, self._partial_meta, self._sorted):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _take_up(self, fd: int) -> None:
        """Go on after the last whole line of the partial output."""
        meta = read_json(self._partial_meta)
        if meta is None:
            raise UsageError(
                f"{self._partial}: its settings are unknown, {what_is_wrong(self._partial_meta)}",
                _START_AGAIN,
            )
        self._compare(meta, str(self._partial))
        self._created = int(meta.get("created", self._created))
        found = scan(fd, self._rows, whole=True)
        if found.num_damaged:
            num_damaged = counted(found.num_damaged, "damaged line")
            if found.num_damaged > max(found.num_lines // 2, _FEW_DAMAGED):
                raise UsageError(
                    f"{self._partial}: holds {num_damaged} among {found.num_lines:,}: "
                    "another program has rewritten it",
                    f"put the file back as it was, or {_START_AGAIN}",
                )
            self._notify(f"{self._partial}: {num_damaged} left out")
        torn = os.fstat(fd).st_size - found.size
        if torn:
            os.ftruncate(fd, found.size)
            self._notify(f"cut {torn:,} bytes of a torn line from {self._partial}")
        now = check_input(self._rows, fd, self._options.digests, str(self._partial))
        num_changed = 0 if now is None else now.num_changed
        if now is not None:
            self._input_checked = True
        if num_changed:
            changed = counted(num_changed, "row")
            self._notify(f"running {changed} of changed input lines again")
        if self._options.retry_errors:
            num_failed = self._rows.drop_failed()
            if num_failed or not num_changed:
                self._notify(f"trying {counted(num_failed, 'failed row')} again")
        self._size = self._earlier_size = found.size
        self._num_lines = found.num_lines
        self._in_order, self._last_index = found.in_order, found.last_index
        self._num_rows, self._num_failed = self._rows.count(), self._rows.count_failed()
        self._notify(f"resuming after {counted(self._num_rows, 'row')} in {self._partial}")

    def _compare(self, meta: Mapping[str, Any], name: str) -> None:
        """Refuse to mix rows made under different settings."""
        changed = differences(meta.get("fingerprint", {}), self._fingerprint)
        if changed:
            raise UsageError(
                f"{name}: was made with other settings:\n  " + "\n  ".join(changed),
                "give the former settings, choose another -o, or give --overwrite",
            )

    def _note_settings(self) -> None:
        meta = {
            "created": self._created,
            "replaces": self._replaces,
            "fingerprint": self._fingerprint,
        }
        write_json(self._partial_meta, meta)

    # -- rows -----------------------------------------------------------------------------------

    def keep(self, index: int, input_hash: str) -> Head | None:
        """Head of the row's line of an earlier run; None if there is none of the same input line.

        A line of another input is forgotten: the row has changed and will be written again.

        Raises:
            UsageError: the first row that there is has changed already, in an input that could not
                be compared before.
        """
        offset = self._rows.offset(index)
        if offset < 0:
            return None
        head = self._reader.head(offset)
        if head is not None and (head.index, head.input_hash) == (index, input_hash):
            self._input_checked = True
            return head
        if not self._input_checked:
            refuse_other(str(self._partial), 1, 1)
        self._num_rows -= 1
        self._num_failed -= self._rows.failed(index)
        self._rows.drop(index)
        return None

    def earlier_lines(self) -> Iterator[bytes]:
        """Lines of earlier runs that stay in the output, in the order in which they were written.

        Raises:
            OutputError: the disk fails.
        """
        at = 0
        try:
            with open(self._partial, "rb", buffering=_COPY_BYTES) as file:
                while at < self._earlier_size:
                    line = file.readline()
                    head = read_head(line)
                    if head is not None and self._rows.offset(head.index) == at:
                        yield line
                    at += len(line) or self._earlier_size  # cut by another program
        except OSError as error:
            raise write_failed(str(self._partial), "cannot be read", error) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one row.

        Raises:
            OutputError: the disk is full or fails; the file then ends with the row before.
        """
        index = int(record["index"])
        assert self._rows.offset(index) < 0, f"row {index} is written twice"
        start, failed = self._size, record["status"] == "error"
        self._lines.write(record)
        self._rows.put(index, start, failed)
        self._num_rows += 1
        self._num_failed += failed
        self._num_lines += 1
        self._in_order &= index > self._last_index
        self._last_index = index

    def _deliver(self, line: bytes) -> None:
        try:
            if self._sync_error is not None:
                raise self._sync_error
            write_all(self._fd, line)
        except OSError as error:
            # Never leave half a line behind.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise write_failed(str(self._partial), "cannot be written", error) from error
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

    # -- the end --------------------------------------------------------------------------------

    def finish(self, num_rows: int, meta: Mapping[str, Any]) -> None:
        """Complete the output of an input of `num_rows` rows, and give the file its name.

        Raises:
            UsageError: an earlier run finished rows beyond the end of the input.
            OutputError: no space for the ordered copy, or the disk fails; `OUT.partial` stays.
        """
        refuse_end(self._rows, num_rows, str(self._partial))
        expected = self._options.shard.num_rows(num_rows)
        missing = list(self._rows.missing(expected))
        assert not missing, f"rows without an output line: {missing[:10]}"
        self._end_sync()
        result, in_place = self._partial, self._is_in_place()
        try:
            if self._sync_error is not None:
                raise self._sync_error
            os.fsync(self._fd)
            will_do = in_place and self._num_lines == expected
            if self._options.order == "completion":
                if not will_do:
                    self._write_copy(sorted(self._rows.offsets()))
                    result = self._sorted
            elif not (will_do and self._in_order):
                self._write_copy(self._rows.offsets())
                result = self._sorted
            write_json(
                self._meta,
                {**meta, "created": self._created, "fingerprint": self._fingerprint},
            )
            os.rename(result, self._target)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._sorted.unlink(missing_ok=True)
            raise write_failed(self.path, "cannot be completed", error) from error
        # The output is complete. What cannot be cleared away now does no harm.
        with contextlib.suppress(OSError):
            if in_place and result != self._partial:
                os.unlink(self._partial)
            if not self._partial.exists():  # or it is that of another run
                os.unlink(self._partial_meta)
        sync_directory(self._target.parent)
        self._close()

    def _is_in_place(self) -> bool:
        """Whether `OUT.partial` still is the file that is written, and no other one or none."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._partial))
        except OSError:
            return False

    def _write_copy(self, offsets: Iterable[int]) -> None:
        """Copy the lines at `offsets`, in that order, to `OUT.sorted`."""
        free = shutil.disk_usage(self._target.parent).free
        if free < self._size:
            raise OutputError(
                f"{self.path}: input order needs {self._size:,} bytes of disk, {free:,} are free",
                f"all rows are in {self._partial}; free some space and give the same command "
                "again, or give --order completion",
            )
        if self._size >= 1 << 30:
            self._notify(f"putting {self._size:,} bytes in input order ({free:,} bytes are free)")
        with open(self._sorted, "ab", buffering=_COPY_BYTES) as out:
            try:
                lock(out.fileno())
            except BlockingIOError:  # OUT.partial was removed under a run, and another one begun
                raise OutputError(f"{self.path}: another run is completing it") from None
            out.truncate(0)
            write, line = out.write, self._reader.line
            for offset in offsets:
                write(line(offset))
            out.flush()
            os.fsync(out.fileno())

    def abort(self) -> str | None:
        """Keep `OUT.partial`, unless it holds nothing.

        Raises:
            OutputError: it has lost its name, and its rows cannot be put back.
        """
        if self._fd < 0:  # it is complete
            return None
        self._end_sync()
        kept: str | None = str(self._partial)
        try:
            with contextlib.suppress(OSError):
                if self._size:
                    os.fsync(self._fd)
                    if not self._is_in_place():
                        kept = self._put_back()
                    elif not self._partial_meta.exists():
                        self._note_settings()
                else:
                    kept = None
                    if self._is_in_place():
                        os.unlink(self._partial)
                        os.unlink(self._partial_meta)
        finally:
            self._close()
        return kept

    def _put_back(self) -> str:
        """Copy the rows out of a file that has lost its name; returns where they are now.

        Raises:
            OutputError: there is no place for them any more.
        """
        kept = self._partial
        if kept.exists():  # that of another run
            kept = beside(self._target, ".rescued")
        try:
            with open(kept, "xb") as out:
                at = 0
                while chunk := os.pread(self._fd, _COPY_BYTES, at):
                    out.write(chunk)
                    at += len(chunk)
                os.fsync(out.fileno())
            if kept == self._partial:
                self._note_settings()
        except OSError as error:
            rows = counted(self.num_rows, "finished row")
            raise OutputError(
                f"{kept}: cannot be written: {error.strerror}: {rows} of it are not kept",
                "its folder was moved or removed during the run: where it was moved, the rows are "
                "in the file of that name there",
            ) from error
        self._notify(f"{self._partial} was removed or replaced while it was written")
        return str(kept)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                os.close(fd)

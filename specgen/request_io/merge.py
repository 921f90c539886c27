"""Shards to one output: the lines that a single run would have written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen.errors import InputError, OutputError, UsageError
from specgen.request_io.durable import write_json
from specgen.request_io.fingerprint import differences
from specgen.request_io.lines import write_all, write_failed
from specgen.request_io.partial import LineReader, RowIndex, scan
from specgen.request_io.place import Stream, beside, check_apart, find_place
from specgen.request_io.shard import Shard

__all__ = ["Merged", "merge_shards"]

_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Merged:
    """What came together."""

    num_rows: int
    num_failed: int


@dataclass(frozen=True, slots=True)
class _Part:
    """One shard's output and what its metadata say."""

    path: str
    shard: Shard
    meta: Mapping[str, Any]

    @property
    def meta_path(self) -> Path:
        """The file that the metadata are from."""
        return beside(Path(os.path.realpath(self.path)), ".meta.json")

    @property
    def settings(self) -> dict[str, Any]:
        """All that must be the same in every shard."""
        fingerprint = {k: v for k, v in self.meta["fingerprint"].items() if k != "shard"}
        return {
            **fingerprint,
            "input_hash": self.meta["input_hash"],
            "num_rows": self.meta["num_rows"],
        }


def merge_shards(paths: Sequence[str], output: str, *, overwrite: bool = False) -> Merged:
    """Write the rows of all shards to `output`, in input order.

    A stream (`-`, a pipe, a device) gets the rows alone, a file gets its metadata too.

    Raises:
        InputError: a shard is missing, given twice, unfinished or of another run, or does not
            hold its rows and nothing else.
        UsageError: `output` exists, or would overwrite a shard or its metadata.
        OutputError: `output` cannot be written.
        BrokenPipeError: its reader has gone away.
    """
    parts = [_read_part(path) for path in paths]
    place = find_place(output)
    if not isinstance(place, Stream):
        check_apart(output, place, paths, "is one of the shards")
        metas = (str(part.meta_path) for part in parts)
        check_apart(output, place, metas, "is the metadata of one of the shards")
        if place.exists() and not overwrite:
            raise UsageError(f"{output}: exists", "choose another -o, or give --overwrite")
    parts = _check_parts(parts)
    with contextlib.ExitStack() as stack:
        readers, indices = [], []
        for part in parts:
            file = stack.enter_context(open(part.path, "rb"))
            rows = RowIndex(part.shard)
            _check_rows(part, file.fileno(), rows)
            readers.append(LineReader(file.fileno()))
            indices.append(rows)
        _check_input_hash(parts, readers, indices)
        lines = _lines(parts, readers, indices)
        try:
            if isinstance(place, Stream):
                _write_stream(place, lines)
            else:
                _write_file(place, parts, lines)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise write_failed(output, "cannot be written", error) from error
    return Merged(parts[0].meta["num_rows"], sum(rows.count_failed() for rows in indices))


def _check_rows(part: _Part, fd: int, rows: RowIndex) -> None:
    """Find the lines of a part, and refuse one that does not hold its rows and nothing else."""
    found = scan(fd, rows, whole=True)
    num_rows = part.shard.num_rows(part.meta["num_rows"])
    missing = next(rows.missing(num_rows), None)
    problem = None
    if missing is not None:
        problem = f"has no row {missing}"
    elif found.num_lines != num_rows or found.size != os.fstat(fd).st_size:
        problem = "holds more than the rows of its shard"
    if problem is not None:
        raise InputError(
            f"{part.path}: {problem}",
            "run the shard again with --retry-errors (what is missing) or --overwrite",
        )


def _read_part(path: str) -> _Part:
    target = Path(os.path.realpath(path))
    if not target.exists():
        if beside(target, ".partial").exists():
            raise InputError(f"{path}: is not finished", "give the command of its run again")
        raise InputError(
            f"{path}: cannot be read: No such file or directory",
            "name the output of every shard, of the last one too",
        )
    meta_path = beside(target, ".meta.json")
    try:
        meta = json.loads(meta_path.read_bytes())
        shard = Shard(meta["shard"]["number"], meta["shard"]["count"])
        part = _Part(path, shard, meta)
        _ = part.settings  # all keys are there
        return part
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: {meta_path.name} is missing or damaged, so it may be any shard of any run",
            "keep it beside the output it belongs to",
        ) from error


def _check_parts(parts: Sequence[_Part]) -> list[_Part]:
    """The parts by their number, if they are all shards of one run."""
    first = parts[0]
    by_number: dict[int, _Part] = {}
    for part in parts:
        if part.shard.count != first.shard.count:
            raise InputError(
                f"{part.path} is shard {part.shard}, {first.path} is shard {first.shard}"
            )
        changed = differences(first.settings, part.settings, ("there", "here"))
        if changed:
            raise InputError(
                f"{part.path}: was made with other settings or input than {first.path}:\n  "
                + "\n  ".join(changed)
            )
        other = by_number.setdefault(part.shard.number, part)
        if other is not part:
            raise InputError(f"{other.path} and {part.path} are both shard {part.shard}")
    numbers = range(1, first.shard.count + 1)
    missing = [str(Shard(n, first.shard.count)) for n in numbers if n not in by_number]
    if missing:
        raise InputError(f"not all shards are given: {', '.join(missing)} missing")
    return [by_number[number] for number in numbers]


def _places(parts: Sequence[_Part], indices: Sequence[RowIndex]) -> Iterator[tuple[int, int]]:
    """Of all rows in input order: the number of the part, and where in it the line begins."""
    for index in range(parts[0].meta["num_rows"]):
        number = index % len(parts)
        yield number, indices[number].offset(index)


def _check_input_hash(
    parts: Sequence[_Part], readers: Sequence[LineReader], indices: Sequence[RowIndex]
) -> None:
    """Refuse shards whose rows together are not those of the input that their metadata name."""
    digest = hashlib.blake2b(digest_size=16)
    for number, offset in _places(parts, indices):
        head = readers[number].head(offset)
        assert head is not None, "scanned lines have heads"
        digest.update(bytes.fromhex(head.input_hash))
    if digest.hexdigest() != parts[0].meta["input_hash"]:
        raise InputError(
            f"{parts[0].path}: the rows of these shards are not those that their metadata describe",
            "look whether one was replaced by an output of another run",
        )


def _lines(
    parts: Sequence[_Part], readers: Sequence[LineReader], indices: Sequence[RowIndex]
) -> Iterator[bytes]:
    for number, offset in _places(parts, indices):
        yield readers[number].line(offset)


def _write_stream(stream: Stream, lines: Iterable[bytes]) -> None:
    if stream.fd is None and sys.stdout is None:
        raise OutputError("<stdout>: is closed", "give -o FILE")
    fd = sys.stdout.fileno() if stream.fd is None else stream.fd
    try:
        for block in _blocks(lines):
            write_all(fd, block)
    finally:
        if stream.owned:
            os.close(fd)


def _blocks(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of some `_COPY_BYTES`."""
    held: list[bytes] = []
    size = 0
    for line in lines:
        held.append(line)
        size += len(line)
        if size >= _COPY_BYTES:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


def _write_file(target: Path, parts: Sequence[_Part], lines: Iterable[bytes]) -> None:
    needed = sum(os.path.getsize(part.path) for part in parts)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise OutputError(
            f"{target}: needs {needed:,} bytes of disk, {free:,} are free", "free some space"
        )
    scratch = beside(target, ".merging")
    try:
        with open(scratch, "wb", buffering=_COPY_BYTES) as out:
            out.writelines(lines)
            out.flush()
            os.fsync(out.fileno())
        meta = {
            **{k: v for k, v in parts[0].meta.items() if k not in ("summary", "started")},
            "merged_from": [part.path for part in parts],
            "shard": {"number": 1, "count": 1},
            "fingerprint": {**parts[0].meta["fingerprint"], "shard": str(Shard())},
        }
        write_json(beside(target, ".meta.json"), meta)
        os.rename(scratch, target)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import jsonlines
import pytest

from specgen.errors import OutputError, UsageError
from specgen.request_io import file_writer
from specgen.request_io.file_writer import FileWriter, OutputOptions
from specgen.request_io.writer import StreamWriter, open_writer

OVERWRITE = OutputOptions(overwrite=True)


def record(index: int, size: int = 0) -> dict[str, Any]:
    return {"index": index, "input_hash": f"{index:016x}", "status": "ok", "text": "é" * size}


def rows_of(path: Path) -> list[dict[str, Any]]:
    with jsonlines.open(path) as reader:
        return list(reader)


@pytest.mark.parametrize("num_rows", [0, 1, 200])
@pytest.mark.parametrize("shuffled", [False, True])
def test_rows_come_out_in_input_order(tmp_path: Path, num_rows: int, shuffled: bool) -> None:
    out = tmp_path / "out.jsonl"
    order = list(range(num_rows))
    noise = random.Random(1)
    if shuffled:
        noise.shuffle(order)
    writer = open_writer(str(out))
    for index in order:
        writer.write(record(index, noise.randrange(50)))
    partial = tmp_path / "out.jsonl.partial"
    assert not out.exists()
    assert [row["index"] for row in rows_of(partial)] == order  # all of it, before the end
    writer.finish(num_rows, {"k": 3})
    assert [row["index"] for row in rows_of(out)] == list(range(num_rows))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.meta.json"]
    meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert (meta["k"], meta["fingerprint"]) == (3, {})


def test_each_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    real = os.write

    def spy(fd: int, data: Any) -> int:
        writes.append(bytes(data))
        return real(fd, data)

    monkeypatch.setattr(os, "write", spy)
    writer = open_writer(str(tmp_path / "out"))
    writer.write(record(0, 10))
    writer.write(record(1, 10))
    monkeypatch.undo()
    assert [w.endswith(b"\n") and w.count(b"\n") == 1 for w in writes] == [True, True]
    writer.abort()


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:7]))
    out = tmp_path / "out"
    writer = open_writer(str(out))
    writer.write(record(0, 30))
    writer.finish(1, {})
    monkeypatch.undo()
    assert rows_of(out) == [record(0, 30)]


def test_a_full_disk_leaves_no_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = open_writer(str(tmp_path / "out"))
    writer.write(record(0))
    real, room = os.write, [25]

    def full(fd: int, data: Any) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(fd, bytes(data)[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OutputError, match="No space left on device") as error:
        writer.write(record(1))
    assert error.value.hint == "free some space"
    monkeypatch.undo()
    kept = writer.abort()
    assert kept == str(tmp_path / "out.partial")
    assert rows_of(Path(kept)) == [record(0)]
    assert not (tmp_path / "out").exists()


def test_a_row_is_written_once(tmp_path: Path) -> None:
    writer = open_writer(str(tmp_path / "out"))
    writer.write(record(0))
    with pytest.raises(AssertionError, match="row 0 is written twice"):
        writer.write(record(0))
    writer.abort()


@pytest.mark.parametrize("written", [[0, 2], [0], []])
def test_a_missing_row_is_found(tmp_path: Path, written: list[int]) -> None:
    writer = open_writer(str(tmp_path / "out"))
    for index in written:
        writer.write(record(index))
    with pytest.raises(AssertionError):
        writer.finish(3, {})
    assert not (tmp_path / "out").exists()
    writer.abort()


def test_existing_outputs_are_refused_unless_told_otherwise(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("old\n")
    with pytest.raises(UsageError, match="out: exists"):
        open_writer(str(out))
    writer = open_writer(str(out), OVERWRITE)
    writer.write(record(0))
    assert out.read_text() == "old\n"  # until the new one is complete
    writer.finish(1, {})
    assert rows_of(out) == [record(0)]


def test_a_partial_of_unknown_settings_is_refused_unless_told_otherwise(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.write_text("old\n")
    with pytest.raises(UsageError, match="its settings are unknown") as error:
        open_writer(str(tmp_path / "out"))
    assert error.value.exit_code == 2
    assert partial.read_text() == "old\n"
    writer = open_writer(str(tmp_path / "out"), OVERWRITE)
    writer.write(record(0))
    writer.finish(1, {})
    assert rows_of(tmp_path / "out") == [record(0)]


def test_two_runs_do_not_share_an_output(tmp_path: Path) -> None:
    first = open_writer(str(tmp_path / "out"))
    first.write(record(0))
    with pytest.raises(UsageError, match="another run is writing it"):
        open_writer(str(tmp_path / "out"), OVERWRITE)
    first.finish(1, {})
    assert rows_of(tmp_path / "out") == [record(0)]


def test_a_partial_renamed_while_it_is_opened_is_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    partial.write_text("finished by another run\n")
    real = fcntl.flock

    def finish_first(fd: int, operation: int) -> None:
        partial.rename(out)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", finish_first)
    with pytest.raises(UsageError, match="another run"):
        open_writer(str(out), OVERWRITE)
    assert out.read_text() == "finished by another run\n"


def test_a_file_system_without_locks_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    writer = open_writer(str(tmp_path / "out"))
    writer.write(record(0))
    writer.finish(1, {})
    assert rows_of(tmp_path / "out") == [record(0)]


def test_an_input_is_never_the_output(tmp_path: Path) -> None:
    data = tmp_path / "in.jsonl"
    data.write_text("{}\n")
    link = tmp_path / "link"
    link.symlink_to(data)
    for name in (data, link):
        with pytest.raises(UsageError, match="is an input"):
            open_writer(str(name), OVERWRITE, inputs=("-", str(data)))
    partial = tmp_path / "x.partial"
    partial.write_text("{}\n")
    with pytest.raises(UsageError, match="is an input"):
        open_writer(str(tmp_path / "x"), OVERWRITE, inputs=(str(partial),))
    assert data.read_text() == partial.read_text() == "{}\n"


def test_symbolic_links_are_resolved_first(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real" / "out")
    writer = open_writer(str(link))
    writer.write(record(0))
    writer.finish(1, {})
    assert link.is_symlink()
    assert rows_of(tmp_path / "real" / "out") == [record(0)]


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path: Path) -> None:
    assert open_writer(str(tmp_path / "out")).abort() is None
    assert list(tmp_path.iterdir()) == []


def test_outputs_that_cannot_be_created(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is a directory"):
        open_writer(str(tmp_path))
    with pytest.raises(OutputError, match="No such file or directory") as error:
        open_writer(str(tmp_path / "missing" / "out"))
    assert error.value.exit_code == 6


def test_input_order_that_does_not_fit_keeps_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_writer(str(tmp_path / "out"))
    writer.write(record(1))
    writer.write(record(0))
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(file_writer.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OutputError, match=r"input order needs .* bytes of disk, 10 are free"):
        writer.finish(2, {})
    assert len(rows_of(tmp_path / "out.partial")) == 2
    assert not (tmp_path / "out").exists()


def test_rows_reach_the_disk_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = threading.Event()
    real = os.fsync

    def spy(fd: int) -> None:
        real(fd)
        synced.set()

    monkeypatch.setattr(file_writer, "_FSYNC_SECONDS", 0.01)
    writer = open_writer(str(tmp_path / "out"))
    monkeypatch.setattr(os, "fsync", spy)
    assert not synced.wait(0.1)  # nothing to do yet
    writer.write(record(0))
    assert synced.wait(5)  # though no further row comes
    writer.abort()


def test_a_failing_disk_is_noticed_at_the_next_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fail(fd: int) -> None:
        failed.set()
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(file_writer, "_FSYNC_SECONDS", 0.01)
    writer = open_writer(str(tmp_path / "out"))
    monkeypatch.setattr(os, "fsync", fail)
    assert isinstance(writer, FileWriter)
    writer.write(record(0))
    assert failed.wait(5)
    writer._syncer.join(5)
    with pytest.raises(OutputError, match="Input/output error"):
        writer.write(record(1))
    monkeypatch.undo()
    writer.abort()


def test_stdout_takes_rows_as_they_finish(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    writer = open_writer(None)
    assert isinstance(writer, StreamWriter)
    assert writer.path is None
    writer.write(record(1, 2))
    assert json.loads(capfdbinary.readouterr().out) == record(1, 2)
    writer.write(record(0))
    writer.finish(2, {})
    assert json.loads(capfdbinary.readouterr().out) == record(0)


def test_devices_and_pipes_are_written_directly(tmp_path: Path) -> None:
    full = open_writer("/dev/full")
    with pytest.raises(OutputError, match="/dev/full: cannot be written: No space left"):
        full.write(record(0))
    assert full.abort() is None

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[str] = []
    thread = threading.Thread(target=lambda: received.extend(pipe.read_text().splitlines()))
    thread.start()
    writer = open_writer(str(pipe))
    writer.write(record(1))
    writer.write(record(0))
    writer.finish(2, {})
    thread.join()
    assert [json.loads(line)["index"] for line in received] == [1, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_a_descriptor_path_is_that_descriptor(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file:
        writer = open_writer(f"/dev/fd/{file.fileno()}")
        writer.write(record(0))
        writer.finish(1, {})
        os.fstat(file.fileno())  # not closed: it is not the writer's own
    assert rows_of(tmp_path / "x") == [record(0)]


def test_a_reader_that_left_is_a_closed_pipe(tmp_path: Path) -> None:
    read, write = os.pipe()
    writer = open_writer(f"/dev/fd/{write}")
    os.close(read)
    with pytest.raises(BrokenPipeError):
        writer.write(record(0))
    os.close(write)


def test_a_pipe_that_does_not_block_gets_every_byte() -> None:
    """Other programs set that on a pipe they share, and then a full one takes nothing for now."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    received = bytearray()

    def drain() -> None:
        while chunk := os.read(read, 1000):
            received.extend(chunk)

    writer = open_writer(f"/dev/fd/{write}")
    thread = threading.Thread(target=drain)
    timer = threading.Timer(0.3, thread.start)  # once it is full
    timer.start()
    records = [record(index, 50_000) for index in range(4)]
    for item in records:
        writer.write(item)
    os.close(write)
    timer.join()
    thread.join()
    os.close(read)
    assert [json.loads(line) for line in received.splitlines()] == records


def test_a_reader_that_leaves_a_full_pipe_is_noticed() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    writer = open_writer(f"/dev/fd/{write}")
    timer = threading.Timer(0.3, os.close, [read])
    timer.start()
    with pytest.raises(BrokenPipeError):
        writer.write(record(0, 500_000))
    timer.join()
    os.close(write)

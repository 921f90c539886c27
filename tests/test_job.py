from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine

from specgen.display import QuietDisplay
from specgen.errors import InputError, OutputError
from specgen.interrupts import Interrupts, StopRun
from specgen.job import Job
from specgen.pipeline.request import ChoiceOutput, PromptRow, RequestOutput
from specgen.request_io.reader import ReadOptions, read_rows
from specgen.stats import SpeculationStats


class ListWriter:
    path = None

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []

    num_rows = num_failed = created = 0

    def earlier_lines(self) -> Iterator[bytes]:
        raise AssertionError("there are none")

    def keep(self, index: int, input_hash: str) -> None:
        raise AssertionError("the reader asks, not the job")

    def write(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def finish(self, num_rows: int, meta: Mapping[str, Any]) -> None:
        raise AssertionError("the job does not complete the output")

    def abort(self) -> None:
        raise AssertionError("the job does not give up the output")


class Watcher(QuietDisplay):
    def __init__(self) -> None:
        self.advanced: list[int] = []
        self.warnings: list[tuple[str, str | None]] = []

    def advance(self, stats: Any) -> None:
        self.advanced.append(stats.rows_done)

    def warn(self, message: str, hint: str | None = None) -> None:
        self.warnings.append((message, hint))


def make_job() -> tuple[Job, ListWriter, Watcher]:
    writer, display = ListWriter(), Watcher()
    return Job(writer, display, Interrupts()), writer, display


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text(
        '{"prompt": "abc"}\nnope\n{"prompt": "fail", "id": 7}\n\n{"prompt": "de", "n": 2}\n'
    )
    return path


def test_every_line_becomes_one_record(data: Path) -> None:
    job, writer, display = make_job()
    job.run(FakeEngine(), read_rows([str(data)], ReadOptions()))
    records = sorted(writer.records, key=lambda r: r["index"])
    assert [r["index"] for r in records] == [0, 1, 2, 3]
    assert [r["status"] for r in records] == ["ok", "error", "error", "ok"]
    assert [len(r["choices"]) for r in records] == [1, 0, 0, 2]
    assert records[2]["id"] == 7
    assert records[2]["error"]["line"] == 3
    assert job.num_rows == job.stats.rows_done == 4
    assert job.stats.rows_failed == 2
    assert display.advanced == [1, 2, 3, 4]
    assert [m.split(": ")[0] for m, _ in display.warnings] == [f"{data}:2", f"{data}:3"]
    assert display.warnings[0][1] is not None


def test_a_bad_line_does_not_wait_for_the_engine(data: Path) -> None:
    job, writer, _ = make_job()

    class Slow(FakeEngine):
        def generate(self, rows: Iterable[PromptRow]) -> Iterator[RequestOutput]:
            source = iter(rows)
            next(source)
            next(source)
            assert [r["index"] for r in writer.records] == [1]
            yield from ()

    job.run(Slow(), read_rows([str(data)], ReadOptions()))


def test_the_input_hash_is_of_the_lines_in_input_order(data: Path) -> None:
    job, _, _ = make_job()
    job.run(FakeEngine(), read_rows([str(data)], ReadOptions()))
    whole = hashlib.blake2b(digest_size=16)
    for line in data.read_bytes().split(b"\n"):
        if line:
            whole.update(hashlib.blake2b(line, digest_size=8).digest())
    assert job.input_hash == whole.hexdigest()
    other, _, _ = make_job()
    other.run(FakeEngine(), read_rows([str(data)], ReadOptions(limit=3)))
    assert other.input_hash != job.input_hash


def test_rows_are_pulled_as_the_engine_takes_them(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_text('{"prompt": "a"}\n' * 100)
    job, writer, _ = make_job()
    engine = FakeEngine(window=4)
    ahead = []

    class Counting(Watcher):
        def advance(self, stats: Any) -> None:
            ahead.append(job.num_rows - stats.rows_done)

    job.display = Counting()
    job.run(engine, read_rows([str(path)], ReadOptions()))
    assert max(ahead) < 4
    assert len(writer.records) == 100


def test_problems_go_through(data: Path, tmp_path: Path) -> None:
    job, _, _ = make_job()
    with pytest.raises(InputError):
        job.run(FakeEngine(), read_rows([str(data), str(tmp_path / "x")], ReadOptions()))

    class Full(ListWriter):
        def write(self, record: Mapping[str, Any]) -> None:
            raise OutputError("full")

    job.writer = Full()
    with pytest.raises(OutputError):
        job.run(FakeEngine(), read_rows([str(data)], ReadOptions()))


def test_a_row_is_counted_only_when_it_is_written(data: Path) -> None:
    job, _, display = make_job()

    class Full(ListWriter):
        def write(self, record: Mapping[str, Any]) -> None:
            raise OutputError("full")

    job.writer = Full()
    with pytest.raises(OutputError):
        job.run(FakeEngine(), read_rows([str(data)], ReadOptions()))
    assert job.stats.rows_done == 0
    assert display.advanced == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("lost_at", ["start", "row"])
def test_a_stop_that_python_threw_away_still_stops(data: Path, lost_at: str) -> None:
    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    class Losing(FakeEngine):
        def _finish(self, row: PromptRow) -> RequestOutput:
            if lost_at == "row":
                Finalized()
            return super()._finish(row)

    job, writer, _ = make_job()
    with job.interrupts:
        if lost_at == "start":
            Finalized()
        with pytest.raises(StopRun) as stop:
            job.run(Losing(), read_rows([str(data)], ReadOptions()))
    assert stop.value.exit_code == 143
    # What was finished then is written, and nothing after it.
    indices = [r["index"] for r in writer.records]
    assert indices == ([] if lost_at == "start" else [1, 3])


def test_a_useless_draft_is_named_once(tmp_path: Path) -> None:
    class Useless(FakeEngine):
        def _finish(self, row: PromptRow) -> RequestOutput:
            stats = SpeculationStats(3)
            for _ in range(40):
                stats.add_spec_step(3, 0, 1)
            choice = ChoiceOutput(0, (7,) * 40, "", "length", None, 1, stats)
            return RequestOutput(row, (1, 2), (choice,), None)

    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n' * 20)
    job, writer, display = make_job()
    job.run(Useless(), read_rows([str(path)], ReadOptions()))
    assert len(writer.records) == 20
    ((message, hint),) = display.warnings
    assert message.startswith("only 0 of 320 first drafts were accepted")
    assert hint is not None
    assert "--no-draft" in hint

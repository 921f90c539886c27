"""How fast lines are read and written, an output is scanned for a resume, and what a line costs.

    taskset -c 0 python -m benchmarks.io_throughput

Generation is stubbed out: rows finish as soon as they are read, in groups out of order. Figures are
per second of processor time of one process, so that other work on the machine does not count. The
record goes to `results/io_throughput.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.record import write_record
from specgen.display import QuietDisplay
from specgen.interrupts import Interrupts
from specgen.job import Job
from specgen.pipeline.request import ChoiceOutput, PromptRow, RequestOutput
from specgen.request_io import fast_json
from specgen.request_io.file_writer import OutputOptions
from specgen.request_io.partial import RowIndex, scan
from specgen.request_io.reader import ReadOptions, read_rows
from specgen.request_io.writer import open_writer
from specgen.stats import SpeculationStats


class StubEngine:
    """Finishes rows in groups of 16, last first, with the same completion for all."""

    def __init__(self) -> None:
        stats = SpeculationStats(3)
        stats.add_plain(1)
        for accepted in (3, 1, 0, 2, 3, 1):
            stats.add_spec_step(3, accepted, accepted + 1)
        self._choices = (
            ChoiceOutput(0, tuple(range(17)), "a word or two " * 6, "stop", None, 5, stats),
        )

    def generate(self, rows: Iterable[PromptRow]) -> Iterator[RequestOutput]:
        held: list[PromptRow] = []
        for row in rows:
            held.append(row)
            if len(held) == 16:
                while held:
                    yield RequestOutput(held.pop(), (1, 2, 3), self._choices)
        while held:
            yield RequestOutput(held.pop(), (1, 2, 3), self._choices)

    def take_finished(self) -> list[RequestOutput]:
        return []


def write_input(path: Path, num_lines: int) -> None:
    noise = random.Random(0)
    words = ["light", "river", "seven", "quiet", "paper", "above", "stone", "under"]
    with open(path, "w") as file:
        for index in range(num_lines):
            prompt = " ".join(noise.choices(words, k=50))
            row = {"prompt": prompt, "custom_id": f"q{index}", "max_tokens": 100}
            file.write(json.dumps(row | {"temperature": 0.7}) + "\n")


def run_job(given: Path, out: Path) -> tuple[float, float]:
    """Lines per second of processor time, and of the clock: reading, writing and ordering."""
    writer = open_writer(str(out), OutputOptions(overwrite=True))
    job = Job(writer, QuietDisplay(), Interrupts())
    cpu, clock = time.process_time(), time.perf_counter()
    job.run(StubEngine(), read_rows([str(given)], ReadOptions(), writer.keep))
    writer.finish(job.num_rows, {})
    return (
        job.num_rows / (time.process_time() - cpu),
        job.num_rows / (time.perf_counter() - clock),
    )


def scan_output(out: Path) -> dict[str, float]:
    with open(out, "rb") as file:
        size, rows = os.fstat(file.fileno()).st_size, RowIndex()
        cpu, clock = time.process_time(), time.perf_counter()
        result = scan(file.fileno(), rows, whole=True)
        seconds, clock = time.process_time() - cpu, time.perf_counter() - clock
    return {
        "bytes_per_line": size / result.num_lines,
        "megabytes_per_cpu_s": size / seconds / 1e6,
        "megabytes_per_s": size / clock / 1e6,
    }


def memory_per_line(given: Path, out: Path) -> dict[str, float]:
    """Growth of the heap over the second half of a run, of a scan, and of a resume."""
    writer = open_writer(str(out), OutputOptions(overwrite=True))
    job = Job(writer, QuietDisplay(), Interrupts())
    marks: list[tuple[int, int]] = []

    def watched(rows: Iterable[Any]) -> Iterator[Any]:
        for count, row in enumerate(rows):
            if count % 10_000 == 0:
                marks.append((count, tracemalloc.get_traced_memory()[0]))
            yield row

    tracemalloc.start()
    job.run(StubEngine(), watched(read_rows([str(given)], ReadOptions(), writer.keep)))
    half = marks[len(marks) // 2]
    running = (marks[-1][1] - half[1]) / (marks[-1][0] - half[0])
    writer.abort()
    before = tracemalloc.get_traced_memory()[0]
    resumed = open_writer(str(out))
    held = (tracemalloc.get_traced_memory()[0] - before) / resumed.num_rows
    tracemalloc.stop()
    resumed.abort()
    return {"run": running, "resume": held}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output-dir")
    asked = parser.parse_args()
    figures: dict[str, Any] = {
        "lines": asked.lines, "lines_per_cpu_s": {}, "lines_per_s": {}, "resume_scan": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        given, out = Path(scratch, "in.jsonl"), Path(scratch, "out.jsonl")
        write_input(given, asked.lines)
        loads, dumps = fast_json._LOADS, fast_json._DUMPS
        for name in ("fast_parser", "standard_library"):
            if name == "standard_library":
                fast_json._LOADS = fast_json._DUMPS = None
            elif loads is None:
                continue
            rates = [run_job(given, out) for _ in range(asked.repeats)]
            figures["lines_per_cpu_s"][name] = [round(cpu) for cpu, _ in rates]
            figures["lines_per_s"][name] = [round(clock) for _, clock in rates]
            print(name, figures["lines_per_cpu_s"][name], flush=True)
            scans = figures["resume_scan"][name] = [scan_output(out) for _ in range(asked.repeats)]
            print(json.dumps(scans[-1]), flush=True)
        fast_json._LOADS, fast_json._DUMPS = loads, dumps
        figures["heap_bytes_per_line"] = memory_per_line(given, Path(scratch, "memory.jsonl"))
    print(json.dumps(figures["heap_bytes_per_line"]))
    write_record("io_throughput", figures, asked.output_dir)


if __name__ == "__main__":
    main()

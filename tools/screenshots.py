"""Pictures of a real run for the README: the live display, the summary, `specgen stats`.

    python -m tools.screenshots examples/prompts.jsonl --output-dir docs

Runs the built-in pair and draws what the command line draws, at two thirds of the run and at its
end, into SVG files.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from specgen.acceptance_view import output_tables, summary_tables
from specgen.config import EngineConfig
from specgen.display import QuietDisplay
from specgen.interrupts import Interrupts
from specgen.job import Job
from specgen.live_view import live_view
from specgen.output_stats import OutputStats
from specgen.pipeline.engine import Engine
from specgen.request_io.file_writer import OutputOptions
from specgen.request_io.reader import ReadOptions, read_rows
from specgen.request_io.source import count_rows, read_lines
from specgen.request_io.writer import open_writer
from specgen.stats import RunStats

WIDTH = 100


class Photographer(QuietDisplay):
    """Draws the live display once, at two thirds of the run."""

    def __init__(self, total: int, path: Path, command: str) -> None:
        self._total, self._path, self._command = total, path, command

    def advance(self, stats: RunStats) -> None:
        if stats.rows_done == 2 * self._total // 3:
            console = new_console()
            console.print(f"[bold]$[/bold] {self._command}")
            console.print(live_view(stats, self._total, console))
            save(console, self._path, "specgen run")


def new_console() -> Console:
    return Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False
    )


def save(console: Console, path: Path, title: str) -> None:
    console.save_svg(str(path), title=title)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="?", default="examples/prompts.jsonl")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--draft-sample", default="gumbel")
    parser.add_argument("--output-dir", type=Path, default=Path("docs"))
    given = parser.parse_args()
    flags = f"--draft-sample {given.draft_sample} "
    flags += f"--num-speculative-tokens {given.num_speculative_tokens}"
    total = count_rows([given.prompts])
    assert total
    settings: dict[str, Any] = {"num_speculative_tokens": given.num_speculative_tokens}
    engine = Engine(EngineConfig(**settings, draft_sample=given.draft_sample))
    output_dir, prompts = given.output_dir.resolve(), Path(given.prompts).resolve()
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        out = Path("out.jsonl")
        writer = open_writer(str(out), OutputOptions())
        live = output_dir / "run-live.svg"
        display = Photographer(total, live, f"specgen run {given.prompts} {flags} -o out.jsonl")
        with Interrupts() as interrupts:
            job = Job(writer, display, interrupts)
            job.run(engine, read_rows([str(prompts)], ReadOptions(), writer.keep))
            seconds = job.stats.elapsed()
            writer.finish(job.num_rows, {})
        console = new_console()
        for table in summary_tables(job.stats, seconds, console):
            console.print(table)
        save(console, output_dir / "run-summary.svg", "specgen run")
        stats = OutputStats(num_worst=3)
        stats.read(read_lines([str(out)]))
        console = new_console()
        console.print("[bold]$[/bold] specgen stats out.jsonl --lowest 3")
        for table in output_tables(stats, console):
            console.print(table)
        save(console, output_dir / "stats.svg", "specgen stats")


if __name__ == "__main__":
    main()

"""The main job: every row of the input through an engine, every result into the output.

Knows nothing of flags or models, so that it can be driven by any engine that has `generate`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from specgen.display import Display
from specgen.errors import InputError, OutputError
from specgen.interrupts import Interrupts
from specgen.output_stats import add_record
from specgen.pipeline.request import PromptRow, RequestOutput
from specgen.request_io import fast_json
from specgen.request_io.reader import PassedRow
from specgen.request_io.record import error_message, hint_for, to_record
from specgen.request_io.writer import RowWriter
from specgen.stats import RunStats
from specgen.wording import counted

__all__ = ["Job", "RowEngine"]


_MANY_ROWS = 1_000_000
_DRAFT_HINT = (
    "look at its auxiliary layers, rope base and norms with `specgen doctor`; --no-draft is faster "
    "than this draft"
)


class RowEngine(Protocol):
    """What the job needs of an engine."""

    def generate(self, rows: Iterable[PromptRow]) -> Iterator[RequestOutput]:
        """Results in order of completion; rows are pulled as they can be taken."""

    def take_finished(self) -> list[RequestOutput]:
        """Rows that are finished, but that `generate` has not handed out when it was stopped.

        The row it handed out last may be among them.
        """


@dataclass
class Job:
    """One pass over the input.

    Attributes:
        writer: takes one record a row, bad rows included.
        display: told of every finished row.
        interrupts: keeps signals out of the moment in which a row is written and counted.
        formatter: makes the record of a row.
        max_errors: stop when more rows of the output than this have failed; None never stops.
        stats: accounts of the rows finished so far.
        num_rows: rows read so far, those of other shards and of earlier runs included.
        complete: set by the caller once the output is whole.
    """

    writer: RowWriter
    display: Display
    interrupts: Interrupts
    formatter: Callable[[RequestOutput], dict[str, Any]] = to_record
    max_errors: int | None = None
    stats: RunStats = field(default_factory=RunStats)
    num_rows: int = 0
    complete: bool = False

    def __post_init__(self) -> None:
        """Start the hash of the whole input."""
        self._input_hash = hashlib.blake2b(digest_size=16)
        self._last: RequestOutput | None = None
        self._has_warned = False

    @property
    def input_hash(self) -> str:
        """32 hex digits over the hashes of the rows read, in input order."""
        return self._input_hash.hexdigest()

    def check_errors(self) -> None:
        """Give up if too many rows of the output have failed, those of earlier runs included.

        Raises:
            InputError: there are more of them than `max_errors`.
        """
        failed = self.writer.num_failed
        if self.max_errors is None or failed <= self.max_errors:
            return
        earlier = failed - self.stats.rows_failed
        of_earlier = f", {earlier:,} in earlier runs" if earlier else ""
        raise InputError(
            f"{counted(failed, 'row')} failed{of_earlier}, --max-errors is {self.max_errors:,}",
            "mend the rows or the settings and give --retry-errors, or a higher --max-errors",
        )

    def whole_output(self) -> RunStats | None:
        """Accounts of all rows of the output; None if this run made them all.

        Reads the lines of earlier runs, some 100,000 a second.

        Raises:
            OutputError: they cannot be read.
        """
        if not self.stats.rows_kept:
            return None
        if self.stats.rows_kept >= _MANY_ROWS:
            self.display.note(f"adding up the {self.stats.rows_kept:,} rows of earlier runs")
        whole, num_unread = copy.deepcopy(self.stats), 0
        whole.rows_kept = whole.rows_kept_failed = 0
        for line in self.writer.earlier_lines():
            try:
                add_record(whole, fast_json.load(line))
            except (KeyError, TypeError, ValueError, IndexError, AttributeError):
                num_unread += 1
        if num_unread:
            self.display.warn(f"{counted(num_unread, 'earlier row')} not in the figures: damaged")
        return whole

    @property
    def rows_failed(self) -> int:
        """Failed rows of the output, those of earlier runs included."""
        return self.stats.rows_failed + self.stats.rows_kept_failed

    def run(
        self,
        engine: RowEngine,
        rows: Iterable[PromptRow | RequestOutput | PassedRow],
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """Drive all rows to the output; whatever `rows`, engine or writer raise goes through.

        What is finished when that happens is written first, unless it is the writer that fails.

        Args:
            engine: what runs the rows.
            rows: what came of the lines.
            ready: whether the next of `rows` is there without waiting.
        """
        self.stats.restart_clock()
        try:
            self.interrupts.check()
            for output in engine.generate(_GoodRows(self, iter(rows), ready)):
                self._accept(output)
        except (OutputError, BrokenPipeError):
            raise
        except BaseException:
            self.max_errors = None
            with self.interrupts.held():
                for output in engine.take_finished():
                    if output is not self._last:
                        self._accept(output)
            raise

    def sort(self, item: PromptRow | RequestOutput | PassedRow) -> PromptRow | None:
        """A row for the engine; one that is bad already is written on the way."""
        row = item.row if isinstance(item, RequestOutput) else item
        self._input_hash.update(bytes.fromhex(row.input_hash))
        self.num_rows += 1
        if isinstance(item, PromptRow):
            return item
        if isinstance(item, RequestOutput):
            self._accept(item)
        elif item.kept is not None:
            self.stats.keep(failed=item.kept.failed)
        return None

    def _accept(self, output: RequestOutput) -> None:
        with self.interrupts.held():
            self.writer.write(self.formatter(output))
            self.stats.add(output)
            self._last = output
        self.interrupts.check()
        if output.error is not None:
            self.display.warn(error_message(output), hint_for(output.error.code))
        self._watch_draft()
        self.display.advance(self.stats)
        self.check_errors()

    def _watch_draft(self) -> None:
        """Warn, once, of a draft that costs time and gains nothing; the text is right anyway."""
        warning = None if self._has_warned else self.stats.draft_warning
        if warning is not None:
            self._has_warned = True
            self.display.warn(warning, _DRAFT_HINT)


class _GoodRows(Iterator[PromptRow]):
    """The rows that the engine is to run, as they come in."""

    def __init__(
        self,
        job: Job,
        items: Iterator[PromptRow | RequestOutput | PassedRow],
        ready: Callable[[], bool],
    ) -> None:
        self._job = job
        self._items = items
        self._item_ready = ready
        self._next: PromptRow | None = None
        self._ended = False

    def ready(self) -> bool:
        """Whether the next row, or the end, is there without waiting."""
        while self._next is None and not self._ended and self._item_ready():
            self._take()
        return self._next is not None or self._ended

    def __next__(self) -> PromptRow:
        while self._next is None and not self._ended:
            self._take()
        if self._next is None:
            raise StopIteration
        row, self._next = self._next, None
        return row

    def _take(self) -> None:
        item = next(self._items, None)
        if item is None:
            self._ended = True
        else:
            self._next = self._job.sort(item)

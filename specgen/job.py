"""The main job: every row of the input through an engine, every result into the output.

Knows nothing of flags or models, so that it can be driven by any engine that has `generate`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from specgen.display import Display
from specgen.interrupts import Interrupts
from specgen.pipeline.request import PromptRow, RequestOutput
from specgen.request_io.record import error_message, hint_for, to_record
from specgen.request_io.writer import RowWriter
from specgen.stats import RunStats

__all__ = ["Job", "RowEngine"]


class RowEngine(Protocol):
    """What the job needs of an engine."""

    def generate(self, rows: Iterable[PromptRow]) -> Iterator[RequestOutput]:
        """Results in order of completion; rows are pulled as they can be taken."""


@dataclass
class Job:
    """One pass over the input.

    Attributes:
        writer: takes one record a row, bad rows included.
        display: told of every finished row.
        interrupts: keeps signals out of the moment in which a row is written and counted.
        return_token_ids: whether records hold the generated ids.
        stats: accounts of the rows finished so far.
        num_rows: rows read so far.
        complete: set by the caller once the output is whole.
    """

    writer: RowWriter
    display: Display
    interrupts: Interrupts
    return_token_ids: bool = False
    stats: RunStats = field(default_factory=RunStats)
    num_rows: int = 0
    complete: bool = False

    def __post_init__(self) -> None:
        """Start the hash of the whole input."""
        self._input_hash = hashlib.blake2b(digest_size=16)

    @property
    def input_hash(self) -> str:
        """32 hex digits over the hashes of the rows read, in input order."""
        return self._input_hash.hexdigest()

    def run(self, engine: RowEngine, rows: Iterable[PromptRow | RequestOutput]) -> None:
        """Drive all rows to the output; whatever `rows`, engine or writer raise goes through."""
        self.stats.restart_clock()
        for output in engine.generate(self._good_rows(rows)):
            self._accept(output)

    def _good_rows(self, rows: Iterable[PromptRow | RequestOutput]) -> Iterator[PromptRow]:
        """Rows for the engine; a row that is bad already is written on the way."""
        for item in rows:
            row = item.row if isinstance(item, RequestOutput) else item
            self._input_hash.update(bytes.fromhex(row.input_hash))
            self.num_rows += 1
            if isinstance(item, RequestOutput):
                self._accept(item)
            else:
                yield item

    def _accept(self, output: RequestOutput) -> None:
        record = to_record(output, return_token_ids=self.return_token_ids)
        with self.interrupts.held():
            self.writer.write(record)
            self.stats.add(output)
        if output.error is not None:
            self.display.warn(error_message(output), hint_for(output.error.code))
        self.display.advance(self.stats)

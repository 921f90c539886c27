"""Whether the rows of an earlier run belong to the input that is given now.

A few changed lines are run again. An input that is another one, or ends before the rows do, is
refused: rows that took hours must not vanish over a mistyped name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specgen.errors import UsageError
from specgen.request_io.partial import LineReader, RowIndex

__all__ = ["Comparison", "Digests", "check_input", "refuse_end", "refuse_other"]

#: Hashes of the first N lines of the input; None if it can be read only once.
Digests = Callable[[int], Iterable[str] | None]

_HINT = "give the input (and --limit) of that run, choose another -o, or give --overwrite"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What became of the input since.

    Attributes:
        num_changed: rows of other lines than the output's; their lines have been forgotten.
        num_lines: lines of the input, as far as it was read.
    """

    num_changed: int
    num_lines: int


def check_input(
    rows: RowIndex, fd: int, digests: Digests, name: str, num_lines: int = 0
) -> Comparison | None:
    """Compare the lines of `fd` with the input, and forget those of rows that have changed.

    Args:
        rows: the lines.
        fd: what holds them.
        digests: of the input.
        name: of the output, for messages.
        num_lines: read so many lines of the input at least.

    Returns None if the input can be read only once.

    Raises:
        UsageError: most rows are those of other lines, or some lie beyond the end of the input.
    """
    needed = rows.shard.index(len(rows) - 1) + 1 if rows.count() else 0
    hashes = digests(max(needed, num_lines))
    if hashes is None:
        return None
    reader = LineReader(fd)
    num_read = num_same = num_changed = 0
    for index, digest in enumerate(hashes):
        num_read += 1
        if not rows.shard.owns(index) or (offset := rows.offset(index)) < 0:
            continue
        head = reader.head(offset)
        same = head is not None and (head.index, head.input_hash) == (index, digest)
        num_same += same
        if not same:
            num_changed += 1
            rows.drop(index)
    refuse_end(rows, num_read, name)
    if num_changed > num_same:
        refuse_other(name, num_changed, num_same + num_changed)
    return Comparison(num_changed, num_read)


def refuse_end(rows: RowIndex, num_lines: int, name: str) -> None:
    """Refuse an input of `num_lines` lines if a row comes after its end.

    Raises:
        UsageError: there is one.
    """
    within = rows.shard.num_rows(num_lines)
    beyond = rows.count() - rows.count(within)
    if beyond:
        raise UsageError(
            f"{name}: holds {beyond:,} of its {rows.count():,} finished rows beyond the end of the "
            f"input, which has {num_lines:,}",
            _HINT,
        )


def refuse_other(name: str, num_changed: int, num_rows: int) -> None:
    """Refuse an input whose lines are not those that the rows were made of.

    Raises:
        UsageError: always.
    """
    which = (
        "the first finished row is that"
        if num_rows == 1
        else (f"{num_changed:,} of its {num_rows:,} finished rows are those")
    )
    raise UsageError(
        f"{name}: {which} of another input",
        _HINT,
    )

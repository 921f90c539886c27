"""Tables that fit terminals of any width and logs, without a wrapped cell or a lost letter.

A table is drawn in the widest of its forms that fits: in a box with a bar, in a box, or bare. A
still narrower one leaves columns out that say how often, not how much, and at last folds its cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specgen.wording import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["Column", "bar", "figure", "fits", "is_fancy", "percent", "table"]

_WIDEST_BAR, _SHORTEST_BAR = 40, 8
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, on which side its cells stand, and whether it can be spared."""

    name: str
    left: bool = False
    spare: bool = False


def is_fancy(console: Console) -> bool:
    """Whether the console shows box drawing and blocks."""
    return console.is_terminal and not console.options.ascii_only


def bar(share: float | None, width: int, *, fancy: bool) -> str:
    """A horizontal bar of `share` (0..1) of `width` characters, to an eighth where blocks show."""
    if share is None:
        return ""
    share = min(max(share, 0.0), 1.0)
    if not fancy:
        return "#" * round(share * width)
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def figure(value: float | None, digits: int = 2) -> str:
    """A number, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share as a percentage, or a dash."""
    return "-" if value is None else f"{100 * value:.1f} %"


def fits(columns: Sequence[Column], rows: Iterable[Sequence[str]], console: Console) -> bool:
    """Whether all columns fit, bare at least."""
    return _bare_width(_widths(columns, list(rows))) <= console.width


def table(
    title: str,
    columns: Sequence[Column],
    rows: Iterable[Sequence[str]],
    console: Console,
    *,
    shares: Sequence[float | None] | None = None,
) -> RenderableType:
    """A titled table in the widest form that fits.

    Args:
        title: stands above it.
        columns: without any name, the table has no header.
        rows: texts of the cells, shown as they are.
        console: where it goes.
        shares: 0..1 for each row, drawn as a bar behind it where there is room.
    """
    from rich.console import Group
    from rich.text import Text

    rows = [[printable(cell) for cell in row] for row in rows]
    room, boxed = console.width, True
    bar_width = 0
    if _boxed_width(_widths(columns, rows)) > room:
        boxed = False
        if _bare_width(_widths(columns, rows)) > room:
            kept = [place for place, column in enumerate(columns) if not column.spare]
            columns = [columns[place] for place in kept]
            rows = [[row[place] for place in kept] for row in rows]
    elif shares is not None:
        left = room - _boxed_width(_widths(columns, rows)) - 3
        bar_width = min(left, _WIDEST_BAR) if left >= _SHORTEST_BAR else 0
    drawn = _draw(columns, rows, console, boxed, shares or (), bar_width)
    return Group(Text(title, style="bold"), drawn)


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    from rich.cells import cell_len

    names = [column.name for column in columns]
    return [max(map(cell_len, cells)) for cells in zip(names, *rows, strict=True)]


def _boxed_width(widths: Sequence[int]) -> int:
    return sum(widths) + 3 * len(widths) + 1


def _bare_width(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _draw(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    console: Console,
    boxed: bool,
    shares: Sequence[float | None],
    bar_width: int,
) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    fancy = is_fancy(console)
    drawn = Table(
        box=(box.ROUNDED if fancy else box.ASCII) if boxed else None,
        show_header=any(column.name for column in columns),
        padding=(0, 1) if boxed else (0, 2, 0, 0),
        pad_edge=boxed,
        header_style="dim" if fancy else "",
    )
    for column in columns:
        side = "left" if column.left else "right"
        drawn.add_column(column.name, justify=side, overflow="fold")  # type: ignore[arg-type]
    if bar_width:
        drawn.add_column("", width=bar_width, no_wrap=True)
    for place, row in enumerate(rows):
        cells = [Text(cell) for cell in row]
        if bar_width:
            style = "cyan" if fancy else ""
            cells.append(Text(bar(shares[place], bar_width, fancy=fancy), style=style))
        drawn.add_row(*cells)
    return drawn

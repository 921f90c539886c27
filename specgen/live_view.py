"""What the live display and the head of a run look like on a terminal; draws, and keeps nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from specgen.stats import RunStats
from specgen.tables import bar, figure, is_fancy

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

__all__ = ["duration", "eta", "live_view", "settings_view"]

_BAR = 24
_NARROW = 72
_LEVELS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """`M:SS`, or `H:MM:SS`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def eta(stats: RunStats, total: int | None, seconds: float) -> float | None:
    """Seconds to come, if rows go on as they went; None where that is unknown."""
    if total is None or not stats.rows_done:
        return None
    return seconds / stats.rows_done * max(total - stats.rows_done, 0)


def live_view(stats: RunStats, total: int | None, console: Console) -> RenderableType:
    """Two lines: how far the run is, and how well it speculates. Fits any width."""
    from rich.console import Group

    return Group(_progress_line(stats, total, console), _speed_line(stats, console))


def _progress_line(stats: RunStats, total: int | None, console: Console) -> Text:
    from rich.text import Text

    seconds, fancy = stats.elapsed(), is_fancy(console)
    narrow = console.width < _NARROW
    line = Text(no_wrap=True, overflow="ellipsis")
    if total:
        width = 10 if narrow else _BAR
        done = bar(min(stats.rows_done / total, 1.0), width, fancy=fancy)
        line.append(done, "green" if stats.rows_done >= total else "cyan")
        line.append(("─" if fancy else "-") * (width - len(done)), "bright_black")
        line.append("  ")
    line.append(f"{stats.rows_done:,}", "bold")
    line.append(f"/{'?' if total is None else format(total, ',')} rows")
    if stats.rows_failed:
        line.append(f"  {stats.rows_failed:,} failed", "red")
    line.append(f"  {duration(seconds)}", "bright_black" if fancy else "")
    left = eta(stats, total, seconds)
    if left is not None and left > 0:
        line.append(f"  {duration(left)} left", "bright_black" if fancy else "")
    return line


def _speed_line(stats: RunStats, console: Console) -> Text:
    from rich.text import Text

    fancy, narrow = is_fancy(console), console.width < _NARROW
    spec = stats.speculation
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{stats.completion_tokens / max(stats.elapsed(), 1e-9):,.0f}", "bold")
    line.append(" tok/s")
    if not spec.num_spec_steps:
        return line
    line.append("  length " if narrow else "  acceptance length ")
    line.append(figure(spec.mean_acceptance_length), "bold")
    line.append("  " if narrow else "  by position ")
    for rate in spec.acceptance_per_position:
        share = rate or 0.0
        if fancy:
            line.append(_LEVELS[min(int(share * len(_LEVELS)), len(_LEVELS) - 1)], "cyan")
        line.append(f"{100 * share:.0f} ")
    line.append("%")
    return line


def settings_view(
    settings: Mapping[str, Any], console: Console, show: Callable[[Any], str]
) -> RenderableType:
    """The settings in as many columns of names and values as fit, read downwards.

    Args:
        settings: names and values.
        console: where they go.
        show: a value as text.
    """
    from rich.table import Table
    from rich.text import Text

    pairs = [(name, show(value)) for name, value in settings.items()]
    wide = [pair for pair in pairs if len(pair[1]) > 36]
    short = [pair for pair in pairs if len(pair[1]) <= 36]
    name_width = max((len(name) for name, _ in pairs), default=0)
    name_width = min(name_width, console.width // 2)
    value_width = max((len(value) for _, value in short), default=0)
    room = max(console.width - name_width - 4, 1)  # two spaces after each column
    value_width = min(value_width, room)
    columns = max(1, min(3, console.width // (name_width + value_width + 5)))
    rows = -(-len(short) // columns)
    style = "bright_black" if is_fancy(console) else ""
    table = Table.grid(padding=(0, 2))
    for _ in range(columns):
        table.add_column(style=style, width=name_width, overflow="fold")
        table.add_column(width=value_width, overflow="fold")
    for row in range(rows):
        cells: list[str | Text] = []
        for column in range(columns):
            at = column * rows + row
            cells += [Text(text) for text in short[at]] if at < len(short) else ["", ""]
        table.add_row(*cells)
    long = Table.grid(padding=(0, 2))
    long.add_column(style=style, width=name_width, overflow="fold")
    long.add_column(width=room, overflow="fold")
    for name, value in wide:
        long.add_row(Text(name), Text(value))
    from rich.console import Group

    return Group(*([table] if short else []), *([long] if wide else []))

"""Acceptance in tables and bars, for terminals of any width and for logs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from specgen.stats import SpeculationStats

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from specgen.output_stats import OutputStats

__all__ = [
    "acceptance_table", "bar", "figure", "is_fancy", "new_table", "output_tables", "percent",
]  # fmt: skip

_WIDEST_BAR = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"


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


def new_table(title: str, console: Console, *, show_header: bool = True) -> Table:
    """An empty table in the style that fits the console."""
    from rich import box
    from rich.table import Table

    return Table(
        title=title,
        box=box.ROUNDED if is_fancy(console) else box.ASCII,
        show_header=show_header,
        title_justify="left",
        title_style="bold",
        header_style="" if not is_fancy(console) else "dim",
    )


def _bar_width(console: Console, other_columns: int) -> int:
    return max(min(console.width - other_columns, _WIDEST_BAR), 6)


def acceptance_table(spec: SpeculationStats, console: Console) -> Table:
    """How often each draft position was accepted, and how many drafts a step accepted."""
    fancy = is_fancy(console)
    steps_width = max(len(f"{spec.num_spec_steps:,}"), 5)
    width = _bar_width(console, 56 + steps_width)
    table = new_table("Acceptance", console)
    table.add_column("position", justify="right")
    table.add_column("accepted", justify="right")
    table.add_column("accepted drafts", justify="right")
    table.add_column("steps", justify="right")
    table.add_column("share of steps", min_width=width + 8)
    rates: list[float | None] = [None, *spec.acceptance_per_position]
    for count, steps in enumerate(spec.acceptance_histogram):
        share = steps / spec.num_spec_steps
        table.add_row(
            str(count) if count else "",
            percent(rates[count]) if count else "",
            str(count),
            f"{steps:,}",
            f"{bar(share, width, fancy=fancy)} {100 * share:.1f} %",
        )
    return table


def _bars(
    title: str,
    columns: Sequence[str],
    rows: Iterable[tuple[Sequence[str], float | None]],
    console: Console,
) -> Table:
    """A table whose last column is a bar of each row's share."""
    from rich.text import Text

    fancy, rows = is_fancy(console), list(rows)
    cells = [columns, *(texts for texts, _ in rows)]
    others = sum(max(len(row[i]) for row in cells) + 3 for i in range(len(columns)))
    width = _bar_width(console, others + 4)
    table = new_table(title, console)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", width=width, no_wrap=True)
    for texts, share in rows:
        table.add_row(*texts, Text(bar(share, width, fancy=fancy), style="cyan" if fancy else ""))
    return table


def output_tables(stats: OutputStats, console: Console) -> list[Any]:
    """All that `specgen stats` shows."""
    run, spec = stats.run, stats.run.speculation
    total = new_table("Rows", console, show_header=False)
    total.add_column()
    total.add_column(justify="right")
    total.add_row("rows ok", f"{run.rows_ok:,}")
    total.add_row("rows failed", f"{run.rows_failed:,}")
    for code, count in sorted(run.error_codes.items()):
        total.add_row(f"  {code}", f"{count:,}")
    total.add_row("prompt tokens", f"{run.prompt_tokens:,}")
    total.add_row("completion tokens", f"{run.completion_tokens:,}")
    for reason, count in sorted(run.finish_reasons.items()):
        total.add_row(f"  ended by {reason}", f"{count:,}")
    if not spec.num_spec_steps:
        total.add_row("speculation", "none")
        return [total]
    total.add_row("spec steps", f"{spec.num_spec_steps:,}")
    total.add_row("drafted tokens", f"{spec.num_draft_tokens:,}")
    if not spec.faithful:
        total.add_row("faithful to the target", "no: synthetic acceptance")
    total.add_row("accepted tokens", f"{spec.num_accepted_draft_tokens:,}")
    total.add_row("acceptance rate", percent(spec.draft_acceptance_rate))
    total.add_row("mean acceptance length", figure(spec.mean_acceptance_length))
    return [total, *_plots(stats, spec, console)]


def _plots(stats: OutputStats, spec: SpeculationStats, console: Console) -> list[Any]:
    accepted, drafted = spec.accepted_per_position, spec.drafted_per_position
    rates = spec.acceptance_per_position
    most = max(spec.acceptance_histogram)
    longest = spec.num_speculative_tokens + 1
    positions = _bars(
        "Acceptance by position",
        ("position", "accepted", "of drafted", "rate"),
        (
            ((str(i + 1), f"{accepted[i]:,}", f"{drafted[i]:,}", percent(rates[i])), rates[i])
            for i in range(spec.num_speculative_tokens)
        ),
        console,
    )
    histogram = _bars(
        "Accepted drafts a step",
        ("drafts", "steps", "share"),
        (
            ((str(j), f"{steps:,}", percent(steps / spec.num_spec_steps)), steps / most)
            for j, steps in enumerate(spec.acceptance_histogram)
        ),
        console,
    )
    lengths = _bars(
        "Acceptance length by completion length",
        ("tokens", "rows", "length"),
        (
            (
                (
                    "{:,}-{:,}".format(*b["completion_tokens"]),
                    f"{b['num_requests']:,}",
                    figure(length),
                ),
                None if length is None else length / longest,
            )
            for b in (share.to_dict() for share in stats.length_bins)
            for length in [b["mean_acceptance_length"]]
        ),
        console,
    )
    requests = new_table("Rows by acceptance", console)
    requests.add_column("")
    of_length, of_rate = stats.acceptance_length.quantiles(), stats.acceptance_rate.quantiles()
    for name in ("length", "rate"):
        requests.add_column(name, justify="right")
    for name in of_length:
        requests.add_row(name, figure(of_length[name]), percent(of_rate[name]))
    tables = [positions, histogram, lengths, requests]
    if stats.worst:
        worst = new_table("Rows of the lowest acceptance length", console)
        for name in ("index", "custom_id", "tokens", "length", "line"):
            worst.add_column(name, justify="right" if name in ("tokens", "length") else "left")
        for row in stats.worst:
            worst.add_row(
                str(row.index),
                row.name or "",
                f"{row.completion_tokens:,}",
                figure(-row.minus_length),
                f"{row.source}:{row.line}",
            )
        tables.append(worst)
    return tables

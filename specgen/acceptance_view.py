"""What a run and an output say about acceptance, as tables and bars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specgen.stats import RunStats, SpeculationStats
from specgen.tables import Column, figure, fits, percent, table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from specgen.output_stats import OutputStats

__all__ = ["output_tables", "summary_tables"]

_LABELS = (Column("", left=True), Column(""))


def summary_tables(
    stats: RunStats, seconds: float, console: Console, whole: RunStats | None = None
) -> list[RenderableType]:
    """The closing tables: the run, and its acceptance.

    Args:
        stats: of this run.
        seconds: how long it took.
        console: where they go.
        whole: of the whole output, where earlier runs have a part in it.
    """
    own = [*_rows(stats), *_tokens(stats)]
    own.append(("time", f"{seconds:,.1f} s"))
    own.append(("completion tokens/s", f"{stats.completion_tokens / max(seconds, 1e-9):,.1f}"))
    own += _speculation(stats)
    if whole is None:
        title = "Summary of this run" if stats.rows_kept else "Summary"
        return [table(title, _LABELS, own, console), *_acceptance(stats.speculation, console)]
    everything = dict([*_rows(whole), *_tokens(whole), *_speculation(whole)])
    columns = (Column("", left=True), Column("this run"), Column("whole output"))
    names = dict.fromkeys((*dict(own), *everything))
    both = [(name, dict(own).get(name, ""), everything.get(name, "")) for name in names]
    title = f"Summary, with {stats.rows_kept:,} rows of earlier runs"
    if fits(columns, both, console):
        summaries = [table(title, columns, both, console)]
    else:
        summaries = [
            table("This run", _LABELS, own, console),
            table("Whole output", _LABELS, list(everything.items()), console),
        ]
    return [*summaries, *_acceptance(whole.speculation, console, ", whole output")]


def output_tables(stats: OutputStats, console: Console) -> list[RenderableType]:
    """All that `specgen stats` shows."""
    run, spec = stats.run, stats.run.speculation
    rows = [*_rows(run)]
    rows += [(f"  {code}", f"{count:,}") for code, count in sorted(run.error_codes.items())]
    rows += _tokens(run)
    rows += [
        (f"  ended by {why}", f"{count:,}") for why, count in sorted(run.finish_reasons.items())
    ]
    rows += _speculation(run)
    tables = [table("Rows", _LABELS, rows, console)]
    if not spec.num_spec_steps:
        return tables
    tables += [*_acceptance(spec, console), _fewer_drafts(spec, console)]
    return [*tables, _by_length(stats, console), *_by_row(stats, console)]


def _rows(stats: RunStats) -> list[tuple[str, str]]:
    rows = [("rows ok", f"{stats.rows_ok:,}"), ("rows failed", f"{stats.rows_failed:,}")]
    if stats.rows_truncated:
        rows.append(("prompts cut at the left", f"{stats.rows_truncated:,}"))
    if stats.rows_kept:
        rows.append(("rows of earlier runs", f"{stats.rows_kept:,}"))
    return rows


def _tokens(stats: RunStats) -> list[tuple[str, str]]:
    return [
        ("prompt tokens", f"{stats.prompt_tokens:,}"),
        ("completion tokens", f"{stats.completion_tokens:,}"),
    ]


def _speculation(stats: RunStats) -> list[tuple[str, str]]:
    spec = stats.speculation
    if not spec.num_spec_steps:
        return [("speculation", "none")]
    unfaithful = [] if spec.faithful else [("faithful to the target", "no, synthetic")]
    return [
        *unfaithful,
        ("spec steps", f"{spec.num_spec_steps:,}"),
        ("drafted tokens", f"{spec.num_draft_tokens:,}"),
        ("accepted tokens", f"{spec.num_accepted_draft_tokens:,}"),
        ("acceptance rate", percent(spec.draft_acceptance_rate)),
        ("mean acceptance length", figure(spec.mean_acceptance_length)),
        ("  mean over rows", figure(stats.mean_length_of_rows)),
    ]


def _acceptance(spec: SpeculationStats, console: Console, of: str = "") -> list[RenderableType]:
    """How often each draft position was accepted, and how many drafts a step accepted."""
    if not spec.num_spec_steps:
        return []
    accepted, drafted = spec.accepted_per_position, spec.drafted_per_position
    rates = spec.acceptance_per_position
    positions = table(
        f"Acceptance by position{of}",
        (
            Column("position"),
            Column("accepted", spare=True),
            Column("of drafted", spare=True),
            Column("rate"),
        ),
        [
            (str(i + 1), f"{accepted[i]:,}", f"{drafted[i]:,}", percent(rates[i]))
            for i in range(spec.num_speculative_tokens)
        ],
        console,
        shares=rates,
    )
    steps = spec.acceptance_histogram
    histogram = table(
        f"Accepted drafts a step{of}",
        (Column("drafts"), Column("steps", spare=True), Column("share")),
        [
            (str(j), f"{count:,}", percent(count / spec.num_spec_steps))
            for j, count in enumerate(steps)
        ],
        console,
        shares=[count / max(steps) for count in steps],
    )
    return [positions, histogram]


def _fewer_drafts(spec: SpeculationStats, console: Console) -> RenderableType:
    found = spec.with_fewer_drafts()
    return table(
        "What if a step had fewer drafts",
        (Column("drafts"), Column("length"), Column("rate")),
        [
            (
                str(one["num_speculative_tokens"]),
                figure(one["mean_acceptance_length"]),
                percent(one["draft_acceptance_rate"]),
            )
            for one in found
        ],
        console,
        shares=[one["mean_acceptance_length"] / (spec.num_speculative_tokens + 1) for one in found],
    )


def _by_length(stats: OutputStats, console: Console) -> RenderableType:
    bins = [share.to_dict() for share in stats.length_bins]
    lengths = [one["mean_acceptance_length"] for one in bins]
    longest = stats.run.speculation.num_speculative_tokens + 1
    return table(
        "Acceptance length by completion length",
        (Column("tokens"), Column("rows", spare=True), Column("length")),
        [
            (
                "{:,}-{:,}".format(*one["completion_tokens"]),
                f"{one['num_requests']:,}",
                figure(one["mean_acceptance_length"]),
            )
            for one in bins
        ],
        console,
        shares=[None if length is None else length / longest for length in lengths],
    )


def _by_row(stats: OutputStats, console: Console) -> list[RenderableType]:
    of_length, of_rate = stats.acceptance_length.quantiles(), stats.acceptance_rate.quantiles()
    quantiles = table(
        "Rows by acceptance",
        (Column("", left=True), Column("length"), Column("rate")),
        [(name, figure(of_length[name]), percent(of_rate[name])) for name in of_length],
        console,
    )
    if not stats.worst:
        return [quantiles]
    lowest = table(
        "Rows of the lowest acceptance length",
        (
            Column("index"),
            Column("custom_id", left=True),
            Column("tokens", spare=True),
            Column("length"),
            Column("line", left=True, spare=True),
        ),
        [
            (
                str(row.index),
                row.name or "",
                f"{row.completion_tokens:,}",
                figure(-row.minus_length),
                f"{row.source}:{row.line}",
            )
            for row in stats.worst
        ],
        console,
    )
    return [quantiles, lowest]

"""`specgen stats`: what outputs say about speculation."""

from __future__ import annotations

import json
import sys

import click

from specgen.errors import ExitCode, OutputError

__all__ = ["stats"]


@click.command()
@click.argument("outputs", nargs=-1, required=True, metavar="OUT...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--lowest",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Name the N rows of the lowest acceptance length.",
)
def stats(outputs: tuple[str, ...], as_json: bool, lowest: int) -> int:
    """Show acceptance over the rows of OUT (any form, gzip or zstd too; - is stdin).

    By draft position, as a histogram, by completion length and by row. An OUT.partial will do.
    """
    from rich.console import Console

    from specgen.acceptance_view import output_tables
    from specgen.output_stats import OutputStats
    from specgen.request_io.source import check_inputs, read_lines

    check_inputs(outputs)
    found = OutputStats(lowest)
    found.read(read_lines(outputs))
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
        return ExitCode.OK
    console = Console(highlight=False, markup=False, emoji=False)
    try:
        for table in output_tables(found, console):
            console.print(table)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"<stdout>: cannot be written: {error.strerror}") from error
    sys.stdout.flush()
    return ExitCode.OK

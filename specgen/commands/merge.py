"""`specgen merge`: the outputs of shards to one."""

from __future__ import annotations

import click

from specgen.errors import ExitCode

__all__ = ["merge"]


@click.command()
@click.argument("shards", nargs=-1, required=True, metavar="SHARD...")
@click.option(
    "-o", "--output", metavar="OUT", required=True, help="Output file; - is standard output."
)
@click.option("--overwrite", is_flag=True, help="Replace OUT.")
def merge(shards: tuple[str, ...], output: str, overwrite: bool) -> int:
    """Join the outputs of `specgen run --shard I/N` into the one of a single run.

    Checks that they are all shards of the same run, and that none is missing. Exit codes: 0 joined,
    2 usage, 4 a shard is missing or does not belong, 6 output.
    """
    from specgen.request_io.merge import merge_shards

    merged = merge_shards(shards, output, overwrite=overwrite)
    failed = f", {merged.num_failed:,} of them failed" if merged.num_failed else ""
    name = "<stdout>" if output == "-" else output
    click.echo(f"{name}: {merged.num_rows:,} rows{failed}", err=True)
    return ExitCode.OK

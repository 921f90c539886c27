"""`specgen doctor`: what the machine offers."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from specgen.commands.flags import DRAFT, MODEL, TOKENIZER, with_options
from specgen.config import EngineConfig
from specgen.errors import ExitCode

__all__ = ["doctor"]

_MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


def _lengths(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    del ctx, param
    if value is None:
        return None
    try:
        lengths = tuple(int(part) for part in value.split(","))
    except ValueError:
        lengths = (0,)
    if min(lengths) < 1:
        raise click.BadParameter("must be numbers of tokens, such as 2048,8192")
    return lengths


@contextmanager
def _no_collections() -> Iterator[None]:
    """Look for no cycles of garbage, nor at the end of the process among what stands now.

    Imports leave hundreds of thousands of objects and hardly any garbage; to look through them
    takes a third of this command's time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


_FLAGS = [
    click.option(
        "--lengths",
        callback=_lengths,
        metavar="N,...",
        help="Say the memory of rows of so many tokens.  [default: 2048,8192,32768]",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
]


@click.command()
@with_options(TOKENIZER, MODEL, DRAFT, _FLAGS)
def doctor(lengths: tuple[int, ...] | None, as_json: bool, **flags: Any) -> int:
    """Say what this machine offers, and whether a target and a draft fit together.

    Looks at software, GPU, Triton, and the configurations, tokenizer and tensor headers of the
    models; loads no weights. Takes all flags of `specgen run` that are about models. Exit code 0 if
    specgen can run here, else 5.
    """
    from specgen.doctor import examine

    with _no_collections():
        findings = list(examine(EngineConfig(**flags), lengths))
    healthy = all(finding.status != "problem" for finding in findings)
    if as_json:
        report = {"ok": healthy, "findings": [finding.to_dict() for finding in findings]}
        click.echo(json.dumps(report, indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        section = None
        for finding in findings:
            if finding.section != section:
                section = finding.section
                click.echo(section)
            click.echo(f"  {_MARKS[finding.status]:<7}  {finding.name:<{width}}  {finding.value}")
            if finding.hint is not None:
                click.echo(f"           hint: {finding.hint}")
    return ExitCode.OK if healthy else ExitCode.ENVIRONMENT

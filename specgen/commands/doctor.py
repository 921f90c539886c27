"""`specgen doctor`: what the machine offers."""

from __future__ import annotations

import json

import click

from specgen.errors import ExitCode

__all__ = ["doctor"]

_MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


@click.command()
@click.option("--model", metavar="DIR", help="Target model to look at; default: the built-in pair.")
@click.option("--draft-model", metavar="DIR", help="Draft to look at; must fit the target.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(model: str | None, draft_model: str | None, as_json: bool) -> int:
    """Say what this machine offers, and whether a target and a draft fit together.

    Looks at software, GPU, Triton, and the configuration of the models; loads no weights. Exit
    code 0 if specgen can run here, else 5.
    """
    from specgen.doctor import examine

    findings = list(examine(model, draft_model))
    healthy = all(finding.status != "problem" for finding in findings)
    if as_json:
        report = {"ok": healthy, "findings": [finding.to_dict() for finding in findings]}
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
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

"""`specgen validate`: what a run would refuse, without a GPU and without weights."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from specgen.commands.flags import DATA, TOKENIZER, with_options
from specgen.commands.run_options import read_options, sampling_of
from specgen.config import EngineConfig
from specgen.errors import ExitCode
from specgen.request_io.shard import WHOLE

__all__ = ["validate"]

_MODEL_FLAGS = {
    "model", "tokenizer", "revision", "trust_remote_code", "chat_template", "max_model_len",
}  # fmt: skip


@click.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@with_options(TOKENIZER, DATA)
@click.option(
    "--limit", type=click.IntRange(0, sys.maxsize), metavar="N", help="Read at most N rows."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def validate(inputs: tuple[str, ...], as_json: bool, **flags: Any) -> int:
    """Find bad, overlong and duplicate lines of INPUT, with their numbers.

    Loads a tokenizer, but no weights. An id on two lines is a problem; the same line twice is only
    mentioned, since equal lines are rows of their own. Exit codes: 0 all rows can run, 2 usage,
    4 problems, 5 no usable model or tokenizer.
    """
    from specgen.request_io.source import check_inputs
    from specgen.validation import Validator, load_checks

    options = read_options({**flags, "shard": WHOLE}, sampling_of({}, {}))
    config = EngineConfig(
        **{name: flags[name] for name in _MODEL_FLAGS},
        overlong=flags["overlong"],
        device="cpu",
        no_draft=True,
    )
    check_inputs(inputs)
    validator = Validator(load_checks(config, options.template_flag))
    for finding in validator.examine(inputs, options):
        click.echo(json.dumps(finding.to_dict()) if as_json else str(finding))
    if as_json:
        click.echo(json.dumps({"summary": validator.summary()}))
    else:
        for name, value in validator.summary().items():
            click.echo(f"{name.replace('_', ' ')}: {value:,}", err=True)
    return ExitCode.INPUT if validator.num_problems else ExitCode.OK

"""Flags that several commands share, by subject."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from specgen.commands.draft_flags import DRAFT_OVERRIDES
from specgen.commands.duration import parse_duration
from specgen.config import (
    DEVICES,
    DRAFT_SAMPLES,
    DTYPES,
    GENERATION_CONFIGS,
    OVERLONG,
    REJECTION_SAMPLES,
)
from specgen.load_format import LOAD_FORMATS
from specgen.request_io.shard import WHOLE, Shard
from specgen.synthetic import SyntheticAcceptance, parse_synthetic_acceptance

__all__ = ["DATA", "DRAFT", "JOB", "MODEL", "SAMPLING", "TOKENIZER", "with_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _DraftSample(click.Choice[str]):
    """`greedy` or `gumbel`; `probabilistic` is how vLLM calls the latter."""

    def __init__(self) -> None:
        super().__init__([*DRAFT_SAMPLES, "probabilistic"])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        chosen = super().convert(value, param, ctx)
        return "gumbel" if chosen == "probabilistic" else chosen


def _draft_length(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> int | str | None:
    """A number, or what the configuration makes of it."""
    del ctx, param
    try:
        return None if value is None else int(value)
    except ValueError:
        return value


def _token_ids(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> list[int] | None:
    """Ids given as `--stop-token-ids 1,2` or by repeating the flag."""
    del ctx, param
    try:
        ids = [int(part) for value in values for part in value.split(",")]
    except ValueError:
        raise click.BadParameter("must be token ids, such as 1,2") from None
    return ids or None


def _acceptance(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> SyntheticAcceptance | None:
    del ctx, param
    try:
        return None if value is None else parse_synthetic_acceptance(value)
    except ValueError:
        raise click.BadParameter("must be a length such as 2.5, or rates: 0.9,0.6,0.4") from None


def _shard(ctx: click.Context, param: click.Parameter, value: str | None) -> Shard:
    del ctx, param
    try:
        return WHOLE if value is None else Shard.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _duration(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    del ctx, param
    try:
        return None if value is None else parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _option(*names: str, **settings: Any) -> Callable[[_Command], _Command]:
    return click.option(*names, **settings)


TOKENIZER = [
    _option("--model", metavar="DIR|ID", help="Target model; without it the built-in pair."),
    _option("--tokenizer", metavar="DIR|ID", help="Tokenizer, if not the model's own."),
    _option("--revision", metavar="REV", help="Revision of a model from the hub."),
    _option("--max-model-len", type=int, metavar="N", help="Longest prompt plus completion."),
    _option("--trust-remote-code", is_flag=True, help="Run code that comes with a checkpoint."),
    _option("--chat-template", metavar="FILE|TEXT", help="Chat template, if not the model's own."),
]
MODEL = [
    _option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True),
    _option("--max-num-seqs", type=int, metavar="N", help="Completions that run at a time."),
    _option("--max-num-batched-tokens", type=int, metavar="N", help="Prompt tokens of a step."),
    _option("--gpu-memory-utilization", type=float, default=0.9, show_default=True),
    _option(
        "--prefix-caching/--no-prefix-caching",
        default=True,
        show_default=True,
        help="Prefill a beginning that prompts share only once.",
    ),
    _option("--device", type=click.Choice(DEVICES), default="auto", show_default=True),
    _option(
        "--load-format",
        type=click.Choice(LOAD_FORMATS),
        default="auto",
        show_default=True,
        help="dummy: random weights in the shape of config.json; dummy-uniform: as vLLM has them.",
    ),
    _option(
        "--skip-tokenizer-init",
        is_flag=True,
        help="Load no tokenizer: prompts are token ids, text stays empty.",
    ),
    _option(
        "--generation-config",
        type=click.Choice(GENERATION_CONFIGS),
        default="auto",
        show_default=True,
        help="auto: sampling defaults of the model's generation_config.json.",
    ),
]
SYNTHETIC_ACCEPTANCE = _option(
    "--synthetic-acceptance",
    callback=_acceptance,
    metavar="L|R1,R2,...",
    help="For the rule synthetic: mean length, or the rate of each draft.",
)
NUM_SPECULATIVE_TOKENS = _option(
    "--num-speculative-tokens",
    callback=_draft_length,
    metavar="N|auto[:N]",
    help="Drafts a step; auto: as many as pay, up to N (5).  [default: auto on a GPU, else 1]",
)
DRAFT = [
    _option(
        "--draft-model", metavar="DIR|ID", help="EAGLE draft; built in for the built-in model."
    ),
    NUM_SPECULATIVE_TOKENS,
    _option(
        "--draft-sample",
        type=_DraftSample(),
        default="greedy",
        show_default=True,
        help="How drafts are made; probabilistic is gumbel.",
    ),
    _option(
        "--rejection-sample",
        type=click.Choice(REJECTION_SAMPLES),
        default="standard",
        show_default=True,
        help="How drafts are judged; synthetic is not faithful to the target.",
    ),
    SYNTHETIC_ACCEPTANCE,
    _option("--no-draft", is_flag=True, help="Generate without speculation."),
    *DRAFT_OVERRIDES,
]
SAMPLING = [
    _option("--seed", type=int, default=0, show_default=True, help="Seed of the run."),
    _option("--temperature", type=float, metavar="T"),
    _option("--top-p", type=float, metavar="P"),
    _option("--top-k", type=int, metavar="K"),
    _option("--max-tokens", type=int, metavar="N", help="Default: the rest of the context."),
    _option("--n", type=int, metavar="N", help="Completions of each prompt."),
    _option("--stop", multiple=True, metavar="TEXT", help="End at this text; repeatable."),
    _option(
        "--stop-token-ids",
        multiple=True,
        callback=_token_ids,
        metavar="ID,...",
        help="End at these tokens; repeatable.",
    ),
    _option("--ignore-eos", is_flag=True, help="Go on past end-of-sequence tokens."),
    _option("--return-token-ids", is_flag=True, help="Put token_ids into the output."),
]
DATA = [
    _option("--prompt-field", default="prompt", show_default=True, metavar="KEY"),
    _option("--id-field", metavar="KEY", help="Key whose value becomes custom_id."),
    _option("--system-prompt", metavar="TEXT", help="System message for chats without one."),
    _option(
        "--apply-chat-template",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        show_default=True,
        help="always: prompt strings become user messages; auto: only with --system-prompt.",
    ),
    _option(
        "--overlong",
        type=click.Choice(OVERLONG),
        default="error",
        show_default=True,
        help="What to do with a prompt that does not fit the model.",
    ),
]
JOB = [
    _option("-o", "--output", metavar="OUT", help="Output file; without it standard output."),
    _option("--resume", is_flag=True, help="Be content if OUT is complete already."),
    _option(
        "--overwrite",
        is_flag=True,
        help="Start again; replaces OUT once complete, discards a partial OUT.",
    ),
    _option(
        "--retry-errors",
        is_flag=True,
        help="Run failed rows of an earlier run again, and what a finished OUT lacks.",
    ),
    _option(
        "--max-errors",
        type=click.IntRange(min=0),
        metavar="N",
        help="Stop when more than N rows of OUT have failed, those of earlier runs included.",
    ),
    _option(
        "--shard",
        callback=_shard,
        metavar="I/N",
        help="Every N-th row, from the I-th on; join with specgen merge.",
    ),
    _option(
        "--limit", type=click.IntRange(0, sys.maxsize), metavar="N", help="Read at most N rows."
    ),
    _option(
        "--time-limit",
        callback=_duration,
        metavar="DURATION",
        help="Stop after so long, as a signal would: 90s, 2h30m, HH:MM:SS.",
    ),
    _option(
        "--format",
        "output_format",
        type=click.Choice(["flat", "openai"]),
        default="flat",
        show_default=True,
        help="openai: lines as the OpenAI batch API writes them.",
    ),
    _option(
        "--order",
        type=click.Choice(["input", "completion"]),
        help="Order of rows in OUT.  [default: input]",
    ),
    _option(
        "--progress",
        type=click.Choice(["auto", "rich", "plain", "json", "none"]),
        default="auto",
        show_default=True,
    ),
    _option("--summary", metavar="FILE", help="Write the closing figures to FILE as JSON."),
    _option("--quiet", is_flag=True, help="Show errors only."),
]


def with_options(*groups: list[Callable[[Any], Any]]) -> Callable[[_Command], _Command]:
    """A decorator that puts groups of flags on a command, in order."""

    def decorate(command: _Command) -> _Command:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate

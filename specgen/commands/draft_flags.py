"""Flags that say what a draft's configuration gets wrong or leaves open."""

from __future__ import annotations

import click

__all__ = ["DRAFT_OVERRIDES"]


def _layers(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    del ctx, param
    try:
        return None if value is None else tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter("must be boundaries of the target, such as 2,16,29") from None


def _truth(ctx: click.Context, param: click.Parameter, value: str | None) -> bool | None:
    """`true` or `false`; an absent flag is neither."""
    del ctx, param
    if value not in ("true", "false", None):
        raise click.BadParameter(f"must be true or false, got {value!r}")
    return None if value is None else value == "true"


DRAFT_OVERRIDES = [
    click.option("--draft-revision", metavar="REV", help="Revision of a draft from the hub."),
    click.option(
        "--draft-aux-layers",
        callback=_layers,
        metavar="I,J,...",
        help="Target layers whose inputs the draft reads, if not as its config says.",
    ),
    click.option(
        "--draft-rope-theta",
        type=float,
        metavar="X",
        help="Base of the draft's rope, if not as its config says.",
    ),
    click.option(
        "--draft-norm-output",
        callback=_truth,
        metavar="true|false",
        help="Whether the draft feeds its normed state back.",
    ),
    click.option(
        "--draft-norm-before-residual",
        callback=_truth,
        metavar="true|false",
        help="Whether the draft's residual is its normed state.",
    ),
]

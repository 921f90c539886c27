"""What a prompt's tokens must satisfy before they may run; needs no model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from specgen.config import ResolvedConfig
from specgen.errors import RequestError
from specgen.pipeline.request import PromptRow

if TYPE_CHECKING:
    from specgen.pipeline.tokenization import NoTokenizer, Tokenizer

__all__ = ["FittedPrompt", "check_stop_ids", "check_token_ids", "fit_prompt", "fitted_prompt"]


class FittedPrompt(NamedTuple):
    """What a row's prompt runs as."""

    token_ids: tuple[int, ...]
    truncated: bool
    """Whether its beginning was cut off."""


def fitted_prompt(
    row: PromptRow, tokenizer: Tokenizer | NoTokenizer, config: ResolvedConfig
) -> FittedPrompt:
    """The tokens that a row's prompt runs with.

    Raises:
        RequestError: the model cannot run them.
    """
    cut = config.overlong == "truncate-left"
    # A text that was cut before it was tokenised still has more tokens than fit.
    given = tokenizer.encode(row, limit=config.max_model_len - 1, cut=cut)
    token_ids = fit_prompt(
        row,
        given,
        max_model_len=config.max_model_len,
        overlong=config.overlong,
        bos_token_id=tokenizer.bos_token_id,
    )
    check_token_ids(row, token_ids, vocab_size=config.vocab_size)
    check_stop_ids(row, vocab_size=config.vocab_size)
    return FittedPrompt(token_ids, len(token_ids) < len(given))


def fit_prompt(
    row: PromptRow,
    token_ids: tuple[int, ...],
    *,
    max_model_len: int,
    overlong: str,
    bos_token_id: int | None = None,
) -> tuple[int, ...]:
    """A prompt with room for at least one token after it, cut at the left if that was asked.

    A prompt that begins with BOS still does so if two tokens of it are kept: models that were
    trained with one attend to it.

    Raises:
        RequestError: it is too long, and `overlong` is ``"error"``.
    """
    limit = max_model_len - 1
    if len(token_ids) <= limit:
        return token_ids
    if overlong == "truncate-left":
        # Leave the room that the row asks for, and one prompt token in any case.
        num_kept = max(1, max_model_len - (row.sampling.max_tokens or 1))
        if num_kept > 1 and token_ids[0] == bos_token_id:
            return token_ids[:1] + token_ids[1 - num_kept :]
        return token_ids[-num_kept:]
    raise RequestError(
        "prompt_too_long",
        f'"{row.prompt_name}" has {len(token_ids)} tokens, '
        f"the model takes {limit} and one to generate",
        row.line,
    )


def check_token_ids(row: PromptRow, token_ids: tuple[int, ...], *, vocab_size: int) -> None:
    """Refuse ids that the model has no embedding for.

    Raises:
        RequestError: naming one of them.
    """
    highest, lowest = max(token_ids), min(token_ids)
    if highest >= vocab_size or lowest < 0:
        bad = highest if highest >= vocab_size else lowest
        raise RequestError(
            "token_id_out_of_range",
            f'"{row.prompt_name}" holds token id {bad}, the model has ids 0 to {vocab_size - 1}',
            row.line,
        )


def check_stop_ids(row: PromptRow, *, vocab_size: int) -> None:
    """Refuse ids that can never end the row.

    Raises:
        RequestError: naming one of them.
    """
    bad = max(row.sampling.stop_token_ids, default=0)
    if bad >= vocab_size:
        raise RequestError(
            "token_id_out_of_range",
            f'"stop_token_ids" holds token id {bad}, the model has ids 0 to {vocab_size - 1}',
            row.line,
        )

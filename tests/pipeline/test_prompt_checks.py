"""Prompts that are longer than the model takes."""

from __future__ import annotations

from pathlib import Path

import pytest

import specgen
from specgen.errors import RequestError
from specgen.pipeline.prompt_checks import fit_prompt
from specgen.pipeline.request import PromptRow
from specgen.pipeline.tokenization import Tokenizer
from specgen.sampling_params import SamplingParams

BOS = 1
LONG = (BOS, *range(10, 40))


def fit(
    token_ids: tuple[int, ...], max_tokens: int | None, *, overlong: str = "truncate-left"
) -> tuple[int, ...]:
    row = PromptRow(0, "0" * 16, 3, "in.jsonl", SamplingParams(max_tokens=max_tokens), prompt="x")
    return fit_prompt(row, token_ids, max_model_len=20, overlong=overlong, bos_token_id=BOS)


@pytest.mark.parametrize(
    ("max_tokens", "kept"),
    [(None, 19), (1, 19), (5, 15), (18, 2), (19, 1), (20, 1), (1_000, 1)],
)
def test_what_max_tokens_leaves_is_kept_and_one_token_at_least(
    max_tokens: int | None, kept: int
) -> None:
    found = fit(LONG[1:], max_tokens)
    assert found == LONG[-kept:]


@pytest.mark.parametrize(("max_tokens", "kept"), [(None, 19), (5, 15), (18, 2)])
def test_a_prompt_that_begins_with_bos_still_does(max_tokens: int | None, kept: int) -> None:
    assert fit(LONG, max_tokens) == (BOS, *LONG[1 - kept :])


def test_of_one_token_the_last_is_kept() -> None:
    assert fit(LONG, 100) == LONG[-1:]


def test_a_prompt_that_fits_is_never_cut() -> None:
    assert fit(LONG[:19], 1_000) == LONG[:19]


def test_without_the_flag_it_is_refused() -> None:
    with pytest.raises(RequestError, match="has 31 tokens, the model takes 19"):
        fit(LONG, 5, overlong="error")


@pytest.mark.parametrize("as_messages", [False, True])
def test_a_text_that_is_cut_before_it_is_tokenised_keeps_bos(as_messages: bool) -> None:
    """A template writes BOS into the text."""
    tokenizer = Tokenizer(str(Path(specgen.__file__).parent / "models" / "default" / "target"))
    text = "one two three " * 20_000
    row = PromptRow(
        0,
        "0" * 16,
        3,
        "in.jsonl",
        SamplingParams(max_tokens=4),
        prompt=None if as_messages else text,
        messages=[{"role": "user", "content": text}] if as_messages else None,
    )
    whole = tokenizer.encode(row)
    assert whole[0] == tokenizer.bos_token_id
    given = tokenizer.encode(row, limit=63, cut=True)
    assert len(given) < len(whole), "not cut before"
    found = fit_prompt(
        row,
        given,
        max_model_len=64,
        overlong="truncate-left",
        bos_token_id=tokenizer.bos_token_id,
    )
    assert found == (tokenizer.bos_token_id, *whole[-59:])

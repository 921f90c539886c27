"""Texts of any length: refused or cut before they are tokenised."""

from __future__ import annotations

from typing import Any

import pytest
from models.tiny import make_target

from specgen.errors import RequestError
from specgen.pipeline.request import PromptRow
from specgen.pipeline.text_bound import TextBound, text_bound
from specgen.pipeline.tokenization import Tokenizer
from specgen.resolve import BUILTIN_TARGET
from specgen.sampling_params import SamplingParams

LONG = "a" * 4_000_000


@pytest.fixture(scope="module", params=["builtin", "tiny"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = BUILTIN_TARGET
    if request.param == "tiny":
        path = tmp_path_factory.mktemp("model")
        directory = make_target(path, with_tokenizer=True, vocab_size=90)
    return Tokenizer(str(directory))


@pytest.fixture
def lengths(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the texts that are tokenised."""
    seen: list[int] = []
    encode = tokenizer._encode_text

    def spy(text: str, **options: Any) -> tuple[int, ...]:
        seen.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "_encode_text", spy)
    return seen


def row(**prompt: Any) -> PromptRow:
    return PromptRow(0, "0" * 16, 7, "in", SamplingParams(), **prompt)


@pytest.mark.parametrize(
    "prompt", [{"prompt": LONG}, {"messages": [{"role": "user", "content": LONG}]}]
)
def test_a_text_that_cannot_fit_is_not_tokenised(
    tokenizer: Tokenizer, lengths: list[int], prompt: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match=r"has at least [0-9]+ tokens") as caught:
        tokenizer.encode(row(**prompt), limit=1023)
    assert (caught.value.code, caught.value.line) == ("prompt_too_long", 7)
    assert not lengths


def test_a_cut_text_ends_in_the_same_tokens(tokenizer: Tokenizer, lengths: list[int]) -> None:
    words = " ".join(f"some words and number {i}" for i in range(10_000))
    cut = tokenizer.encode(row(prompt=words), limit=100, cut=True)
    assert lengths.pop() < len(words) / 10
    assert cut[-100:] == tokenizer.encode(row(prompt=words))[-100:]


@pytest.mark.parametrize("text", [" " * 5000, "the implementations of " * 500, "é\U0001f600" * 999])
def test_the_bound_is_one(tokenizer: Tokenizer, text: str) -> None:
    bound = text_bound(tokenizer._tokenizer)
    assert bound is not None
    assert bound.least_tokens(text) <= len(tokenizer.encode(row(prompt=text)))


def test_no_bound_where_a_token_may_be_of_any_length() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def bound_of(backend: Backend) -> TextBound | None:
        return text_bound(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?"))

    vocab = {"?": 0, "a": 1}
    assert bound_of(Backend(models.WordLevel(vocab, unk_token="?"))) is None
    assert bound_of(Backend(models.BPE(vocab, [], unk_token="?", fuse_unk=True))) is None
    backend = Backend(models.BPE(vocab, [], unk_token="?"))
    assert bound_of(backend) == TextBound(1)
    backend.normalizer = normalizers.NFC()
    assert bound_of(backend) == TextBound(4)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert bound_of(backend) is None
    backend.pre_tokenizer, backend.normalizer = None, normalizers.Strip()
    assert bound_of(backend) is None


def test_a_token_that_swallows_space_lifts_the_bound() -> None:
    bound = TextBound(4, ("<mask>",))
    assert bound.least_tokens("a" * 100) == 25
    assert bound.least_tokens("a" * 100 + "<mask>") == 0
    assert bound.end_of("a" * 100 + "<mask>", 1) == "a" * 100 + "<mask>"

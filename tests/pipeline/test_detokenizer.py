from __future__ import annotations

from collections.abc import Sequence

import pytest

from specgen.pipeline.detokenizer import StopStringWatcher, detokenize


class ByteTokenizer:
    """One token a byte, as a byte-level tokenizer at its worst."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


class SentencePieceLike:
    """Words with their leading space, which a decode drops at its start."""

    words = ("▁Hello", "▁world", "▁again", "!")

    def decode(self, token_ids: Sequence[int]) -> str:
        text = "".join(self.words[i] for i in token_ids).replace("▁", " ")
        return text.removeprefix(" ")


def ids(text: str) -> list[int]:
    return list(text.encode())


def test_a_leading_space_survives_where_decode_drops_it() -> None:
    assert detokenize(SentencePieceLike(), [0], [1, 3]) == " world!"


def test_a_prompt_that_ends_inside_a_character_does_not_spoil_the_text() -> None:
    prompt = ids("é")[:1]
    assert detokenize(ByteTokenizer(), prompt, ids("ok")) == "ok"


@pytest.mark.parametrize(
    ("text", "stop", "expected_text", "expected_tokens"),
    [
        ("one two three", ["two"], "one ", 7),
        ("aab", ["ab"], "a", 3),
        ("x\n\ny", ["\n\n"], "x", 3),
        ("naïve café end", ["café"], "naïve ", len("naïve café".encode())),
        ("abcd", ["cd", "bcd"], "a", 4),
    ],
)
def test_stop_strings_end_at_the_token_that_completes_them(
    text: str, stop: list[str], expected_text: str, expected_tokens: int
) -> None:
    watcher = StopStringWatcher(ByteTokenizer(), ids("prompt "), stop)
    for token in ids(text):
        match = watcher.push(token)
        if match is not None:
            assert match.text == expected_text
            assert match.num_tokens == expected_tokens
            return
    pytest.fail("the stop string was not found")


def test_a_stop_string_that_only_the_prompt_holds_does_not_count() -> None:
    watcher = StopStringWatcher(ByteTokenizer(), ids("END"), ["END", "D!"])
    assert all(watcher.push(token) is None for token in ids("! go on"))


def test_half_a_character_is_held_back() -> None:
    watcher = StopStringWatcher(ByteTokenizer(), [], ["é"])
    first, second = ids("é")
    assert watcher.push(first) is None
    match = watcher.push(second)
    assert match is not None
    assert match.num_tokens == 2

"""Tokens to text: whole completions at their end, and token by token where stop strings watch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# Tokens of the prompt's end that are decoded along, so that a tokenizer which drops the space in
# front of the first word (SentencePiece) drops it there and not in the completion.
_CONTEXT_TOKENS = 6
_REPLACEMENT = "\ufffd"


class Decodes(Protocol):
    """The part of a tokenizer that detokenizing needs."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids`` without special tokens."""


def detokenize(
    tokenizer: Decodes, prompt_token_ids: Sequence[int], token_ids: Sequence[int]
) -> str:
    """Text that ``token_ids`` add after the prompt."""
    context = list(prompt_token_ids[-_CONTEXT_TOKENS:])
    before = tokenizer.decode(context)
    whole = tokenizer.decode([*context, *token_ids])
    # The prompt may end inside a character; then the completion stands on its own.
    if whole.startswith(before) and not before.endswith(_REPLACEMENT):
        return whole[len(before) :]
    return tokenizer.decode(token_ids)


@dataclass(frozen=True)
class StopMatch:
    """A stop string that the completion contains.

    Attributes:
        num_tokens: Tokens up to and including the one that completes it.
        text: The completion's text before it.
    """

    stop: str
    num_tokens: int
    text: str


class StopStringWatcher:
    """Follows a growing completion and finds the first token that completes a stop string.

    Text is decoded in a sliding window, so the work for a token does not grow with the completion.
    Bytes of an unfinished character are held back until the character is whole.
    """

    def __init__(
        self, tokenizer: Decodes, prompt_token_ids: Sequence[int], stop: Sequence[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop))
        self._tokens = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._window = 0  # tokens before it are no longer decoded
        self._read = len(self._tokens)  # tokens whose text is in _text
        self._text = ""
        self._num_tokens = 0

    def push(self, token_id: int) -> StopMatch | None:
        """Add one output token; report the stop string it completes (the earliest in the text)."""
        self._tokens.append(token_id)
        self._num_tokens += 1
        before = self._tokenizer.decode(self._tokens[self._window : self._read])
        whole = self._tokenizer.decode(self._tokens[self._window :])
        if whole.endswith(_REPLACEMENT) or len(whole) <= len(before):
            return None
        searched = max(0, len(self._text) - self._longest + 1)
        self._text += whole[len(before) :]
        self._window, self._read = self._read, len(self._tokens)
        found = [(at, stop) for stop in self._stop if (at := self._text.find(stop, searched)) >= 0]
        if not found:
            return None
        at, stop = min(found, key=lambda match: match[0])
        return StopMatch(stop, self._num_tokens, self._text[:at])

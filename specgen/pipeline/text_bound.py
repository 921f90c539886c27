"""How many tokens a text must have at least, said from its length alone.

Tokenising a line of many megabytes takes minutes and gigabytes, only to learn that it is too long.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["TextBound", "text_bound"]

# A composed character stands for at most so many: a letter and three marks.
_COMPOSED = 4
_KEEP_ALL = frozenset({"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split"})


@dataclass(frozen=True)
class TextBound:
    """Attributes:
    chars_per_token: no token stands for more characters of a text.
    swallowing: tokens that take any amount of blank space with them, to which no bound applies.
    """

    chars_per_token: int
    swallowing: tuple[str, ...] = ()

    def least_tokens(self, text: str) -> int:
        """Tokens that `text` has at least, special ones aside."""
        if any(token in text for token in self.swallowing):
            return 0
        return -(-len(text) // self.chars_per_token)

    def end_of(self, text: str, num_tokens: int) -> str:
        """An end of `text` that holds its last `num_tokens` tokens, and as much room before them.

        Tokens at the cut may differ from those of the whole text.
        """
        if self.least_tokens(text) <= 2 * num_tokens:
            return text
        return text[-2 * num_tokens * self.chars_per_token :]


def text_bound(tokenizer: Any) -> TextBound | None:
    """The bound of a transformers tokenizer; None where a token may stand for any length.

    That is so where text is dropped, or unknown text becomes one token.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = json.loads(backend.to_str())
    model, added = parts["model"], parts["added_tokens"]
    splitters = list(_flat(parts["pre_tokenizer"], "pretokenizers"))
    normalizers = list(_flat(parts["normalizer"], "normalizers"))
    if model["type"] != "BPE" or not all(map(_keeps, splitters)):
        return None
    if not all(map(_never_shortens, normalizers)):
        return None
    vocab = backend.get_vocab(with_added_tokens=True)
    byte_level = any(part["type"] == "ByteLevel" for part in splitters)
    complete = model["byte_fallback"] or (byte_level and sum(len(t) == 1 for t in vocab) >= 256)
    if not complete and (model["unk_token"] is None or model["fuse_unk"]):
        return None
    longest = max(map(len, vocab), default=1)
    if any(part["type"] == "NFC" for part in normalizers):
        longest *= _COMPOSED
    swallowing = tuple(t["content"] for t in added if t["lstrip"] or t["rstrip"])
    return TextBound(longest, swallowing)


def _flat(part: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    if part is not None and part["type"] == "Sequence":
        for inner in part[key]:
            yield from _flat(inner, key)
    elif part is not None:
        yield part


def _keeps(splitter: dict[str, Any]) -> bool:
    return splitter["type"] in _KEEP_ALL and splitter.get("behavior") != "Removed"


def _never_shortens(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        old = normalizer["pattern"].get("String")
        return old is not None and len(normalizer["content"]) >= len(old)
    return normalizer["type"] in ("NFC", "NFD", "Prepend")

"""A share of the input: every N-th row, so that no run needs to know how many rows there are."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["WHOLE", "Shard"]

_FORM = re.compile(r"(\d{1,6})/(\d{1,6})")


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows whose index is `number - 1` modulo `count`.

    Rows keep the index, and so the seed, that they have in the whole input: merged shards are the
    file that one run would have written.

    Attributes:
        number: which share, from 1.
        count: how many there are.

    Raises:
        ValueError: `number` is not within 1..count.
    """

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        """Check the range."""
        if not 1 <= self.number <= self.count:
            raise ValueError(f"must be I/N with I from 1 to N, got {self.number}/{self.count}")

    @classmethod
    def parse(cls, text: str) -> Shard:
        """The shard called `I/N`."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(f"must be I/N, such as 1/4, got {text}")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        """`I/N`, as the flag takes it."""
        return f"{self.number}/{self.count}"

    def owns(self, index: int) -> bool:
        """Whether the row belongs here."""
        return index % self.count == self.number - 1

    def position(self, index: int) -> int:
        """Place of an own row among the own rows, from 0."""
        return index // self.count

    def index(self, position: int) -> int:
        """The row at a place among the own rows."""
        return position * self.count + self.number - 1

    def num_rows(self, num_input_rows: int) -> int:
        """Own rows of an input of so many."""
        return max(0, -(-(num_input_rows - self.number + 1) // self.count))


WHOLE = Shard()

"""One fact that `specgen doctor` found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

__all__ = ["Finding"]

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact.

    Attributes:
        section: what it is about: software, machine, kernels, target, draft, memory.
        name: what was looked at.
        value: what was found, for people.
        status: `problem` if it keeps specgen from running, `note` if it limits it.
        hint: what to do about it.
    """

    section: str
    name: str
    value: str
    status: Status = "ok"
    hint: str | None = None

    def to_dict(self) -> dict[str, str | None]:
        """All fields."""
        return asdict(self)

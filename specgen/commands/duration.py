"""Durations as people and batch systems write them."""

from __future__ import annotations

import re

__all__ = ["parse_duration"]

_UNITS = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}
_PARTS = re.compile(
    r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?"
)
_CLOCK = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
_LONGEST = 366 * 86_400.0


def parse_duration(text: str) -> float:
    """Seconds of `90`, `90s`, `15m`, `2h30m`, `1d`, `1.5h`, `MM:SS`, `HH:MM:SS` or `D-HH:MM:SS`.

    Raises:
        ValueError: it is no duration, not above 0, or longer than a year.
    """
    found = _CLOCK.fullmatch(text) or (_PARTS.fullmatch(text) if text else None)
    if found is None:
        raise ValueError(f"{text!r} is no duration; write 90s, 15m, 2h30m or HH:MM:SS")
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    total = days * _UNITS["d"] + hours * _UNITS["h"] + minutes * _UNITS["m"] + seconds
    if not 0 < total <= _LONGEST:
        raise ValueError(f"{text!r} is not above 0 and at most a year")
    return total

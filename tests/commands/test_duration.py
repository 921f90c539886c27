from __future__ import annotations

import pytest

from specgen.commands.duration import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90), ("90s", 90), ("15m", 900), ("2h30m", 9000), ("1d", 86_400), ("1.5h", 5400),
        ("0.5", 0.5), ("2m5", 125), ("10:00", 600), ("1:00:00", 3600), ("1-00:00:10", 86_410),
    ],
)  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "0", "0s", "-1", "1x", "h", "nan", "1e9d", "999d", "1 h", ":"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r"no duration|not above"):
        parse_duration(text)

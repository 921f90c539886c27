from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console
from test_display import stats_of_a_run

from specgen.display import format_value
from specgen.live_view import live_view, settings_view
from specgen.stats import RunStats


def draw(view: object, width: int, *, terminal: bool = True, encoding: str = "utf-8") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(
        file=stream, width=width, force_terminal=terminal, no_color=True, highlight=False
    )
    console.print(view(console))  # type: ignore[operator]
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [20, 40, 71, 72, 100, 200])
def test_two_lines_at_any_width(width: int) -> None:
    text = draw(lambda c: live_view(stats_of_a_run(), 8, c), width, terminal=False)
    lines = text.splitlines()
    assert len(lines) == 2
    assert all(cell_len(line) <= width for line in lines)
    assert "4/8" in lines[0]
    if width >= 72:
        assert "1 failed" in lines[0]
        assert "0:10 left" in lines[0]
        assert "acceptance length 2.67  by position 81 57 29 %" in lines[1]


def test_without_a_total_or_drafts() -> None:
    stats = RunStats()
    text = draw(lambda c: live_view(stats, None, c), 80, terminal=False)
    assert text.splitlines()[0].startswith("0/? rows")
    assert "acceptance" not in text
    assert draw(lambda c: live_view(stats, 0, c), 80, terminal=False).startswith("0/0 rows")


def test_blocks_only_where_they_can_be_shown() -> None:
    view = lambda c: live_view(stats_of_a_run(), 8, c)  # noqa: E731
    assert "█" in draw(view, 100)
    plain = draw(view, 100, encoding="ascii")
    assert plain.isascii()
    assert "####" in plain


@pytest.mark.parametrize("width", [30, 80, 120, 240])
def test_settings_fill_the_width(width: int) -> None:
    settings = {f"name_{i}": i for i in range(20)} | {"path": "/a/long/path" * 12, "none": None}
    text = draw(lambda c: settings_view(settings, c, format_value), width, terminal=False)
    assert all(cell_len(line) <= width for line in text.splitlines())
    words = text.split()
    for name, value in settings.items():
        assert name in words
        if len(str(value)) < 20:
            assert format_value(value) in words
    assert "".join(words).count("/a/long/path") == 12 or width < 60
    assert (len(text.splitlines()) < 15) == (width >= 80)
    assert draw(lambda c: settings_view({}, c, format_value), width).strip() == ""


@pytest.mark.parametrize("width", [40, 20])
def test_settings_are_folded_and_never_cropped(width: int) -> None:
    import io

    from rich.console import Console

    from specgen.live_view import settings_view

    settings = {"num_speculative_tokens_of_all": "v" * 30, "other": "w" * 60}
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(settings_view(settings, console, str))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    assert (text.count("v"), text.count("w")) == (31, 60)
    assert "…" not in text

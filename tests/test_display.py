from __future__ import annotations

import io
import json
import re
import sys
import time
from typing import Any

import pytest
from rich.cells import cell_len

from specgen import display as display_module
from specgen.display import (
    JsonDisplay,
    PlainDisplay,
    QuietDisplay,
    RichDisplay,
    TextDisplay,
    create_display,
    format_value,
    progress_line,
)
from specgen.stats import RunStats

SETTINGS = {"model": "m", "num_speculative_tokens": 3, "chat_template": None, "no_draft": False}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def stats_of_a_run() -> RunStats:
    stats = RunStats()
    stats.started = time.perf_counter() - 10
    stats.rows_ok, stats.rows_failed = 3, 1
    stats.prompt_tokens, stats.completion_tokens = 12, 500
    speculation = type(stats.speculation)(3)
    for accepted, count in enumerate([4, 5, 6, 6]):
        for _ in range(count):
            speculation.add_spec_step(3, accepted, accepted + 1)
    stats.speculation = speculation
    return stats


@pytest.mark.parametrize(
    ("terminal", "options", "kind"),
    [
        (True, {"kind": "auto"}, RichDisplay),
        (False, {"kind": "auto"}, PlainDisplay),
        (True, {"kind": "auto", "data_on_terminal": True}, PlainDisplay),
        (True, {"kind": "plain"}, PlainDisplay),
        (False, {"kind": "rich"}, RichDisplay),
        (False, {"kind": "json"}, JsonDisplay),
        (True, {"kind": "none"}, TextDisplay),
        (True, {"kind": "rich", "quiet": True}, QuietDisplay),
    ],
)
def test_choice(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, options: dict[str, Any], kind: type
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    monkeypatch.setenv("TERM", "xterm")
    assert type(create_display(**options)) is kind


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert type(create_display("auto")) is PlainDisplay


def test_progress_line() -> None:
    line = progress_line(stats_of_a_run(), 8)
    assert line.startswith("4/8 rows, 1 failed, ")
    assert "acceptance length 2.67" in line
    assert "0:10 elapsed, 0:10 left" in line
    speed = re.search(r"([\d.]+) tok/s", line)
    assert speed is not None
    assert 45 < float(speed[1]) <= 50
    unknown = progress_line(stats_of_a_run(), None)
    assert unknown.startswith("4/? rows")
    assert "left" not in unknown
    assert progress_line(RunStats(), 5).startswith("0/5 rows, 0.0 tok/s")


def test_plain_display_writes_a_line_when_something_changed() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream, interval=0.01)
    display.start(SETTINGS, 8)
    time.sleep(0.05)
    assert "rows" not in stream.getvalue()
    display.advance(stats_of_a_run())
    deadline = time.monotonic() + 5
    while "rows" not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    display.close()
    display.close()
    text = stream.getvalue()
    assert text.count("4/8 rows") == 1
    assert "num_speculative_tokens  3\n" in text
    assert "chat_template           -\n" in text
    assert "no_draft                no\n" in text
    assert "\x1b" not in text
    assert "\r" not in text


@pytest.mark.parametrize("fancy", [False, True])
def test_summary(fancy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal() if fancy else io.StringIO()
    display = RichDisplay(stream) if fancy else TextDisplay(stream)
    display.start({}, 8)
    display.advance(stats_of_a_run())
    display.summary(stats_of_a_run(), 10.0)
    text = stream.getvalue()
    rows = [[c.strip() for c in re.split("[|│]", line)[1:-1]] for line in text.splitlines()]
    assert ["rows ok", "3"] in rows
    assert ["rows failed", "1"] in rows
    assert ["completion tokens", "500"] in rows
    assert ["completion tokens/s", "50.0"] in rows
    assert ["acceptance rate", "55.6 %"] in rows
    assert ["mean acceptance length", "2.67"] in rows
    per_position = [row for row in rows if len(row) == 5]
    assert [row[:4] for row in per_position[1:]] == [
        ["1", "17", "21", "81.0 %"],
        ["2", "12", "21", "57.1 %"],
        ["3", "6", "21", "28.6 %"],
    ]
    steps = [row[:3] for row in rows if len(row) == 4]
    assert steps[1:] == [
        ["0", "4", "19.0 %"], ["1", "5", "23.8 %"], ["2", "6", "28.6 %"], ["3", "6", "28.6 %"],
    ]  # fmt: skip
    assert not re.search(r"\x1b\[[39]\d", text)  # no colour
    assert ("█" in text) == fancy


def drawn(kind: Any, monkeypatch: pytest.MonkeyPatch, width: int, *given: Any) -> list[str]:
    """Lines of a summary on a terminal of that width."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    kind(stream).summary(*given)
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", stream.getvalue()).splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("kind", [RichDisplay, TextDisplay])
@pytest.mark.parametrize("num_earlier", [0, 1_234_567])
def test_the_summary_fits_the_terminal(
    kind: Any, width: int, num_earlier: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = stats_of_a_run()
    stats.speculation.faithful = False
    whole, stats.rows_kept = stats_of_a_run(), num_earlier
    whole.completion_tokens = 123_456_789
    lines = drawn(kind, monkeypatch, width, stats, 98_765.4, whole if num_earlier else None)
    assert max(map(cell_len, lines)) <= width
    cells = [
        {text.strip() for text in re.split(r"[|│]|\s\s+", line) if text.strip()} for line in lines
    ]
    whole_cells = {text for row in cells for text in row}
    # Each label and figure stands in one line, whole.
    expected = {"rows ok", "completion tokens/s", "mean acceptance length", "98,765.4 s", "81.0 %"}
    expected |= {"faithful to the target", "no, synthetic", "position", "share"}
    if num_earlier:
        expected |= {"rows of earlier runs", "123,456,789", "1,234,567"}
        title = "Whole output" if width == 40 else "Summary, with 1,234,567 rows of earlier runs"
        assert title in lines or any(title == line.strip() for line in lines)
        assert "Acceptance by position, whole output" in [line.strip() for line in lines]
    assert expected <= whole_cells
    labels = [row for row in cells if "rows ok" in row]
    assert len(labels) == (2 if num_earlier and width == 40 else 1)
    assert any({"500", "123,456,789"} <= row for row in cells) == bool(num_earlier and width > 40)


@pytest.mark.parametrize("kind", ["rich", "plain", "none"])
def test_what_a_row_holds_does_nothing_to_terminal_or_log(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    display = create_display(kind)
    display.warn('in.jsonl:1: "a\x1b]0;title\x07\x1b[2J\nerror: all is lost\u202e" is no key')
    assert stream.getvalue() == (
        'warning: in.jsonl:1: "a\\x1b]0;title\\x07\\x1b[2J\\nerror: all is lost\\u202e" is no key\n'
    )


@pytest.mark.parametrize("kind", [TextDisplay, PlainDisplay, RichDisplay, JsonDisplay])
@pytest.mark.parametrize("text", ["in.jsonl:100: x", ":smile: :1234:", "[bold]b[/bold]", "[/] [x"])
def test_text_is_shown_as_it_is(kind: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither emoji codes (line 100 of a file is one) nor markup mean anything here."""
    monkeypatch.setenv("COLUMNS", "200")
    stream = io.StringIO()
    display = kind(stream)
    display.start({"setting": text}, 1)
    display.warn(text, text)
    display.note(text)
    display.close()
    assert stream.getvalue().count(text) == 4, stream.getvalue()


def test_summary_without_speculation_and_without_rows() -> None:
    stream = io.StringIO()
    TextDisplay(stream).summary(RunStats(), 0.0)
    assert "speculation" in stream.getvalue()
    assert "Acceptance" not in stream.getvalue()


def test_many_warnings_are_cut_short() -> None:
    stream = io.StringIO()
    display = TextDisplay(stream)
    for i in range(100):
        display.warn(f"in.jsonl:{i}: [bold]bad[/bold]", "do better")
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["warning: in.jsonl:0: [bold]bad[/bold]", "hint: do better"]
    assert sum("bad" in line for line in lines) == 10
    assert "in the output only" in lines[-1]


def test_json_display() -> None:
    stream = io.StringIO()
    display = JsonDisplay(stream, interval=0.01)
    display.start(SETTINGS, None)
    display.warn("w", "h")
    display.note("n")
    display.advance(stats_of_a_run())
    deadline = time.monotonic() + 5
    while '"progress"' not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    display.summary(stats_of_a_run(), 10.0)
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [e["event"] for e in events] == ["start", "warning", "note", "progress", "summary"]
    assert events[0]["settings"] == SETTINGS
    assert (events[1]["message"], events[1]["hint"]) == ("w", "h")
    assert events[3]["rows_done"] == 4
    assert events[3]["eta_s"] is None
    assert events[4]["rows"]["ok"] == 3


@pytest.mark.parametrize("kind", ["rich", "plain", "json", "none"])
def test_quiet_says_only_that_rows_failed(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    display = create_display(kind, quiet=True)
    display.start(SETTINGS, 5)
    display.advance(stats_of_a_run())
    display.note("n")
    display.warn("w")
    display.summary(stats_of_a_run(), 1.0)
    display.close()
    assert stream.getvalue() == "error: 1 row failed; the output has the reasons\n"


class Broken(io.StringIO):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error
        self.tried = 0

    def write(self, text: str) -> int:
        self.tried += 1
        raise self.error


@pytest.mark.parametrize("kind", ["rich", "plain", "json", "none"])
@pytest.mark.parametrize("error", [BrokenPipeError(32, "pipe"), OSError(28, "full")])
def test_a_log_that_cannot_be_written_does_not_end_the_job(
    kind: Any, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Broken(error)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(display_module, "_PLAIN_SECONDS", 0.01)
    display = create_display(kind)
    display.start(SETTINGS, 5)
    display.advance(stats_of_a_run())
    display.warn("w")
    display.summary(stats_of_a_run(), 1.0)
    assert stream.tried


def test_no_stderr_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    create_display("auto").note("n")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (True, "yes"),
        (0.90, "0.9"),
        ([], "-"),
        ((1, 2), "1, 2"),
        ({"a": 1.0, "b": None}, "a=1, b=-"),
        ("x", "x"),
    ],
)
def test_format_value(value: object, text: str) -> None:
    assert format_value(value) == text

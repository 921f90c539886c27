"""What a terminal is sent: real processes behind pseudo-terminals of several widths."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

import specgen

CHILD = Path(__file__).parent / "cli_child.py"
SEQUENCE = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|9[0-7])[;\dm]")
NUM_ROWS = 40


def on_terminal(width: int, *args: str, cwd: Path, **environment: str) -> str:
    """Everything that a command sends to a terminal of that width as it runs."""
    root = str(Path(specgen.__file__).parents[1])
    own, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    unset = {"NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR"}
    inherited = {key: value for key, value in os.environ.items() if key not in unset}
    chunks: list[bytes] = []

    def drain() -> None:
        try:
            while chunk := os.read(own, 1 << 16):
                chunks.append(chunk)
        except OSError:  # the other end was closed
            pass

    reader = threading.Thread(target=drain)
    reader.start()
    done = subprocess.run(
        [sys.executable, str(CHILD), json.dumps({"row_seconds": 0.02}), *args],
        cwd=cwd,
        env={
            **inherited,
            "TERM": "xterm-256color",
            "PYTHONPATH": f"{root}:{CHILD.parent}",
            **environment,
        },
        stdin=subprocess.DEVNULL,
        stdout=other,
        stderr=other,
        timeout=120,
    )
    os.close(other)
    reader.join()
    os.close(own)
    text = b"".join(chunks).decode()
    assert done.returncode in (0, 3), text
    return text


@pytest.fixture
def place(tmp_path: Path) -> Path:
    lines: list[dict[str, Any]] = [{"prompt": f"row {i}"} for i in range(NUM_ROWS)]
    lines[7] = {"prompt": "a", "top\x1b[2Jp": 1, "temprature": 0}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def check_lines(text: str, width: int) -> list[str]:
    """Lines as they are seen; none is too long for the terminal."""
    lines = [part for line in SEQUENCE.sub("", text).split("\n") for part in line.split("\r")]
    for line in lines:
        if not line.startswith(("warning: ", "hint: ")):  # the terminal's own to wrap
            assert cell_len(line) <= width, line
    return [line.strip() for line in lines]


@pytest.mark.parametrize("width", [40, 60, 120])
@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}])
def test_a_run_and_its_statistics(place: Path, width: int, environment: dict[str, str]) -> None:
    text = on_terminal(width, "run", "in.jsonl", "-o", "out", cwd=place, **environment)
    lines = check_lines(text, width)
    for title in ("Summary", "Acceptance by position", "Accepted drafts a step"):
        assert title in lines
    assert any(f"/{NUM_ROWS} rows" in line for line in lines), "nothing was live"
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0
    assert bool(COLOUR.search(text)) == (not environment)
    assert "\x1b[2J" not in text
    shown = on_terminal(width, "stats", "out", "--lowest", "2", cwd=place, **environment)
    lines = check_lines(shown, width)
    for title in ("Rows", "Acceptance by position", "Rows of the lowest acceptance length"):
        assert title in lines
    assert bool(COLOUR.search(shown)) == (not environment)
    assert "█" in shown


def test_a_dumb_terminal_is_sent_text_alone(place: Path) -> None:
    for command in (["run", "in.jsonl", "-o", "out"], ["stats", "out"]):
        text = on_terminal(100, *command, cwd=place, TERM="dumb")
        assert "Acceptance by position\r\n" in text
        assert "\x1b" not in text

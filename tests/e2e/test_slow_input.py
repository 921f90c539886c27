"""A producer that takes its time: its rows are written while it thinks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import specgen

TIMEOUT = 120


@pytest.fixture
def slow_run(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run on a pipe that stays open."""
    environment = {**os.environ, "PYTHONPATH": str(Path(specgen.__file__).parents[1])}
    environment |= {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "specgen", "run", "-", "--device", "cpu", "--quiet"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        yield process
        process.kill()


def feed(process: subprocess.Popen[bytes], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text.encode())
    process.stdin.flush()


@pytest.mark.timeout(TIMEOUT)
def test_rows_are_written_while_input_is_open(slow_run: subprocess.Popen[bytes]) -> None:
    assert slow_run.stdout is not None
    for _ in range(3):
        feed(slow_run, 'bad\n{"prompt": "a", "max_tokens": 3}\n')
        statuses = [json.loads(slow_run.stdout.readline())["status"] for _ in range(2)]
        assert sorted(statuses) == ["error", "ok"]
    rest, _ = slow_run.communicate(timeout=TIMEOUT)
    assert (rest, slow_run.returncode) == (b"", 3)


@pytest.mark.timeout(TIMEOUT)
def test_a_signal_ends_the_wait(slow_run: subprocess.Popen[bytes]) -> None:
    assert slow_run.stdout is not None
    feed(slow_run, '{"prompt": "a", "max_tokens": 3}\n')
    assert json.loads(slow_run.stdout.readline())["status"] == "ok"
    slow_run.send_signal(signal.SIGINT)
    assert slow_run.wait(timeout=20) == 130

"""Signals and the time limit, through the command line in a process of its own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import specgen

Start = Callable[..., subprocess.Popen[str]]
ROOT = Path(specgen.__file__).parents[1]
CHILD = Path(__file__).with_name("cli_child.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{CHILD.parent}"}


@pytest.fixture
def start(tmp_path: Path) -> Start:
    (tmp_path / "in.jsonl").write_text("".join(f'{{"prompt": "row {i}"}}\n' for i in range(2000)))

    def popen(faults: dict[str, Any], *args: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(CHILD), json.dumps(faults), "run", "in.jsonl", *args],
            cwd=tmp_path,
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    return popen


def wait_for_rows(process: subprocess.Popen[str], partial: Path) -> None:
    deadline = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size > 2000):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def indices(path: Path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_the_first_signal_stops_at_once_and_says_how_to_go_on(
    start: Start, tmp_path: Path, signum: int, code: int
) -> None:
    process = start({"row_seconds": 0.01}, "-o", "out file")
    wait_for_rows(process, tmp_path / "out file.partial")
    process.send_signal(signum)
    sent = time.monotonic()
    _, stderr = process.communicate(timeout=30)
    assert time.monotonic() - sent < 10  # all rows take 20 s
    assert process.returncode == code
    kept = indices(tmp_path / "out file.partial")
    assert len(kept) == len(set(kept)) > 1
    lines = stderr.splitlines()
    assert lines[-2].startswith(f"{len(kept):,} finished rows are kept in ")
    assert lines[-1] == "to go on: specgen run in.jsonl -o 'out file'"
    assert shlex.split(lines[-1])[-1] == "out file"
    again = start({}, "-o", "out file", "--quiet")
    assert again.communicate(timeout=60)[1] == ""
    assert again.returncode == 0
    assert indices(tmp_path / "out file") == list(range(2000))


def test_the_second_signal_does_not_wait(start: Start, tmp_path: Path) -> None:
    process = start({"row_seconds": 0.01, "end_seconds": 60.0}, "-o", "out", "--progress", "none")
    wait_for_rows(process, tmp_path / "out.partial")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while (line := process.stderr.readline()) != "giving up\n":
        assert line, "the first signal was not heard"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 143
    assert len(indices(tmp_path / "out.partial")) > 1


def test_the_time_limit(start: Start, tmp_path: Path) -> None:
    began = time.monotonic()
    process = start({"row_seconds": 0.01}, "-o", "out", "--time-limit", "5s")
    _, stderr = process.communicate(timeout=30)
    assert 5 <= time.monotonic() - began < 18  # all rows take 20 s
    assert process.returncode == 143
    assert "stopped by the time limit" in stderr
    assert stderr.splitlines()[-1] == "to go on: specgen run in.jsonl -o out --time-limit 5s"
    assert 2 < len(indices(tmp_path / "out.partial")) < 2000
    done = start({}, "-o", "out", "--time-limit", "1h")
    done.communicate(timeout=60)
    assert done.returncode == 0
    assert indices(tmp_path / "out") == list(range(2000))


def test_nohup_is_respected(start: Start, tmp_path: Path) -> None:
    process = start(
        {"row_seconds": 0.002},
        "-o",
        "out",
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    wait_for_rows(process, tmp_path / "out.partial")
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert indices(tmp_path / "out") == list(range(2000))


def test_without_a_file_nothing_is_promised(start: Start) -> None:
    process = start({"row_seconds": 0.01}, "--time-limit", "3", stdout=subprocess.PIPE)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 143
    assert all(json.loads(line)["status"] == "ok" for line in stdout.splitlines())
    assert "to go on" not in stderr


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_other_commands_say_that_they_were_stopped_and_leave_no_folders(
    tmp_path: Path, signum: int, code: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "specgen", "bench", "--device", "cpu", "--repeat", "1000"],
        env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "warmed up" not in (line := process.stderr.readline()):
        assert line, "the benchmark never began"
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == code
    assert stderr.splitlines()[-1] == "stopped before the end"
    assert "Traceback" not in stderr
    assert not list(tmp_path.glob("specgen-*"))

"""A kill before, after and in the midst of every system call that touches the output."""

from __future__ import annotations

import io
import os
import signal
import sys
from contextlib import redirect_stderr
from pathlib import Path

import cli_child
import pytest

# What a forked child need not import again.
import rich.console
import rich.table  # noqa: F401

import specgen.cli
import specgen.job

ROWS = 7


def run_child(faults: dict[str, int], *args: str) -> int:
    """Exit code of a forked command line; negative for the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            cli_child.install(faults)
            sys.argv[:] = ["specgen", "run", "in.jsonl", "-o", "out", "--progress", "none", *args]
            with redirect_stderr(io.StringIO()):
                specgen.cli.cli()
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("".join(f'{{"prompt": "row {i}"}}\n' for i in range(ROWS)))
    return tmp_path


@pytest.mark.parametrize("order", ["input", "completion"])
def test_a_kill_at_any_call_loses_nothing(place: Path, order: str) -> None:
    assert run_child({}, "--order", order) == 0
    whole = Path("out").read_bytes()
    leftovers = sorted(os.listdir())
    point, most_kept = 0, 0
    while True:
        for name in os.listdir():
            if name != "in.jsonl":
                Path(name).unlink()
        code = run_child({"kill_at": point}, "--order", order)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        if Path("out").exists():
            assert Path("out").read_bytes() == whole, point  # a file of that name is complete
        elif Path("out.partial").exists():
            most_kept = max(most_kept, Path("out.partial").read_bytes().count(b"\n"))
        assert run_child({}, "--order", order, "--resume") == 0, point
        assert sorted(Path("out").read_bytes().splitlines()) == sorted(whole.splitlines()), point
        if order == "input":
            assert Path("out").read_bytes() == whole, point
        assert sorted(os.listdir()) == leftovers, point
        point += 1
    assert point > 2 * (ROWS + 6)
    assert most_kept == ROWS


def test_a_second_kill_during_the_resume(place: Path) -> None:
    assert run_child({}) == 0
    whole = Path("out").read_bytes()
    for point in range(0, 40, 5):
        for name in os.listdir():
            if name != "in.jsonl":
                Path(name).unlink()
        run_child({"kill_at": 11})
        for _ in range(3):
            run_child({"kill_at": point}, "--resume")
        assert run_child({}, "--resume") == 0
        assert Path("out").read_bytes() == whole, point

"""Disks that fill up or fail, through the command line in a process of its own."""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import specgen

ROOT = Path(specgen.__file__).parents[1]
CHILD = Path(__file__).with_name("cli_child.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{CHILD.parent}"}
ROWS = 60


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("".join(f'{{"prompt": "row {i}"}}\n' for i in range(ROWS)))
    return tmp_path


def command(faults: dict[str, Any], *args: str) -> list[str]:
    words = ["run", "in.jsonl", "-o", "out", "--progress", "none", *args]
    return [sys.executable, str(CHILD), json.dumps(faults), *words]


def specgen_run(
    faults: dict[str, Any], *args: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(faults, *args),
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=60,
        **options,
    )


def whole_lines(path: str) -> int:
    """Lines of a file that has nothing else in it."""
    data = Path(path).read_text()
    assert data == "" or data.endswith("\n")
    return len([json.loads(line) for line in data.splitlines()])


def check_resume() -> None:
    done = specgen_run({})
    assert done.returncode == 0, done.stderr
    found = [json.loads(line)["index"] for line in Path("out").read_text().splitlines()]
    assert found == list(range(ROWS))
    assert sorted(os.listdir()) == ["in.jsonl", "out", "out.meta.json"]


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EIO"])
def test_a_write_that_fails(code: str) -> None:
    done = specgen_run({"write": [code, 20]})
    assert done.returncode == 6
    reason = os.strerror(getattr(__import__("errno"), code))
    assert f"error: {Path('out.partial').resolve()}: cannot be written: {reason}" in done.stderr
    assert ("hint: free some " in done.stderr) == (code != "EIO")
    assert "Traceback" not in done.stderr
    assert "19 finished rows are kept in" in done.stderr
    assert whole_lines("out.partial") == 19
    check_resume()


@pytest.mark.parametrize("call", range(1, 7))
def test_an_fsync_that_fails(call: int) -> None:
    """The first ones are those of the partial file's settings, the last that of the directory."""
    done = specgen_run({"fsync": ["EIO", call]})
    if call < 5:
        assert done.returncode == 6, done.stderr
        assert "Input/output error" in done.stderr
        assert not Path("out").exists()
        assert not Path("out.sorted").exists()
        if call > 1:
            assert whole_lines("out.partial") == ROWS
            assert f"{ROWS} finished rows are kept in" in done.stderr
        check_resume()
    else:
        assert done.returncode == 0
        assert whole_lines("out") == ROWS


def test_short_writes_are_continued() -> None:
    done = specgen_run({"short": 11})
    assert done.returncode == 0
    check_lines = whole_lines("out")
    assert check_lines == ROWS


@pytest.mark.parametrize("limit", [3_000, 20_000, 30_000])
def test_a_file_that_may_not_grow(limit: int) -> None:
    """The system itself cuts a write short, and then refuses."""
    done = specgen_run(
        {}, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    )
    assert done.returncode == 6
    assert "cannot be written: File too large\nhint: raise the limit" in done.stderr
    assert "(ulimit -f)" in done.stderr
    # The remark that tells how to go on comes with the error that tells what to do first.
    assert "finished rows are kept in" in done.stderr
    assert "\nto go on: " in done.stderr
    assert 0 < whole_lines("out.partial") < ROWS
    check_resume()


def can_mount() -> bool:
    probe = "mount -t tmpfs -o size=64k none /mnt && test -d /mnt"
    try:
        done = subprocess.run(["unshare", "-rm", "sh", "-c", probe], capture_output=True)
    except FileNotFoundError:
        return False
    return done.returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs user namespaces to mount a small file system")
def test_a_small_file_system(place: Path) -> None:
    """Full in the midst of the rows, then large enough for them but not for their ordered copy."""
    (place / "disk").mkdir()
    run = shlex.join(command({}, "-o", "disk/out"))
    script = f"""
    mount -t tmpfs -o size=16k none disk
    {run}; echo "code $?"
    ls disk
    mount -o remount,size=48k disk
    {run}; echo "code $?"
    ls disk
    mount -o remount,size=1m disk
    {run}; echo "code $?"
    ls disk
    cp disk/out result
    """
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=120,
    )
    assert done.stdout.split("\n") == [
        "code 6", "out.partial", "out.partial.meta.json",
        "code 6", "out.partial", "out.partial.meta.json",
        "code 0", "out", "out.meta.json", "",
    ]  # fmt: skip
    assert "No space left on device" in done.stderr
    assert "input order needs" in done.stderr
    assert "Traceback" not in done.stderr
    assert whole_lines("result") == ROWS

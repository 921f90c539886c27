from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_engine import FakeEngine

import specgen
from specgen.cli import cli
from specgen.commands import run as run_command
from specgen.sampling_params import SamplingParams

Invoke = Callable[..., Result]
ROWS = 11


def write_input(name: str, texts: list[str]) -> None:
    Path(name).write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_command, "_load", lambda _: (FakeEngine(), SamplingParams()))
    monkeypatch.setattr(
        run_command,
        "_fingerprint",
        lambda given: {"seed": given.config.seed, "shard": str(given.shard)},
    )
    write_input("in.jsonl", [f"row {i}" if i != 4 else "fail" for i in range(ROWS)])
    return lambda *args: CliRunner().invoke(cli, ["run", *args, "--quiet"])


def merge(*args: str) -> Result:
    return CliRunner().invoke(cli, ["merge", *args])


@pytest.fixture
def shards(run: Invoke) -> list[str]:
    names = []
    for number in (1, 2, 3):
        order = "completion" if number == 2 else "input"
        names.append(f"part{number}")
        code = run("in.jsonl", "--shard", f"{number}/3", "-o", names[-1], "--order", order)
        assert code.exit_code in (0, 3)
    return names


def test_the_merged_file_is_that_of_one_run(run: Invoke, shards: list[str]) -> None:
    random.Random(2).shuffle(shards)
    result = merge(*shards, "-o", "all")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == "all: 11 rows, 1 of them failed\n"
    run("in.jsonl", "-o", "one")
    assert Path("all").read_bytes() == Path("one").read_bytes()
    meta = json.loads(Path("all.meta.json").read_text())
    assert (meta["num_rows"], meta["merged_from"]) == (ROWS, sorted(shards))
    # The undivided command takes it for its own.
    assert run("in.jsonl", "-o", "all", "--resume").exit_code == 0
    assert not [name for name in os.listdir() if name.endswith((".merging", ".tmp"))]


def test_it_replaces_only_when_told(shards: list[str]) -> None:
    Path("all").write_text("old")
    assert merge(*shards, "-o", "all").exit_code == 2
    assert Path("all").read_text() == "old"
    assert merge(*shards, "-o", "all", "--overwrite").exit_code == 0
    assert "is one of the shards" in merge(*shards, "-o", shards[0], "--overwrite").stderr


def check_refused(message: str, *paths: str) -> None:
    result = merge(*paths, "-o", "all")
    assert result.exit_code == 4, result.stderr
    assert message in result.stderr
    assert not Path("all").exists()
    assert not Path("all.meta.json").exists()


def test_what_is_missing_or_twice(shards: list[str]) -> None:
    check_refused("not all shards are given: 2/3 missing", shards[0], shards[2])
    check_refused("are both shard 1/3", *shards, shards[0])
    check_refused("none: cannot be read", *shards, "none")


def test_shards_of_other_runs(run: Invoke, shards: list[str]) -> None:
    run("in.jsonl", "--shard", "1/2", "-o", "half")
    check_refused("half is shard 1/2, part1 is shard 1/3", *shards, "half")
    run("in.jsonl", "--shard", "2/3", "-o", "other", "--seed", "5")
    check_refused("seed: 0 there, 5 here", shards[0], "other", shards[2])
    write_input("longer.jsonl", [f"row {i}" for i in range(ROWS + 1)])
    run("longer.jsonl", "--shard", "2/3", "-o", "longer")
    check_refused("num_rows: 11 there, 12 here", shards[0], "longer", shards[2])


def test_damaged_and_unfinished_shards(shards: list[str]) -> None:
    lines = Path(shards[1]).read_bytes().splitlines(keepends=True)
    Path(shards[1]).write_bytes(b"".join(lines[1:]))
    index: Any = json.loads(lines[0])["index"]
    check_refused(
        f"part2: has no row {index}\nhint: run the shard again with --retry-errors", *shards
    )
    Path(shards[1]).rename(f"{shards[1]}.partial")
    check_refused("part2: is not finished", *shards)
    Path(f"{shards[1]}.partial").rename(shards[1])
    Path(f"{shards[1]}.meta.json").write_text("{}")
    check_refused("part2.meta.json is missing or damaged", *shards)


@pytest.mark.parametrize("damage", [b"\0" * 9, b'"' * 9, b"\xff" * 9])
def test_damage_inside_a_line_is_found(shards: list[str], damage: bytes) -> None:
    data = Path(shards[1]).read_bytes()
    end = data.index(b"\n")
    index = json.loads(data[:end])["index"]
    Path(shards[1]).write_bytes(data[: end - 40] + damage + data[end - 31 :])
    check_refused(f"part2: has no row {index}\nhint: run the shard again", *shards)


@pytest.mark.parametrize("more", ["a line of another shard", "a line twice", "half a line"])
def test_a_shard_holds_its_rows_and_nothing_else(shards: list[str], more: str) -> None:
    own, other = (Path(shards[i]).read_bytes().splitlines(keepends=True)[0] for i in (1, 0))
    with open(shards[1], "ab") as file:
        file.write({"a line of another shard": other, "a line twice": own}.get(more, own[:30]))
    check_refused("part2: holds more than the rows of its shard", *shards)


def test_shards_whose_rows_are_of_another_input(run: Invoke, shards: list[str]) -> None:
    write_input("other.jsonl", [f"other {i}" for i in range(ROWS)])
    run("other.jsonl", "--shard", "2/3", "-o", "other")
    Path("other").rename(shards[1])
    check_refused("the rows of these shards are not those that their metadata describe", *shards)


def test_an_output_that_cannot_be_written(shards: list[str]) -> None:
    result = merge(*shards, "-o", "no/dir/all")
    assert result.exit_code == 6
    assert "no/dir/all: cannot be written" in result.stderr


def merge_process(args: list[str], **extra: Any) -> subprocess.CompletedProcess[bytes]:
    root = str(Path(specgen.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-m", "specgen", "merge", *args],
        env={**os.environ, "PYTHONPATH": root},
        check=False,
        timeout=60,
        **extra,
    )


def test_streams_are_written_directly(run: Invoke, shards: list[str]) -> None:
    run("in.jsonl", "-o", "one")
    one = Path("one").read_bytes()
    before = sorted(os.listdir())
    for name in ("-", "/dev/stdout", "/dev/fd/1"):
        done = merge_process([*shards, "-o", name], capture_output=True)
        assert (done.returncode, done.stdout) == (0, one)
        shown = "<stdout>" if name == "-" else name
        assert done.stderr.decode() == f"{shown}: 11 rows, 1 of them failed\n"
    assert sorted(os.listdir()) == before


def test_a_pipe_stays_a_pipe(run: Invoke, shards: list[str]) -> None:
    os.mkfifo("pipe")
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(Path("pipe").read_bytes()))
    reader.start()
    assert merge(*shards, "-o", "pipe", "--overwrite").exit_code == 0
    reader.join(timeout=30)
    run("in.jsonl", "-o", "one")
    assert received == [Path("one").read_bytes()]
    assert Path("pipe").is_fifo()
    assert not Path("pipe.meta.json").exists()


def test_streams_that_fail(shards: list[str]) -> None:
    for name in ("/dev/full", "/dev/stdout", "-"):
        with open("/dev/full", "wb") as full:
            done = merge_process([*shards, "-o", name], stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 6
        assert b"No space left on device" in done.stderr
        assert b"Traceback" not in done.stderr
    read, write = os.pipe()
    os.close(read)
    done = merge_process([*shards, "-o", "-"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("file", ["part1", "part2.meta.json"])
def test_no_shard_nor_its_metadata_is_written_over(shards: list[str], file: str) -> None:
    before = {name: Path(name).read_bytes() for name in os.listdir()}
    for suffix in ("", ".meta.json", ".merging"):
        if not file.endswith(suffix) or file == suffix:
            continue
        result = merge(*shards, "-o", file.removesuffix(suffix), "--overwrite")
        assert result.exit_code == 2
        assert "of the shards" in result.stderr
    assert {name: Path(name).read_bytes() for name in os.listdir()} == before


@pytest.mark.parametrize(
    ("output", "code", "message"),
    [
        (".", 6, "is a directory"),
        ("", 6, "is a directory"),
        ("all.gz", 2, "outputs are not compressed"),
        ("all.zst", 2, "outputs are not compressed"),
    ],
)
def test_outputs_that_a_run_refuses_too(
    shards: list[str], output: str, code: int, message: str
) -> None:
    before = sorted(os.listdir())
    result = merge(*shards, "-o", output, "--overwrite")
    assert result.exit_code == code
    assert message in result.stderr
    assert sorted(os.listdir()) == before

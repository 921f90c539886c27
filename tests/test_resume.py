"""Runs that end early and go on, through the command line with a fake engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_engine import FakeEngine

from specgen.cli import cli
from specgen.commands import run as run_command
from specgen.interrupts import StopRun
from specgen.sampling_params import SamplingParams

Invoke = Callable[..., Result]


class Engine(FakeEngine):
    """Breaks when it has finished `left` rows; remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 10**9

    def _finish(self, row: Any) -> Any:
        if not self.left:
            raise RuntimeError("the engine broke")
        self.left -= 1
        return super()._finish(row)

    def asked(self) -> list[int]:
        indices = [row.index for row in self.seen]
        self.seen.clear()
        return indices


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"temperature": 1.0, "model": {"digest": "aa", "path": "m"}}


@pytest.fixture
def invoke(
    engine: Engine, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Invoke:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_command, "_load", lambda _: (engine, SamplingParams()))
    monkeypatch.setattr(run_command, "_fingerprint", lambda _: dict(settings))
    Path("in.jsonl").write_text("".join(f'{{"prompt": "row {i}"}}\n' for i in range(30)))

    def call(*args: str, **extra: Any) -> Result:
        return CliRunner().invoke(cli, ["run", "in.jsonl", "-o", "out", *args], **extra)

    return call


def rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def interrupt(invoke: Invoke, engine: Engine, after: int, *args: str) -> Result:
    engine.left = after
    result = invoke(*args)
    assert result.exit_code == 1
    engine.left = 10**9
    engine.seen.clear()
    return result


def test_a_run_goes_on_where_it_ended(invoke: Invoke, engine: Engine) -> None:
    assert invoke("--overwrite").exit_code == 0
    whole = Path("out").read_bytes()
    Path("out").unlink()
    result = interrupt(invoke, engine, 13, "--overwrite")
    assert "13 finished rows are kept in" in result.stderr
    assert "\nto go on: cli run in.jsonl -o out\n" in result.stderr  # without --overwrite
    assert sorted(os.listdir()) == [
        "in.jsonl", "out.meta.json", "out.partial", "out.partial.meta.json",
    ]  # fmt: skip
    Path("out.meta.json").unlink()
    done = {row["index"] for row in rows("out.partial")}
    result = invoke("--progress", "json")
    assert result.exit_code == 0
    assert set(engine.asked()) == set(range(30)) - done
    assert Path("out").read_bytes() == whole
    assert sorted(os.listdir()) == ["in.jsonl", "out", "out.meta.json"]
    events = [json.loads(line) for line in result.stderr.splitlines()]
    assert events[0]["message"].startswith("resuming after 13 rows in ")
    assert events[1]["total"] == 17
    counts = {"done": 17, "ok": 17, "failed": 0, "truncated": 0, "kept": 13, "errors": {}}
    assert events[-1]["rows"] == counts


@pytest.mark.parametrize("again", [(), ("--resume",), ("--retry-errors",)])
def test_a_replacement_that_ends_early_goes_on(
    invoke: Invoke, engine: Engine, again: tuple[str, ...]
) -> None:
    assert invoke().exit_code == 0
    whole = Path("out").read_bytes()
    lines = Path("in.jsonl").read_text().replace("row 1", "new 1")
    Path("in.jsonl").write_text(lines)
    result = interrupt(invoke, engine, 13, "--overwrite")
    assert "\nto go on: cli run in.jsonl -o out\n" in result.stderr
    assert Path("out").read_bytes() == whole
    interrupt(invoke, engine, 4, *again)
    result = invoke(*again)
    assert result.exit_code == 0
    assert "resuming after 17 rows in " in result.stderr
    assert len(engine.asked()) == 13
    assert sorted(os.listdir()) == ["in.jsonl", "out", "out.meta.json"]
    assert [row["index"] for row in rows("out")] == list(range(30))
    assert rows("out")[1]["choices"][0]["text"] == "1 wen"
    assert invoke().exit_code == 2  # finished again


def test_starting_again_says_what_it_discards(invoke: Invoke, engine: Engine) -> None:
    interrupt(invoke, engine, 13)
    result = invoke("--overwrite")
    assert result.exit_code == 0
    assert "discarding 13 finished rows of " in result.stderr
    assert len(engine.asked()) == 30


@pytest.mark.parametrize("damage", [b"\0" * 9, b'"' * 9, b"\xff" * 9, b'{"index":', b"\x01" * 9])
@pytest.mark.parametrize("order", ["input", "completion"])
def test_damage_inside_a_line_never_gets_into_the_output(
    invoke: Invoke, engine: Engine, damage: bytes, order: str
) -> None:
    interrupt(invoke, engine, 13)
    data = Path("out.partial").read_bytes()
    end = data.index(b"\n")
    hurt = json.loads(data[:end])["index"]
    Path("out.partial").write_bytes(data[: end - 40] + damage + data[end - 31 :])
    result = invoke("--order", order)
    assert result.exit_code == 0
    assert "out.partial: 1 damaged line left out" in result.stderr
    assert "resuming after 12 rows" in result.stderr
    assert hurt in engine.asked()
    assert sorted(row["index"] for row in rows("out")) == list(range(30))


def test_many_ends(invoke: Invoke, engine: Engine) -> None:
    invoke()
    whole = Path("out").read_bytes()
    Path("out").unlink()
    for _ in range(7):
        interrupt(invoke, engine, 4)
        with open("out.partial", "ab") as file:
            file.write(b'{"index":3,"input_hash":"00')  # as a kill in mid-write leaves it
    result = invoke()
    assert result.exit_code == 0
    assert "cut 27 bytes of a torn line" in result.stderr
    assert engine.asked() == [28, 29]
    assert Path("out").read_bytes() == whole


def test_changed_settings_are_refused_with_the_difference(
    invoke: Invoke, engine: Engine, settings: dict[str, Any]
) -> None:
    interrupt(invoke, engine, 5)
    partial = Path("out.partial").read_bytes()
    settings |= {"temperature": 0.5, "model": {"digest": "bb", "path": "n"}}
    result = invoke()
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: {Path('out.partial').resolve()}: was made with other settings:\n"
        "  temperature: 1.0 then, 0.5 now\n"
        "  model: m (aa) then, n (bb) now\n"
        "hint: give the former settings, choose another -o, or give --overwrite\n"
    )
    assert Path("out.partial").read_bytes() == partial
    assert engine.asked() == []
    assert invoke("--overwrite").exit_code == 0
    assert len(engine.asked()) == 30


def test_changed_lines_are_run_again_and_leave_no_trace(invoke: Invoke, engine: Engine) -> None:
    lines = Path("in.jsonl").read_text().splitlines(keepends=True)
    interrupt(invoke, engine, 16)
    lines[3] = '{"prompt": "new"}\n'
    Path("in.jsonl").write_text("".join(lines[:16]))
    result = invoke()
    assert result.exit_code == 0
    assert "running 1 row of changed input lines again" in result.stderr
    assert engine.asked() == [3]
    found = rows("out")
    assert [row["index"] for row in found] == list(range(16))
    assert found[3]["choices"][0]["text"] == "wen"


def test_finished_rows_do_not_vanish_over_another_input(invoke: Invoke, engine: Engine) -> None:
    interrupt(invoke, engine, 13)
    text, partial = Path("in.jsonl").read_text(), Path("out.partial").read_bytes()
    others = {
        text.replace("row", "other"): "13 of its 13 finished rows are those of another input",
        "": "holds 13 of its 13 finished rows beyond the end of the input, which has 0",
        text[: text.index("row 3")]: "beyond the end of the input",
    }
    for other, message in others.items():
        Path("in.jsonl").write_text(other)
        for extra in ((), ("--resume",), ("--retry-errors",)):
            result = invoke(*extra)
            assert (result.exit_code, engine.asked()) == (2, [])
            assert message in result.stderr
            assert "or give --overwrite" in result.stderr
            assert Path("out.partial").read_bytes() == partial
    Path("in.jsonl").write_text(text)
    assert invoke("--limit", "3").exit_code == 2
    assert Path("out.partial").read_bytes() == partial
    assert invoke().exit_code == 0
    assert len(engine.asked()) == 17
    Path("in.jsonl").write_text(text.replace("row", "other"))
    assert invoke("--retry-errors").exit_code == 2
    assert Path("out").exists()


@pytest.mark.parametrize(
    ("shown", "message"),
    [
        ('{"prompt": "other"}\n' * 30, "the first finished row is that of another input"),
        ('{"prompt": "row 0"}\n', "finished rows beyond the end of the input, which has 1"),
        ("", "finished rows beyond the end of the input, which has 0"),
    ],
)
def test_an_input_that_is_read_only_once_is_compared_on_the_way(
    invoke: Invoke, engine: Engine, shown: str, message: str
) -> None:
    interrupt(invoke, engine, 13)
    partial = Path("out.partial").read_bytes()
    result = CliRunner().invoke(cli, ["run", "-", "-o", "out"], input=shown)
    assert result.exit_code == 2
    assert message in result.stderr
    assert Path("out.partial").read_bytes() == partial
    assert invoke().exit_code == 0


def test_equal_lines_are_rows_of_their_own(invoke: Invoke, engine: Engine) -> None:
    Path("in.jsonl").write_text('{"prompt": "same"}\n' * 12)
    interrupt(invoke, engine, 6)
    assert invoke().exit_code == 0
    assert len(engine.asked()) == 6
    assert [row["index"] for row in rows("out")] == list(range(12))


def test_a_finished_output(invoke: Invoke, engine: Engine, settings: dict[str, Any]) -> None:
    invoke()
    engine.seen.clear()
    whole = Path("out").read_bytes()
    assert invoke().exit_code == 2
    # What a run killed between its last two steps leaves.
    Path("out.partial").write_text("x")
    Path("out.partial.meta.json").write_text("{}")
    result = invoke("--resume")
    assert (result.exit_code, engine.asked()) == (0, [])
    assert "out is complete already" in result.stderr
    assert sorted(os.listdir()) == ["in.jsonl", "out", "out.meta.json"]
    settings["temperature"] = 2.0
    result = invoke("--resume")
    assert result.exit_code == 2
    assert "temperature: 1.0 then, 2.0 now" in result.stderr
    settings["temperature"] = 1.0
    with open("in.jsonl", "a") as file:
        file.write('{"prompt": "one more"}\n')
    result = invoke("--resume")
    assert result.exit_code == 2
    assert "out: complete for 30 rows, but the input has more" in result.stderr
    assert Path("out").read_bytes() == whole
    assert invoke("--overwrite").exit_code == 0
    assert len(rows("out")) == 31


def test_a_finished_output_takes_up_what_its_input_has_gained(
    invoke: Invoke, engine: Engine
) -> None:
    """Lines that were added or changed after the end cost nothing but themselves."""
    invoke()
    before = rows("out")
    lines = Path("in.jsonl").read_text().splitlines(keepends=True)
    lines[7] = '{"prompt": "mended"}\n'
    Path("in.jsonl").write_text("".join(lines))
    engine.seen.clear()
    result = invoke("--resume")
    assert result.exit_code == 2
    assert "out: 1 row of changed input lines\nhint: --retry-errors runs what" in result.stderr
    Path("in.jsonl").write_text("".join([*lines, '{"prompt": "one more"}\n']))
    assert invoke("--retry-errors").exit_code == 0
    assert engine.asked() == [7, 30]
    after = rows("out")
    assert [row["index"] for row in after] == list(range(31))
    assert [r for r in after if r["index"] not in (7, 30)] == before[:7] + before[8:]
    assert after[7]["choices"][0]["text"] == "dednem"
    for again in ("--resume", "--retry-errors"):
        assert (invoke(again).exit_code, engine.asked()) == (0, [])
    assert invoke("--shard", "2/2", "-o", "part").exit_code == 0
    engine.seen.clear()
    # A line of another shard only: nothing to run, but the shard is now one of the longer input.
    with open("in.jsonl", "a") as file:
        file.write('{"prompt": "one"}\n{"prompt": "two"}\n{"prompt": "three"}\n')
    assert invoke("--shard", "2/2", "-o", "part", "--retry-errors").exit_code == 0
    assert engine.asked() == [31, 33]
    assert json.loads(Path("part.meta.json").read_text())["num_rows"] == 34


@pytest.mark.parametrize("damage", [b"\0" * 9, b'"' * 9, b"\xff" * 9])
def test_damage_inside_a_finished_output_is_found(
    invoke: Invoke, engine: Engine, damage: bytes
) -> None:
    invoke()
    engine.seen.clear()
    whole = Path("out").read_bytes()
    end = whole.index(b"\n", 2000)
    Path("out").write_bytes(whole[: end - 40] + damage + whole[end - 31 :])
    result = invoke("--resume")
    assert result.exit_code == 2
    assert "out: not complete: 29 of 30 rows are whole" in result.stderr
    assert invoke("--retry-errors").exit_code == 0
    assert len(engine.asked()) == 1
    assert Path("out").read_bytes() == whole


@pytest.mark.parametrize(("meta", "state"), [(None, "missing"), ("{", "damaged")])
def test_a_file_without_metadata_is_not_called_complete(
    invoke: Invoke, engine: Engine, meta: str | None, state: str
) -> None:
    Path("out").write_text("my notes\n")
    if meta is not None:
        Path("out.meta.json").write_text(meta)
    for again in ("--resume", "--retry-errors"):
        result = invoke(again)
        assert (result.exit_code, engine.asked()) == (2, [])
        assert f"out: out.meta.json is {state}, so its settings are unknown" in result.stderr
        assert Path("out").read_text() == "my notes\n"


@pytest.mark.parametrize("cut", [1, 10, 400])
def test_a_shortened_output_is_not_called_complete(
    invoke: Invoke, engine: Engine, cut: int
) -> None:
    invoke()
    engine.seen.clear()
    whole = Path("out").read_bytes()
    Path("out").write_bytes(whole[:-cut])
    result = invoke("--resume")
    assert (result.exit_code, engine.asked()) == (2, [])
    assert "out: not complete: " in result.stderr
    assert " of 30 rows are whole\nhint: --retry-errors runs what is missing" in result.stderr
    assert invoke("--retry-errors").exit_code == 0
    assert 1 <= len(engine.asked()) < 5
    assert Path("out").read_bytes() == whole


def test_a_partial_of_damaged_settings_is_refused(invoke: Invoke, engine: Engine) -> None:
    interrupt(invoke, engine, 5)
    Path("out.partial.meta.json").write_text("{")
    result = invoke()
    assert result.exit_code == 2
    assert "out.partial.meta.json is damaged" in result.stderr


@pytest.mark.parametrize("how", ["crlf", "spaces", "noise"])
def test_a_partial_that_was_rewritten_is_refused_and_not_thrown_away(
    invoke: Invoke, engine: Engine, how: str
) -> None:
    interrupt(invoke, engine, 25)
    before = Path("out.partial").read_bytes()
    lines = before.splitlines()
    rewritten = {
        "crlf": before.replace(b"\n", b"\r\n"),
        "spaces": b"".join(json.dumps(json.loads(line)).encode() + b"\n" for line in lines),
        "noise": b"\x01\n" * 11,
    }[how]
    Path("out.partial").write_bytes(rewritten + b"a torn line")
    result = invoke()
    assert result.exit_code == 2
    num = rewritten.count(b"\n")
    assert f"out.partial: holds {num} damaged lines among {num}: another program" in result.stderr
    assert Path("out.partial").read_bytes() == rewritten + b"a torn line"
    Path("out.partial").write_bytes(before)
    assert invoke().exit_code == 0
    assert len(engine.asked()) == 5


def test_a_partial_under_another_name_is_told_from_an_output(
    invoke: Invoke, engine: Engine
) -> None:
    interrupt(invoke, engine, 13)
    Path("out.partial").rename("out")
    for again in ("--resume", "--retry-errors"):
        result = invoke(again)
        assert result.exit_code == 2
        assert f"call it {Path('out.partial').resolve()}\n" in result.stderr
    Path("out").rename("out.partial")
    assert invoke().exit_code == 0
    assert len(engine.asked()) == 17


@pytest.mark.parametrize("order", ["input", "completion"])
@pytest.mark.parametrize("what", ["removed", "moved", "replaced", "only settings"])
@pytest.mark.parametrize("crash", [False, True])
def test_a_partial_that_goes_away_while_it_is_written_costs_no_row(
    invoke: Invoke, engine: Engine, monkeypatch: pytest.MonkeyPatch,
    what: str, order: str, crash: bool,
) -> None:  # fmt: skip
    finish, num = engine._finish, 0

    def finish_and_remove(row: Any) -> Any:
        nonlocal num
        num += 1
        if num == 20:
            if what == "only settings":
                Path("out.partial.meta.json").unlink()
            elif what == "moved":
                Path("out.partial").rename("elsewhere")
            else:
                Path("out.partial").unlink()
            if what == "replaced":
                Path("out.partial").write_text("of another run")
        if num == 27 and crash:
            raise RuntimeError("the engine broke")
        return finish(row)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_finish", finish_and_remove)
        result = invoke("--order", order)
    engine.seen.clear()
    if not crash:
        assert result.exit_code == 0, result.stderr
        assert sorted(row["index"] for row in rows("out")) == list(range(30))
    elif what == "replaced":
        assert result.exit_code == 1
        assert f"kept in {Path('out.rescued').resolve()}" in result.stderr
        assert len(rows("out.rescued")) == 26
    else:
        assert result.exit_code == 1
        assert "26 finished rows are kept in" in result.stderr
        assert invoke("--order", order).exit_code == 0
        assert len(engine.asked()) == 4
    if what == "replaced":
        assert Path("out.partial").read_text() == "of another run"
    elif not crash:
        assert not Path("out.partial").exists()
        assert not Path("out.partial.meta.json").exists()


@pytest.mark.parametrize("how", ["stopped", "crash", "quiet"])
def test_rows_that_are_lost_when_the_folder_goes_away_are_no_ordinary_stop(
    invoke: Invoke, engine: Engine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    Path("d").mkdir()
    finish, num = engine._finish, 0

    def finish_and_move(row: Any) -> Any:
        nonlocal num
        num += 1
        if num == 20:
            Path("d").rename("elsewhere")
        if num == 27:
            raise RuntimeError("the engine broke") if how == "crash" else StopRun(signal.SIGTERM)
        return finish(row)

    monkeypatch.setattr(engine, "_finish", finish_and_move)
    result = invoke("-o", "d/out", *(["--quiet"] if how == "quiet" else []))
    assert result.exit_code == 6
    lost = f"error: {Path('d/out.partial').resolve()}: cannot be written: No such file or directory"
    assert f"{lost}: 26 finished rows of it are not kept\nhint: " in result.stderr
    assert len(rows("elsewhere/out.partial")) == 26


def test_an_input_that_loses_lines_while_it_is_read_is_no_complete_one(
    invoke: Invoke, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f'{{"prompt": "row {i}", "x": "{"y" * 100_000}"}}\n' for i in range(30))
    Path("in.jsonl").write_text(text)
    finish = engine._finish

    changes = [lambda file: file.truncate(200_000), lambda file: file.write('{"prompt": "more"}\n')]

    def finish_and_change(row: Any) -> Any:
        if row.index == 3 and changes:
            with open("in.jsonl", "r+" if len(changes) == 2 else "a") as file:
                changes.pop(0)(file)
        return finish(row)

    monkeypatch.setattr(engine, "_finish", finish_and_change)
    result = invoke("--progress", "none")
    assert result.exit_code == 4
    assert "in.jsonl: was 3,000,890 bytes when the run began, and is 200,000 now" in result.stderr
    assert "finished rows are kept in" in result.stderr
    assert not Path("out").exists()
    Path("in.jsonl").write_text(text)
    # Lines that were added or touched meanwhile are no loss.
    result = invoke("--overwrite")
    assert result.exit_code == 0
    assert "warning: in.jsonl: was changed during the run" in result.stderr
    assert len(rows("out")) == 31
    assert invoke("--resume").exit_code == 0


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_no_name_promises_a_compressed_output(invoke: Invoke, suffix: str) -> None:
    result = invoke("-o", f"new.jsonl{suffix}")
    assert result.exit_code == 2
    assert (
        f"new.jsonl{suffix}: outputs are not compressed\nhint: choose new.jsonl\n" in result.stderr
    )


def test_resume_on_nothing_is_a_run(invoke: Invoke) -> None:
    assert invoke("--resume").exit_code == 0
    assert len(rows("out")) == 30


def test_failed_rows_stay_unless_asked(
    invoke: Invoke, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f'{{"prompt": "row {i}"}}\n' for i in range(30)]
    lines[1] = lines[5] = '{"prompt": "fail"}\n'
    Path("in.jsonl").write_text("".join(lines))
    interrupt(invoke, engine, 15)
    result = invoke()
    assert result.exit_code == 3  # though no row failed in this run
    assert set(engine.asked()).isdisjoint({1, 5})
    first = rows("out")
    assert [row["index"] for row in first if row["status"] == "error"] == [1, 5]

    monkeypatch.setattr(engine, "_finish", FakeEngine()._finish)
    result = invoke("--retry-errors")
    assert engine.asked() == [1, 5]
    assert result.exit_code == 3
    assert rows("out") == first

    finish = FakeEngine()._finish

    def mended(row: Any) -> Any:
        from dataclasses import replace

        return finish(replace(row, prompt="mended") if row.prompt == "fail" else row)

    monkeypatch.setattr(engine, "_finish", mended)
    result = invoke("--retry-errors")
    assert (result.exit_code, engine.asked()) == (0, [1, 5])
    second = rows("out")
    assert [row["index"] for row in second] == list(range(30))
    assert second[1]["choices"][0]["text"] == "dednem"
    assert [r for r in second if r["index"] not in (1, 5)] == [
        r for r in first if r["index"] not in (1, 5)
    ]
    result = invoke("--retry-errors")
    assert (result.exit_code, engine.asked()) == (0, [])
    assert "complete already" in result.stderr


def test_retrying_does_not_lose_the_rows_that_are_fine(invoke: Invoke, engine: Engine) -> None:
    lines = [f'{{"prompt": "row {i}"}}\n' for i in range(30)]
    lines[4] = lines[5] = '{"prompt": "fail"}\n'
    Path("in.jsonl").write_text("".join(lines))
    assert invoke().exit_code == 3
    whole = Path("out").read_bytes()
    interrupt(invoke, engine, 0, "--retry-errors")
    assert not Path("out").exists()
    assert invoke().exit_code == 3
    assert engine.asked() == []
    assert Path("out").read_bytes() == whole


def test_max_errors_counts_the_rows_of_earlier_runs(
    invoke: Invoke, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f'{{"prompt": "row {i}"}}\n' for i in range(30)]
    for bad in (3, 9, 10):
        lines[bad] = '{"prompt": ""}\n'
    Path("in.jsonl").write_text("".join(lines))
    result = invoke("--max-errors", "2")
    assert result.exit_code == 4
    assert "error: 3 rows failed, --max-errors is 2\nhint: " in result.stderr
    assert "finished rows are kept in" in result.stderr
    assert [r["index"] for r in rows("out.partial") if r["status"] == "error"] == [3, 9, 10]
    # The same command again is no way around it, and does not even load the model.
    partial = Path("out.partial").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(run_command, "_load", None)
        result = invoke("--max-errors", "2")
    assert result.exit_code == 4
    assert "error: 3 rows failed, 3 in earlier runs, --max-errors is 2\nhint: " in result.stderr
    assert Path("out.partial").read_bytes() == partial
    assert invoke("--max-errors", "2", "--retry-errors").exit_code == 4
    assert sorted(r["index"] for r in rows("out.partial"))[:3] == [0, 1, 2]
    # A line that was mended is no failure any more; of an input that is read only once nobody
    # knows before it is read.
    Path("in.jsonl").write_text("".join([*lines[:9], '{"prompt": "mended"}\n', *lines[10:]]))
    text = Path("in.jsonl").read_text()
    shutil.copytree(".", "../once")
    assert invoke("--max-errors", "2").exit_code == 3
    assert len(rows("out")) == 30
    monkeypatch.chdir("../once")
    command = ["run", "-", "-o", "out", "--max-errors", "2"]
    assert CliRunner().invoke(cli, command, input=text).exit_code == 4
    assert CliRunner().invoke(cli, [*command, "--retry-errors"], input=text).exit_code == 3
    assert len(rows("out")) == 30
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("".join(lines))
    assert invoke("--max-errors", "3", "--overwrite").exit_code == 3
    Path("in.jsonl").write_text(lines[3])
    assert invoke("--max-errors", "0", "--overwrite").exit_code == 4


def test_shards_make_the_whole(invoke: Invoke, engine: Engine) -> None:
    invoke()
    whole = rows("out")
    engine.seen.clear()
    for number in (1, 2, 3, 4):
        name = f"part{number}"
        result = invoke("--shard", f"{number}/4", "-o", name, "--progress", "json")
        assert result.exit_code == 0
        assert engine.asked() == list(range(number - 1, 30, 4))
        assert json.loads(result.stderr.splitlines()[0])["total"] == len(rows(name))
        assert rows(name) == whole[number - 1 :: 4]
    interrupt(invoke, engine, 3, "--shard", "2/4", "-o", "again")
    assert invoke("--shard", "2/4", "-o", "again").exit_code == 0
    assert Path("again").read_bytes() == Path("part2").read_bytes()


@pytest.mark.parametrize("form", ["flat", "openai"])
@pytest.mark.parametrize("damage", [False, True])
def test_the_summary_of_a_resumed_run_covers_the_whole_output(
    invoke: Invoke, engine: Engine, form: str, damage: bool
) -> None:
    lines = [f'{{"prompt": "row {i}", "n": {1 + i % 2}}}\n' for i in range(30)]
    lines[1] = lines[5] = lines[29] = '{"prompt": "fail"}\n'
    Path("in.jsonl").write_text("".join(lines))
    flags = ["--format", form, "--summary", "sum.json", "--progress", "json"]
    assert invoke(*flags).exit_code == 3
    whole = json.loads(Path("sum.json").read_text())
    assert "whole_output" not in whole
    for key in ("complete", "elapsed_s", "completion_tokens_per_s"):
        del whole[key]
    Path("out").unlink()
    interrupt(invoke, engine, 9, *flags)
    interrupt(invoke, engine, 5, *flags)
    if damage:  # by hand, and still JSON
        first, rest = Path("out.partial").read_text().split("\n", 1)
        Path("out.partial").write_text(first.replace("usage", "using") + "\n" + rest)
    # Lines that are run again must not count twice.
    mended = "".join(lines).replace('"row 2"', '"row B"')
    Path("in.jsonl").write_text(mended)
    result = invoke(*flags)
    assert result.exit_code == 3
    summary = json.loads(Path("sum.json").read_text())
    events = [json.loads(line) for line in result.stderr.splitlines()]
    warnings = [e["message"] for e in events if e["event"] == "warning" and "row" in e["message"]]
    if damage:
        assert "1 earlier row not in the figures: damaged" in warnings
        assert summary["whole_output"]["rows"]["done"] == 29
        return
    assert summary["whole_output"] == whole
    assert events[-1]["whole_output"] == whole
    assert summary["rows"]["done"] + summary["rows"]["kept"] == 30
    assert 0 < summary["rows"]["kept"] < 14
    meta = json.loads(Path("out.meta.json").read_text())
    assert meta["summary"]["whole_output"] == whole
    stats = json.loads(CliRunner().invoke(cli, ["stats", "--json", "out"]).stdout)
    assert stats["usage"] == whole["usage"]
    shown = invoke("--overwrite", "--format", form).stderr
    assert "Summary\n" in shown
    assert "whole output" not in shown
    interrupt(invoke, engine, 9, "--overwrite", "--format", form)
    shown = invoke("--format", form).stderr
    assert "Summary, with 9 rows of earlier runs\n" in shown
    assert "Acceptance by position, whole output\n" in shown


def test_completion_order(invoke: Invoke, engine: Engine) -> None:
    invoke("--order", "completion")
    assert [row["index"] for row in rows("out")][:8] == [3, 2, 1, 0, 7, 6, 5, 4]
    # Lines that no longer count are left out in this order too.
    lines = Path("in.jsonl").read_text().splitlines(keepends=True)
    Path("out").unlink()
    interrupt(invoke, engine, 16)
    Path("in.jsonl").write_text("".join(['{"prompt": "new"}\n', *lines[1:20]]))
    assert invoke("--order", "completion").exit_code == 0
    indices = [row["index"] for row in rows("out")]
    assert indices[:4] == [3, 2, 1, 7]
    assert sorted(indices) == list(range(20))


def test_the_limit_may_grow(invoke: Invoke, engine: Engine) -> None:
    interrupt(invoke, engine, 8, "--limit", "10")
    assert invoke("--limit", "20").exit_code == 0
    assert engine.asked() == list(range(8, 20))


def test_one_row_is_counted_as_one(invoke: Invoke, engine: Engine) -> None:
    result = interrupt(invoke, engine, 1)
    assert "\n1 finished row is kept in " in result.stderr
    assert "resuming after 1 row in " in invoke().stderr


@pytest.mark.parametrize("where", ["_fingerprint", "_load"])
@pytest.mark.parametrize(
    ("signum", "code", "reason"),
    [(signal.SIGINT, 130, "before the end"), (signal.SIGALRM, 143, "by the time limit")],
)
def test_a_stop_during_the_start_is_no_silent_one(
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    signum: int,
    code: int,
    reason: str,
) -> None:
    def stop(_: Any) -> Any:
        raise StopRun(signum)

    monkeypatch.setattr(run_command, where, stop)
    result = invoke("--overwrite")
    assert result.exit_code == code
    assert f"stopped {reason}" in result.stderr
    assert "no row was finished in this run: to go on, give the same command" in result.stderr
    assert os.listdir() == ["in.jsonl"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
        (["--retry-errors", "--overwrite"], "--retry-errors and --overwrite exclude each other"),
        (["--retry-errors", "-o", "-"], "--retry-errors needs an output file"),
        (["--order", "input", "-o", "-"], "--order needs an output file"),
        (["--shard", "5/4"], "must be I/N with I from 1 to N, got 5/4"),
        (["--time-limit", "soon"], "'soon' is no duration"),
        (["--max-errors", "-1"], "--max-errors"),
        (["--order", "random"], "--order"),
        (["--format", "xml"], "--format"),
    ],
)
def test_contradictions(invoke: Invoke, args: list[str], message: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert os.listdir() == ["in.jsonl"]

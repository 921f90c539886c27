from __future__ import annotations

import os
from pathlib import Path

import pytest

from specgen.errors import OutputError, UsageError
from specgen.request_io.file_writer import OutputOptions
from specgen.request_io.place import check_apart, files_of, find_place, is_written_for
from specgen.request_io.writer import open_writer

OVERWRITE = OutputOptions(overwrite=True)
NAMES = [path.name for path in files_of(Path("out"))]


def record(index: int) -> dict[str, object]:
    return {"index": index, "input_hash": f"{index:016x}", "status": "ok"}


def test_a_run_writes_no_file_that_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[str] = set()
    real_open, real_rename = os.open, os.rename

    def spy_open(path: object, *args: int, **kwargs: int) -> int:
        used.add(Path(str(path)).name)
        return real_open(path, *args, **kwargs)  # type: ignore[call-overload, no-any-return]

    def spy_rename(source: Path, target: Path) -> None:
        used.update((source.name, target.name))
        real_rename(source, target)

    monkeypatch.setattr(os, "open", spy_open)
    monkeypatch.setattr(os, "rename", spy_rename)
    writer = open_writer(str(tmp_path / "out"))
    writer.write(record(1))
    writer.write(record(0))
    writer.finish(2, {})
    assert {"out", "out.partial", "out.sorted", "out.meta.json.tmp"} <= used
    assert used <= {*NAMES, tmp_path.name}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("link", ["none", "symbolic", "hard"])
def test_no_input_is_written_over(tmp_path: Path, name: str, link: str) -> None:
    data = tmp_path / name
    data.write_text("{}\n")
    given = data
    if link != "none":
        given = tmp_path / "elsewhere"
        (given.symlink_to if link == "symbolic" else given.hardlink_to)(data)
    with pytest.raises(UsageError, match="is an input") as error:
        open_writer(str(tmp_path / "out"), OVERWRITE, inputs=("-", str(given)))
    assert error.value.exit_code == 2
    assert data.read_text() == "{}\n"
    assert is_written_for(str(given), tmp_path / "out")


def test_other_names_are_free(tmp_path: Path) -> None:
    target = tmp_path / "out"
    for name in ("out.jsonl", "in", "out.partial.jsonl", "missing/out"):
        assert not is_written_for(str(tmp_path / name), target)
        check_apart("out", target, [str(tmp_path / name)], "is an input of this run")


@pytest.mark.parametrize("name", NAMES)
def test_a_directory_in_the_way_is_found_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(OutputError, match="directory") as error:
        find_place(str(tmp_path / "out"))
    assert error.value.exit_code == 6
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["", "sub/", ".", "./", "file/"])
def test_a_name_of_a_directory_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    with pytest.raises(OutputError, match="is a directory"):
        find_place(name)
    assert Path("file").read_text() == "x"

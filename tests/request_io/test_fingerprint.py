from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from specgen.errors import ModelError
from specgen.request_io.fingerprint import differences, directory_identity


def test_differences_name_both_values() -> None:
    old = {"seed": 0, "temperature": 0.7, "stop": ["a"], "gone": 1}
    new = {"seed": 0, "temperature": 0.8, "stop": ["a"], "added": None}
    assert differences(old, new) == ["temperature: 0.7 then, 0.8 now", "gone: 1 then, null now"]
    assert differences(old, dict(old)) == []


def test_directories_differ_by_what_they_hold() -> None:
    there = {"model": {"digest": "aa", "path": "/a"}}
    moved = {"model": {"digest": "aa", "path": "/b"}}
    other = {"model": {"digest": "bb", "path": "/a"}}
    assert differences(there, moved) == []
    assert differences(there, other) == ["model: /a (aa) then, /a (bb) now"]
    assert differences(there, {"model": None}) == ["model: /a (aa) then, null now"]


def test_the_identity_of_a_checkpoint(tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.mkdir()
    (one / "config.json").write_text("{}")
    (one / "model.safetensors").write_bytes(os.urandom(1 << 20))
    (one / "README.md").write_text("hello")
    known = directory_identity(str(one))
    assert len(known) == 16
    two = Path(shutil.copytree(one, tmp_path / "two"))
    (two / "README.md").write_text("changed")
    assert directory_identity(str(two)) == known
    (two / "config.json").write_text('{"a": 1}')
    assert directory_identity(str(two)) != known
    shutil.copy(one / "config.json", two)
    # A fine-tuned sister: the same shapes, other values everywhere.
    (two / "model.safetensors").write_bytes(os.urandom(1 << 20))
    assert directory_identity(str(two)) != known
    with open(one / "model.safetensors", "ab") as file:
        file.write(b"x")
    assert directory_identity(str(one)) != known


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        directory_identity(str(tmp_path / "none"))

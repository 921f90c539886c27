"""Benchmarks start, whatever only a GPU would measure with them."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import benchmarks
from benchmarks import auto_length

SCRIPTS = [
    name for _, name, _ in pkgutil.iter_modules(benchmarks.__path__) if not name.startswith("_")
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_benchmark_imports_and_says_what_it_takes(name: str) -> None:
    command = getattr(importlib.import_module(f"benchmarks.{name}"), "main", None)
    if isinstance(command, click.Command):
        assert CliRunner().invoke(command, ["--help"]).exit_code == 0


def test_auto_length_measures_after_a_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_length, "OUTPUT_LEN", 8)
    options = ["--batch-size", "2", "--length", "1.5,2.5", "--max-k", "2", "--input-len", "8"]
    arguments = [*options, "--warm-up", "0.01", "--output-dir", str(tmp_path)]
    found = CliRunner().invoke(auto_length.main, arguments, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    cells = json.loads((tmp_path / "auto_length.json").read_text())["results"]
    assert [cell["length"] for cell in cells] == [1.5, 2.5]
    for cell in cells:
        assert set(cell["ways"]) == {"none", "0", "1", "2", "auto"}
        assert all(way["tok_s"] > 0 for way in cell["ways"].values())

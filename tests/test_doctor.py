from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from models.tiny import edit_config, make_eagle3, make_llama

from specgen import doctor, resolve
from specgen.cli import cli
from specgen.doctor import Finding, examine, versions


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    target = make_llama(directory / "target")
    return target, make_eagle3(directory / "draft", target)


def look_up(findings: list[Finding]) -> dict[tuple[str, str], Finding]:
    return {(finding.section, finding.name): finding for finding in findings}


def test_versions_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions()["torch"]
    monkeypatch.setattr(doctor, "_PACKAGES", ("surely-not-installed",))
    assert versions()["surely-not-installed"] is None
    (missing,) = [f for f in doctor._software() if f.status == "problem"]
    assert missing.name == "surely-not-installed"


def test_a_pair_that_fits(pair: tuple[Path, Path]) -> None:
    found = look_up(list(examine(str(pair[0]), str(pair[1]))))
    assert found["target", "num_layers"].value == "7"
    assert found["target", "architecture"].value == "LlamaForCausalLM"
    assert found["draft", "layout"].value == "eagle3"
    assert found["draft", "fits the target"].value == "yes"
    assert not [f for f in found.values() if f.status == "problem"]


def test_a_target_alone(pair: tuple[Path, Path]) -> None:
    findings = list(examine(str(pair[0])))
    assert not [f for f in findings if f.section == "draft"]


def test_a_draft_that_does_not_fit(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = make_llama(tmp_path / "other", hidden_size=64)
    result = CliRunner().invoke(
        cli, ["doctor", "--model", str(other), "--draft-model", str(pair[1])]
    )
    assert result.exit_code == 5
    assert "PROBLEM" in result.stdout


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["doctor", "--model", str(tmp_path / "no"), "--json"])
    assert result.exit_code == 5
    report = json.loads(result.stdout)
    assert report["ok"] is False
    (problem,) = [f for f in report["findings"] if f["status"] == "problem"]
    assert problem["section"] == "target"
    assert "no such model directory" in problem["value"]


def test_an_unsupported_model(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = make_llama(tmp_path / "other")
    edit_config(other, architectures=["MambaForCausalLM"], model_type="mamba")
    findings = list(examine(str(other)))
    (problem,) = [f for f in findings if f.status == "problem"]
    assert "mamba" in problem.value.lower()


def test_the_built_in_pair(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resolve, "BUILTIN_TARGET", pair[0])
    monkeypatch.setattr(resolve, "BUILTIN_DRAFT", pair[1])
    found = look_up(list(examine()))
    assert found["target", "built-in pair"].value == "present"
    assert found["draft", "fits the target"].value == "yes"
    monkeypatch.setattr(resolve, "BUILTIN_DRAFT", tmp_path)
    missing = look_up(list(examine()))["target", "built-in pair"]
    assert (missing.value, missing.status) == ("missing", "problem")


def test_what_the_table_shows(pair: tuple[Path, Path]) -> None:
    result = CliRunner().invoke(cli, ["doctor", "--model", str(pair[0])])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "software",
        "machine",
        "kernels",
        "target",
    ]
    assert any(line.split()[:2] == ["ok", "python"] for line in lines)
    assert any("backend" in line for line in lines)

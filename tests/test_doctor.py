from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


def fake_torch(bf16: bool) -> Any:
    facts = SimpleNamespace(name="H200", major=9, minor=0)
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_properties=lambda index: facts,
        mem_get_info=lambda index: (3 * 2**30, 4 * 2**30),
        is_bf16_supported=lambda including_emulation: bf16 and not including_emulation,
    )
    return SimpleNamespace(
        cuda=cuda,
        version=SimpleNamespace(cuda="12.8"),
        _C=SimpleNamespace(_cuda_getDriverVersion=lambda: 12080),
    )


def test_a_machine_with_gpus() -> None:
    found = look_up(list(doctor._machine(fake_torch(bf16=True))))
    assert found["machine", "driver"].value == "for CUDA 12.8"
    gpu = found["machine", "GPU 1"].value
    assert gpu == "H200, compute capability 9.0, 3.0 of 4.0 GiB free"
    assert found["machine", "bfloat16"].value == "yes"
    old = look_up(list(doctor._machine(fake_torch(bf16=False))))["machine", "bfloat16"]
    assert (old.value, old.status) == ("no", "note")


def test_triton_is_tried_and_not_just_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(torch: Any) -> float:
        raise RuntimeError("cc not found\nlong story")

    for attempt, status, text in (
        (broken, "problem", "does not work: cc not found"),
        (lambda torch: 0.5, "problem", "wrong results, off by 0.5"),
        (lambda torch: 1e-7, "ok", "compiles and runs"),
    ):
        monkeypatch.setattr(doctor, "_try_triton", attempt)
        triton = look_up(list(doctor._kernels(fake_torch(bf16=True))))["kernels", "triton"]
        assert (triton.status, triton.value) == (status, text)


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

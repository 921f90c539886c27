"""Flags that replace what a draft's configuration says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_engine import FakeEngine

from specgen.cli import cli
from specgen.commands import run as run_command
from specgen.commands.run_options import sampling_of
from specgen.config import EngineConfig


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[EngineConfig]:
    """Configurations that the engine would have been loaded with."""
    seen: list[EngineConfig] = []

    def load(options: Any) -> Any:
        seen.append(options.config)
        return FakeEngine(), sampling_of(options.sampling, {})

    monkeypatch.setattr(run_command, "_load", load)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "abc"}\n')
    return seen


def test_they_reach_the_engine(configs: list[EngineConfig]) -> None:
    args = ["--draft-aux-layers", "2,16,29", "--draft-rope-theta", "1e6"]
    args += ["--draft-norm-output", "false", "--draft-norm-before-residual", "true"]
    args += ["--draft-revision", "v2", "--draft-model", "org/head", "--model", "org/model"]
    result = CliRunner().invoke(cli, ["run", "in.jsonl", *args])
    assert result.exit_code == 0, result.stderr
    (config,) = configs
    assert config.draft_aux_layers == (2, 16, 29)
    assert config.draft_rope_theta == 1e6
    assert config.draft_norm_output is False
    assert config.draft_norm_before_residual is True
    assert config.draft_revision == "v2"


def test_without_them_nothing_is_replaced(configs: list[EngineConfig]) -> None:
    assert CliRunner().invoke(cli, ["run", "in.jsonl"]).exit_code == 0
    assert configs[0].draft_aux_layers is configs[0].draft_norm_output is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--draft-aux-layers", "2,x"], "must be boundaries of the target, such as 2,16,29"),
        (["--draft-aux-layers", "2,2,3"], "--draft-aux-layers must be distinct boundaries"),
        (["--draft-norm-output", "maybe"], "must be true or false, got 'maybe'"),
        (
            ["--draft-rope-theta", "0"],
            "--draft-rope-theta must be a finite number above 0, got 0.0",
        ),
        (
            ["--draft-rope-theta", "nan"],
            "--draft-rope-theta must be a finite number above 0, got nan",
        ),
        (["--no-draft", "--draft-rope-theta", "5"], "--draft-rope-theta needs a draft"),
        (["--no-draft", "--draft-norm-output", "false"], "--draft-norm-output needs a draft"),
        (["--model", "m", "--draft-revision", "x"], "--draft-revision needs a draft"),
    ],
)
def test_what_is_wrong_is_said(configs: list[EngineConfig], args: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["run", "in.jsonl", *args])
    assert result.exit_code == 2
    assert message in result.stderr
    assert configs == []

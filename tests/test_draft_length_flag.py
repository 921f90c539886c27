"""`--num-speculative-tokens`: a number, auto, or auto up to a number."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from specgen.cli import cli
from specgen.config import EngineConfig, ResolvedConfig, parse_num_speculative_tokens
from specgen.errors import UsageError
from specgen.resolve import resolve


def resolved(value: Any, **options: Any) -> ResolvedConfig:
    return resolve(EngineConfig(device="cpu", num_speculative_tokens=value, **options))


@pytest.mark.parametrize(
    ("value", "auto", "k"),
    [(None, False, 1), (2, False, 2), ("auto", True, 5), ("auto:7", True, 7), (0, False, 0)],
)
def test_what_it_resolves_to_on_a_cpu(value: Any, auto: bool, k: int) -> None:
    config = resolved(value)
    assert (config.auto_draft_length, config.num_speculative_tokens) == (auto, k)


def test_auto_is_the_default_of_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for value, auto, k in ((None, True, 5), (3, False, 3)):
        config = resolve(EngineConfig(device="cuda", num_speculative_tokens=value))
        assert (config.auto_draft_length, config.num_speculative_tokens) == (auto, k)


def test_without_a_draft_there_is_nothing_to_choose() -> None:
    config = resolved("auto", no_draft=True)
    assert (config.auto_draft_length, config.num_speculative_tokens) == (False, 0)


def test_given_rates_are_the_limit() -> None:
    rates = (0.9, 0.5)
    config = resolved("auto", rejection_sample="synthetic", synthetic_acceptance=rates)
    assert config.auto_draft_length
    assert (config.num_speculative_tokens, config.synthetic_rates) == (2, rates)


@pytest.mark.parametrize(
    "value", ["", "auto:", "auto:0", "auto:-1", "auto:33", "auto:x", "Auto", "3.5", "auto:3:4"]
)
def test_anything_else_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="--num-speculative-tokens must be"):
        parse_num_speculative_tokens(value)
    result = CliRunner().invoke(cli, ["run", "--num-speculative-tokens", value, "x.jsonl"])
    assert result.exit_code == 2
    assert "--num-speculative-tokens" in result.output


@pytest.mark.parametrize("command", ["run", "bench", "doctor"])
def test_every_command_with_a_draft_takes_and_checks_it(command: str) -> None:
    help_text = CliRunner().invoke(cli, [command, "--help"]).output
    assert "--num-speculative-tokens N|auto[:N]" in help_text
    inputs = ["x.jsonl"] if command == "run" else []
    result = CliRunner().invoke(cli, [command, *inputs, "--num-speculative-tokens", "auto:x"])
    assert result.exit_code == 2
    assert "auto:x" in result.stderr

"""Every flag of every command that takes a number, with numbers that no flag is made for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from specgen.cli import cli

FLOATS = ("nan", "inf", "-inf", "1e300", "-1e300")
INTEGERS = ("9" * 26, "-" + "9" * 26, str(2**63 - 1), str(2**31))
ARGUMENTS = {
    "run": ("prompts.jsonl", "-o", "out.jsonl"),
    "validate": ("prompts.jsonl",),
    "stats": ("out.jsonl",),
    "merge": ("out.jsonl", "-o", "merged.jsonl"),
    "doctor": (),
    "bench": ("--batch-size", "1", "--input-len", "2", "--output-len", "2"),
}
# Flags that have a meaning only beside others: alone they are refused for that.
BESIDE = {("bench", "--num-prompts"): ("--job", "mixed", "--no-draft")}


def number_flags() -> Iterator[tuple[str, str, str]]:
    """Command, flag and value."""
    for name, command in cli.commands.items():
        for option in command.params:
            if isinstance(option.type, click.types.FloatParamType):
                values: tuple[str, ...] = FLOATS
            elif isinstance(option.type, click.types.IntParamType):
                values = INTEGERS
            else:
                continue
            flag = max(option.opts, key=len)
            yield from ((name, flag, value) for value in values)


def test_commands_are_all_known() -> None:
    assert set(cli.commands) == set(ARGUMENTS)
    assert len(set(number_flags())) > 60


@pytest.mark.parametrize(("command", "flag", "value"), list(number_flags()))
def test_odd_numbers_are_usage_errors_or_serve(
    command: str, flag: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused with exit code 2 or 5 and a reason, or as good as another; never a fault of ours."""
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "hi", "max_tokens": 2}\n')
    beside = BESIDE.get((command, flag), ARGUMENTS[command])
    arguments = [command, *beside, f"{flag}={value}"]
    result = CliRunner().invoke(cli, arguments)
    shown = (result.exit_code, result.stderr)
    assert "internal error" not in result.stderr, shown
    assert "Traceback" not in result.stderr, shown
    assert result.exit_code in (0, 2, 4, 5), shown
    if result.exit_code in (2, 5):
        assert flag in result.stdout + result.stderr, shown

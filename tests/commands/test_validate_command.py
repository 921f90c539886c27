from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from models.tiny import make_target

from specgen.cli import cli

Validate = Callable[..., Result]
LINES = [
    {"prompt": "fine", "custom_id": "a"},
    {"prompt": "fine", "temperature": -1, "custom_id": "b"},
    None,
    {"prompt": "x" * 300, "custom_id": "c"},
    {"prompt": [1, 9999], "custom_id": "d"},
    {"messages": [{"role": "user", "content": "hi"}], "custom_id": "a"},
    {"prompt": "twice"},
    {"prompt": "twice"},
    {"custom_id": "e", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("model"), with_tokenizer=True, vocab_size=78)


@pytest.fixture
def validate(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Validate:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("".join((json.dumps(x) if x else "") + "\n" for x in LINES))
    return lambda *args: CliRunner().invoke(cli, ["validate", *args, "--model", str(model)])


def test_findings_name_their_lines(validate: Validate) -> None:
    result = validate("in.jsonl")
    assert result.exit_code == 4, result.stderr
    found = [line.split(": ", 2)[:2] for line in result.stdout.splitlines()]
    assert found == [
        ["in.jsonl:2", "invalid_value"],
        ["in.jsonl:4", "prompt_too_long"],
        ["in.jsonl:5", "token_id_out_of_range"],
        ["in.jsonl:6", "duplicate_id"],
        ["in.jsonl:8", "duplicate_line"],
    ]
    assert "its id is that of in.jsonl:1" in result.stdout
    assert "equals in.jsonl:7" in result.stdout
    assert "bad rows: 3\nduplicate ids: 1\nequal lines: 1\n" in result.stderr


def test_json(validate: Validate) -> None:
    result = validate("in.jsonl", "--json")
    *findings, last = [json.loads(line) for line in result.stdout.splitlines()]
    assert findings[0] == {
        "source": "in.jsonl", "line": 2, "code": "invalid_value",
        "message": '"temperature" must be >= 0, got -1',
    }  # fmt: skip
    assert last["summary"]["rows"] == 8
    assert last["summary"]["bad_rows"] == 3


def test_equal_lines_alone_are_no_problem(validate: Validate) -> None:
    Path("same.jsonl").write_text('{"prompt": "same"}\n' * 40)
    result = validate("same.jsonl")
    assert result.exit_code == 0
    assert result.stdout.count("duplicate_line") == 10
    assert "equal lines: 39" in result.stderr


def test_several_files_and_one_given_twice(validate: Validate) -> None:
    Path("one").write_text('{"prompt": "a", "custom_id": 1}\n{"prompt": "b", "custom_id": 2}\n')
    Path("two").write_text('\n{"prompt": "c", "custom_id": 2}\n')
    result = validate("one", "two", "one")
    assert "two:2: duplicate_id: its id is that of one:2" in result.stdout
    assert "one:1: duplicate_id: its id is that of one:1" in result.stdout
    assert result.exit_code == 4


@pytest.mark.parametrize(
    ("flags", "codes"),
    [
        (["--overlong", "truncate-left", "--limit", "3"], ["invalid_value"]),
        (["--max-model-len", "4", "--limit", "1"], ["prompt_too_long"]),
        (["--id-field", "nr", "--limit", "1"], ["missing_id"]),
        (["--apply-chat-template", "never"], None),
        (["--limit", "0"], []),
    ],
)
def test_flags(validate: Validate, flags: list[str], codes: list[str] | None) -> None:
    result = validate("in.jsonl", *flags)
    found: Any = [line.split(": ")[1] for line in result.stdout.splitlines()]
    if codes is None:
        assert '"messages" need a chat template' in result.stdout
    else:
        assert found == codes
    assert result.exit_code == (4 if found else 0)


def test_problems_of_files(validate: Validate) -> None:
    assert validate("missing").exit_code == 4
    result = CliRunner().invoke(cli, ["validate", "in.jsonl", "--model", "no/such/dir"])
    assert result.exit_code == 5
    assert "no such model directory" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("line", "flags", "message"),
    [
        ({"messages": [{"role": "user", "content": "x" * 300}]}, [], '"messages" has 319 tokens'),
        ({"text": "x" * 300}, ["--prompt-field", "text"], '"text" has 301 tokens'),
        ({"prompt_token_ids": [78]}, [], '"prompt_token_ids" holds token id 78'),
        ({"prompt": "a" * 300}, ["--system-prompt", "b"], '"prompt" has 329 tokens'),
        ({"prompt": "a", "stop_token_ids": [1, 78]}, [], '"stop_token_ids" holds token id 78'),
    ],
)
def test_messages_name_the_key_of_the_line(
    validate: Validate, line: dict[str, Any], flags: list[str], message: str
) -> None:
    Path("one.jsonl").write_text(json.dumps(line) + "\n")
    result = validate("one.jsonl", *flags)
    assert result.exit_code == 4
    assert message in result.stdout

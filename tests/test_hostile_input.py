"""Files that no run should survive by luck, through the command line with a fake engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_engine import FakeEngine

from specgen.cli import cli
from specgen.commands import run as run_command
from specgen.sampling_params import SamplingParams

Run = Callable[..., Result]
GOOD = b'{"prompt": "good", "custom_id": "g"}'
#: Each line and the code of the error row it becomes; None for a row that runs.
LINES: list[tuple[bytes, str | None]] = [
    (b'{"prompt": "' + b"x" * 100_000_000 + b'"}', "line_too_long"),
    (b'{"prompt": "a", "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "invalid_json"),
    (b'{"prompt": "a", "x": ' + b'{"y":' * 10_000 + b"1" + b"}" * 10_000 + b"}", "invalid_json"),
    (b"[" * 100_000, "invalid_json"),
    (b'{"prompt": "a", "x": ' + b"[" * 150 + b"]" * 150 + b"}", None),
    (b'{"prompt": "a", "x": NaN}', "invalid_json"),
    (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
    (b'{"prompt": "a", "x": -Infinity}', "invalid_json"),
    (b'{"prompt": "a", "x": 1e999}', "invalid_value"),
    (b'{"prompt": "a", "x": ' + b"9" * 5_000 + b"}", "invalid_value"),
    (b'{"prompt": "a", "seed": 36893488147419103232}', "invalid_value"),
    (b'{"prompt": "a", "seed": 9223372036854775807}', None),
    (b'{"prompt": "\xff\xfe"}', "invalid_json"),
    (b'{"prompt": "\xed\xa0\x80"}', "invalid_json"),
    (b'{"prompt": "\\ud800 alone"}', "invalid_value"),
    (b'{"prompt": "a", "x": {"\\udc00": 1}}', "invalid_value"),
    (b'{"prompt": "\\ud83d\\ude00 together"}', None),
    (b'{"prompt": "a\x00b"}', "invalid_json"),
    (b'{"prompt": "a\\u0000b"}', None),
    ('{"prompt": "a\u2028b\u2029c\u0085d", "x": "\u2028"}'.encode(), None),
    (b'{"prompt": "a\x0bb"}', "invalid_json"),
    (b'{"prompt": "a", "prompt": "b"}', "duplicate_key"),
    (b'{"prompt": "a", "x": {"y": 1, "y": 2}}', "duplicate_key"),
    (b'{"prompt": "a", "prom\\u0070t": "b"}', "duplicate_key"),
    (b'{"prompt": "same id", "custom_id": "g"}', None),
    (b'{"prompt": "windows"}\r', None),
    (b'\xef\xbb\xbf{"prompt": "a mark in the midst"}', "invalid_json"),
    (b'{"prompt": true}', "invalid_value"),
    (b'{"prompt": ["a", 1]}', "invalid_value"),
    (b'{"prompt": [1, true]}', "invalid_value"),
    (b'{"prompt": []}', "empty_prompt"),
    (b'{"prompt": ""}', "empty_prompt"),
    (b'{"prompt": "a", "n": 1.0}', "invalid_value"),
    (b'{"prompt": "a", "n": true}', "invalid_value"),
    (b"null", "not_an_object"),
    (b'"text"', "not_an_object"),
    (b'"\\ud800"', "not_an_object"),
    (b'{"prompt": "a"', "invalid_json"),
    (b'{"prompt": "a"} {"prompt": "b"}', "invalid_json"),
    (b"\x00" * 300, "invalid_json"),
    (b'{"prompt": "a", "index": 99, "error": 1, "status": 2, "input_hash": 3}', None),
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_command, "_load", lambda _: (FakeEngine(), SamplingParams()))
    monkeypatch.setattr(run_command, "_fingerprint", lambda _: {})
    return lambda *args: CliRunner().invoke(cli, ["run", *args, "--quiet"])


def rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_bytes().split(b"\n") if line]


def test_every_line_is_one_row_and_its_neighbours_do_not_notice(run: Run) -> None:
    with open("in.jsonl", "wb") as file:
        file.write(b"\xef\xbb\xbf")
        for line, _ in LINES:
            file.write(GOOD + b"\n\n" + line + b"\n")
        file.write(GOOD)  # no line end
    result = run("in.jsonl", "-o", "out")
    assert result.exit_code == 3, result.stderr
    found = rows("out")
    assert len(found) == 2 * len(LINES) + 1
    for position, (line, code) in enumerate(LINES):
        good, hostile = found[2 * position], found[2 * position + 1]
        assert (good["status"], good["choices"][0]["text"]) == ("ok", "doog")
        shown = line[:60]
        assert hostile["index"] == 2 * position + 1, shown
        assert (hostile["error"] and hostile["error"]["code"]) == code, shown
        if code is not None:
            assert hostile["error"]["line"] == 3 * position + 3, shown
            assert hostile["error"]["message"].startswith(f"in.jsonl:{3 * position + 3}: ")
        content = line.removesuffix(b"\r")
        assert hostile["input_hash"] == hashlib.blake2b(content, digest_size=8).hexdigest()
    assert found[-1]["status"] == "ok"
    last = found[2 * len(LINES) - 1]
    assert last["input"] == {"index": 99, "error": 1, "status": 2, "input_hash": 3}


def test_the_same_after_a_resume(run: Run) -> None:
    lines = [line for line, _ in LINES[1:]]
    Path("in.jsonl").write_bytes(b"\n".join(lines))
    assert run("in.jsonl", "-o", "out").exit_code == 3
    whole = Path("out").read_bytes()
    kept = whole.split(b"\n")[:20]
    Path("out.partial").write_bytes(b"\n".join(kept) + b"\n" + b'{"index":21,"inp')
    Path("out.meta.json").rename("out.partial.meta.json")
    Path("out").unlink()
    assert run("in.jsonl", "-o", "out").exit_code == 3
    assert Path("out").read_bytes() == whole


@pytest.mark.parametrize(
    "content", [b"\x1f\x8b", b"\x1f\x8b\x08\x00garbage", b"\x28\xb5\x2f\xfd\x00", b"\xff\xfea\x00"]
)
def test_files_of_other_kinds_end_quietly(run: Run, content: bytes) -> None:
    Path("in.jsonl").write_bytes(content)
    result = run("in.jsonl", "-o", "out")
    assert result.exit_code in (3, 4)
    assert "Traceback" not in result.stderr

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.cells import cell_len

import specgen
from specgen.cli import cli
from specgen.output_stats import Distribution

Show = Callable[..., Result]
SPEC = {
    "num_spec_steps": 5,
    "num_draft_tokens": 15,
    "num_accepted_draft_tokens": 8,
    "num_speculative_tokens": 3,
    "num_plain_tokens": 1,
    "acceptance_histogram": [1, 1, 2, 1],
    "drafted_per_position": [5, 5, 5],
    "accepted_per_position": [4, 3, 1],
    "draft_acceptance_rate": 8 / 15,
    "mean_acceptance_length": 2.6,
}
NOTHING = {
    "num_spec_steps": 0,
    "num_draft_tokens": 0,
    "num_accepted_draft_tokens": 0,
    "num_speculative_tokens": 0,
    "num_plain_tokens": 3,
    "acceptance_histogram": [0],
    "drafted_per_position": [],
    "accepted_per_position": [],
    "draft_acceptance_rate": None,
    "mean_acceptance_length": None,
}


def row(index: int, spec: dict[str, object] = SPEC, tokens: int = 14) -> dict[str, object]:
    return {
        "index": index,
        "input_hash": "0" * 16,
        "status": "ok",
        "custom_id": f"q{index}",
        "choices": [{"index": 0, "text": "x", "finish_reason": "stop", "stop_reason": None}],
        "usage": {"prompt_tokens": 4, "completion_tokens": tokens, "total_tokens": 4 + tokens},
        "metrics": {"speculative_decoding": spec},
        "error": None,
    }


def failed(index: int) -> dict[str, object]:
    error = {"code": "empty_prompt", "message": "m", "line": 1}
    return {"index": index, "input_hash": "0" * 16, "status": "error", "error": error}


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Show:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    rows = [row(0), row(1, {**SPEC, "acceptance_histogram": [4, 1, 0, 0],
                            "accepted_per_position": [1, 0, 0]}, 7), failed(2),
            row(3, NOTHING, 3)]  # fmt: skip
    Path("out").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return lambda *args: CliRunner().invoke(cli, ["stats", *args])


def test_json(show: Show) -> None:
    result = show("out", "--json", "--lowest", "1")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    errors = {"empty_prompt": 1}
    assert found["rows"] == {"done": 4, "ok": 3, "failed": 1, "truncated": 0, "errors": errors}
    assert found["finish_reasons"] == {"stop": 3}
    assert found["usage"]["completion_tokens"] == 24
    spec = found["speculative_decoding"]
    assert spec["acceptance_histogram"] == [5, 2, 2, 1]
    assert spec["accepted_per_position"] == [5, 3, 1]
    assert spec["mean_acceptance_length"] == 1 + 9 / 10
    assert spec["acceptance_per_position"] == [0.5, 0.3, 0.1]
    assert spec["per_request"]["num_requests"] == 2
    quantiles = spec["per_request"]["quantiles"]["mean_acceptance_length"]
    assert (quantiles["min"], quantiles["median"], quantiles["max"]) == (1.2, 1.2, 2.6)
    bins = {tuple(b["completion_tokens"]): b for b in spec["by_completion_length"]}
    assert bins[8, 15]["mean_acceptance_length"] == 2.6
    assert bins[4, 7]["mean_acceptance_length"] == 1.2
    assert bins[2, 3]["mean_acceptance_length"] is None
    assert [(r["index"], r["line"]) for r in spec["lowest"]] == [(1, 2)]


def test_all_forms_are_read(show: Show) -> None:
    flat = row(0)
    envelope = {
        "index": 1, "input_hash": "0" * 16, "status": "ok", "id": "b", "custom_id": "a",
        "response": {"status_code": 200, "body": {
            "choices": flat["choices"], "usage": flat["usage"], "metrics": flat["metrics"]}},
        "error": None,
    }  # fmt: skip
    Path("other.gz").write_bytes(gzip.compress((json.dumps(envelope) + "\n").encode()))
    found = json.loads(show("out", "other.gz", "--json").stdout)
    assert found["rows"]["done"] == 5
    assert found["speculative_decoding"]["num_spec_steps"] == 15


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_tables(show: Show, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    result = show("out", "--lowest", "2")
    assert result.exit_code == 0
    text = result.stdout
    assert all(cell_len(line) <= width for line in text.splitlines())
    for title in (
        "Acceptance by position", "Accepted drafts a step", "What if a step had fewer drafts",
        "Acceptance length by completion length", "Rows by acceptance",
        "Rows of the lowest acceptance length",
    ):  # fmt: skip
        assert title in text.splitlines()
    # Each label and figure in one line, whole.
    cells = {cell.strip() for line in text.splitlines() for cell in re.split(r"\||\s\s+", line)}
    assert {"50.0 %", "empty_prompt", "mean acceptance length", "median", "8-15", "q1"} <= cells
    assert "\x1b" not in text
    assert "#" in text


@pytest.mark.parametrize("width", [40, 60])
def test_large_figures_are_whole_in_narrow_tables(
    show: Show, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    counts = {
        name: [10**8 * count for count in SPEC[name]]  # type: ignore[attr-defined]
        for name in ("acceptance_histogram", "drafted_per_position", "accepted_per_position")
    }
    Path("many").write_text(json.dumps(row(0, {**SPEC, **counts}, 14 * 10**8)) + "\n")
    text = show("many", "--lowest", "1").stdout
    assert all(cell_len(line) <= width for line in text.splitlines())
    cells = {cell.strip() for line in text.splitlines() for cell in re.split(r"\||\s\s+", line)}
    assert {"1,400,000,000", "1,500,000,000", "80.0 %", "2.60", "20.0 %", "position"} <= cells
    assert ("400,000,000" in cells) == (width == 60)  # how often; the rate says how much


def test_ids_are_shown_as_they_are_and_do_nothing(show: Show) -> None:
    names = ["[bold]x[/]", "[/nothing]", "\x1b[2J\u202e", "a very long name " * 9]
    rows = [{**row(index), "custom_id": name} for index, name in enumerate(names)]
    Path("ids").write_text("".join(json.dumps(r) + "\n" for r in rows))
    result = show("ids", "--lowest", "4")
    assert result.exit_code == 0
    assert "[bold]x[/]" in result.stdout
    assert "[/nothing]" in result.stdout
    assert "\\x1b[2J\\u202e" in result.stdout
    assert "\x1b" not in result.stdout
    assert result.stdout.count("very") == 9


def test_fewer_drafts_are_what_the_same_steps_would_have_yielded(show: Show) -> None:
    spec = json.loads(show("out", "--json").stdout)["speculative_decoding"]
    found = spec["with_fewer_drafts"]
    assert [one["num_speculative_tokens"] for one in found] == [1, 2, 3]
    # 5, 3 and 1 accepted at the positions of 10 steps.
    assert [one["mean_acceptance_length"] for one in found] == [1.5, 1.8, 1.9]
    assert [one["draft_acceptance_rate"] for one in found] == [0.5, 0.4, 0.3]
    assert found[-1]["mean_acceptance_length"] == spec["mean_acceptance_length"]


def test_without_speculation(show: Show) -> None:
    Path("plain").write_text(json.dumps(row(0, NOTHING, 3)) + "\n")
    assert "none" in show("plain").stdout
    Path("empty").write_text("")
    assert show("empty").exit_code == 0


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        '{"prompt": "an input, not an output"}',
        json.dumps(row(0, {**SPEC, "num_plain_tokens": -1})),
        json.dumps(row(0, {**SPEC, "acceptance_histogram": [1]})),
        json.dumps({**row(0), "usage": None}),
    ],
)  # fmt: skip
def test_what_is_no_output(show: Show, line: str) -> None:
    Path("bad").write_text(json.dumps(row(0)) + "\n" + line + "\n")
    result = show("bad")
    assert result.exit_code == 4
    assert "error: bad:2: is no line of an output" in result.stderr
    assert "Traceback" not in result.stderr
    # Said of the record, not of the code that read it.
    assert not re.search(r"\w+Error\b|object is not|NoneType", result.stderr)


def test_quantiles_are_values_that_occurred() -> None:
    values = Distribution()
    assert set(values.quantiles().values()) == {None}
    for value in range(1, 101):
        values.add(value / 10)
    values.add(None)
    assert values.quantiles() == {
        "min": 0.1, "p10": 1.0, "p25": 2.5, "median": 5.0, "p75": 7.5, "p90": 9.0, "max": 10.0,
    }  # fmt: skip


def test_a_closed_pipe_is_quiet(show: Show) -> None:
    root = str(Path(specgen.__file__).parents[1])
    command = f"{sys.executable} -m specgen stats out | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, env={**os.environ, "PYTHONPATH": root}
    )
    assert done.returncode in (0, 141)
    assert done.stderr == b""


def test_a_torn_line_ends_a_partial_output(tmp_path: Path) -> None:
    whole = "".join(json.dumps(row(index)) + "\n" for index in range(3))
    partial, other = tmp_path / "out.jsonl.partial", tmp_path / "out.jsonl"
    other.write_text(whole)
    for paths in ([partial], [partial, other], [other, partial]):
        partial.write_text(whole + whole[:90])
        result = CliRunner().invoke(cli, ["stats", "--json", *map(str, paths)])
        assert result.exit_code == 0
        assert json.loads(result.stdout)["rows"]["done"] == 3 * len(paths)
    partial.write_text(whole[:90] + "\n" + whole)
    other.write_text(whole + whole[:90])
    for path, line in ((partial, 1), (other, 4)):
        result = CliRunner().invoke(cli, ["stats", str(path)])
        assert result.exit_code == 4
        assert f"{path}:{line}: is no line of an output" in result.stderr


@pytest.mark.parametrize("kind", ["object", "text"])
def test_data_keys_are_never_taken_for_accounts(show: Show, kind: str) -> None:
    """A data set may have a column of any name, such as prompt and response."""
    names = ["response", "body", "id", "request_id", "custom_id", "rows", "input", "model"]
    value: object = {"body": {"usage": 1}} if kind == "object" else "text"
    Path("plain").write_text("".join(json.dumps(row(i)) + "\n" for i in range(len(names))))
    Path("extra").write_text(
        "".join(json.dumps({**row(i), name: value}) + "\n" for i, name in enumerate(names))
    )
    plain, extra = show("plain", "--json"), show("extra", "--json")
    assert extra.exit_code == 0, extra.stderr
    assert json.loads(extra.stdout) == json.loads(plain.stdout)


@pytest.mark.parametrize("flags", [["--lowest", "1"], ["--lowest", "1", "--json"]])
def test_an_encoding_that_lacks_letters_will_do(show: Show, flags: list[str]) -> None:
    name = "\u2603\U0001f600.jsonl"
    Path(name).write_text(json.dumps({**row(0), "custom_id": "\u2603\U0001f600"}) + "\n")
    root = str(Path(specgen.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "specgen", "stats", name, *flags],
        env={**os.environ, "PYTHONPATH": root, "PYTHONIOENCODING": "ascii", "COLUMNS": "100"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if "--json" in flags:
        lowest = json.loads(done.stdout)["speculative_decoding"]["lowest"]
        assert lowest[0]["custom_id"] == "\u2603\U0001f600"
    else:
        assert b"u2603" in done.stdout


def test_a_row_that_was_run_again_counts_once_in_a_partial_output(tmp_path: Path) -> None:
    """As long as the run lasts, the line of its failure stands before."""
    again, other = tmp_path / "again.partial", tmp_path / "other.partial"
    lines = [failed(0), failed(1), row(2), failed(0), row(1)]
    again.write_text("".join(json.dumps(line) + "\n" for line in lines))
    other.write_text(json.dumps(failed(1)) + "\n")  # a shard's, say
    result = CliRunner().invoke(cli, ["stats", str(again), str(other), "--json"])
    assert result.exit_code == 0, result.stderr
    counted = json.loads(result.stdout)["rows"]
    assert (counted["done"], counted["ok"], counted["failed"]) == (4, 2, 2)
    assert counted["errors"] == {"empty_prompt": 2}

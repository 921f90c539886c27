"""The synthetic rule through the engine and the command line: rates, accounts, marks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from e2e.engines import EngineShop
from e2e.harness import make_row, run_all

from specgen.cli import cli
from specgen.stats import RunStats


@pytest.mark.parametrize("draft_sample", ["greedy", "gumbel"])
def test_the_engine_accepts_at_the_given_rates(engine_of: EngineShop, draft_sample: str) -> None:
    rates = (0.9, 0.45, 0.3)
    engine = engine_of(
        "text",
        "eagle3",
        draft_sample=draft_sample,
        rejection_sample="synthetic",
        synthetic_acceptance=rates,
        num_speculative_tokens=3,
        max_num_seqs=32,
    )
    rows = [make_row(i, "abc", max_tokens=60, ignore_eos=True) for i in range(32)]
    stats = RunStats()
    for output in run_all(engine, rows, preempt_seed=3):  # which checks the accounts
        assert len(output.choices[0].token_ids) == 60
        stats.add(output)
    spec = stats.speculation
    for position, rate in enumerate(rates):
        share = spec.accepted_per_position[position] / spec.num_spec_steps
        assert share == pytest.approx(rate, abs=4.5 * (rate / spec.num_spec_steps) ** 0.5)
    assert spec.faithful is False
    assert engine.describe()["faithful"] is False
    assert stats.summary(1.0)["speculative_decoding"]["faithful"] is False


def test_output_is_marked_wherever_it_appears(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "Once", "max_tokens": 8, "n": 2}\n')
    command = ["run", str(source), "-o", str(out), "--summary", str(tmp_path / "sum.json")]
    synthetic = ["--rejection-sample", "synthetic", "--synthetic-acceptance", "4"]
    result = CliRunner().invoke(cli, [*command, *synthetic])
    assert result.exit_code == 0, result.stderr
    assert "does not follow the target" in result.stderr
    assert "faithful" in result.stderr
    row = json.loads(out.read_text())
    assert row["metrics"]["speculative_decoding"]["faithful"] is False
    assert all(c["metrics"]["speculative_decoding"]["faithful"] is False for c in row["choices"])
    meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert meta["settings"]["faithful"] is False
    assert meta["summary"]["speculative_decoding"]["faithful"] is False
    assert meta["fingerprint"]["synthetic_rates"] == [1.0, 1.0, 1.0]
    summary = json.loads((tmp_path / "sum.json").read_text())
    assert summary["speculative_decoding"]["faithful"] is False

    faithful = CliRunner().invoke(cli, [*command, "--overwrite"])
    assert faithful.exit_code == 0
    assert "faithful" not in out.read_text()
    meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert meta["settings"]["faithful"] is True


def test_a_run_is_not_taken_up_at_another_acceptance(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "Once", "max_tokens": 2}\n')
    command = ["run", str(source), "-o", str(out), "--rejection-sample", "synthetic"]
    first = [*command, "--synthetic-acceptance", "2"]
    assert CliRunner().invoke(cli, first).exit_code == 0
    out.rename(f"{out}.partial")
    Path(f"{out}.meta.json").rename(f"{out}.partial.meta.json")
    other = CliRunner().invoke(cli, [*command, "--synthetic-acceptance", "3"])
    assert other.exit_code == 2
    assert "synthetic_rates" in other.stderr


def test_without_a_tokenizer_prompts_are_ids_and_text_is_empty(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        '{"prompt": [5, 6, 7], "max_tokens": 4}',
        '{"prompt": "text"}',
        '{"prompt": [5], "stop": "a"}',
        '{"prompt": []}',
    ]
    source.write_text("\n".join(lines))
    command = ["run", str(source), "-o", str(out), "--skip-tokenizer-init", "--return-token-ids"]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 3, result.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows[0]["choices"][0]["text"] == ""
    assert len(rows[0]["choices"][0]["token_ids"]) == 4
    assert [row["error"] and row["error"]["code"] for row in rows] == [
        None, "no_tokenizer", "no_tokenizer", "empty_prompt",
    ]  # fmt: skip

"""`specgen run` from the shell's side, on a small random pair."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonlines
import pytest
from click.testing import CliRunner, Result

import specgen
from specgen.cli import cli

ROWS: list[dict[str, Any]] = [
    {"prompt": "Hello there", "custom_id": "a", "max_tokens": 20},
    {"prompt": "b", "temperature": -1, "custom_id": "b"},
    {"prompt": "Two words", "n": 3, "max_tokens": 40, "top_p": 0.9},
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0},
    {"prompt": [1, 5, 6], "max_tokens": 30, "top_k": 5},
    {"prompt": "seeded", "seed": 5, "max_tokens": 30, "temperature": 0.8},
    {"prompt": "seeded", "seed": 5, "max_tokens": 30, "temperature": 0.8},
    {"prompt": "seeded", "max_tokens": 30, "temperature": 0.8},
    {"prompt": "x" * 300},
    {"prompt": [1, 9999]},
    {"prompt": "c", "max_tokens": 12, "speculative": {"num_speculative_tokens": 0}},
    {"prompt": "c", "max_tokens": 60, "stop": ["a", "e", "i", "o", "u"], "ignore_eos": True},
    {"prompt": "c", "max_tokens": 60, "stop_token_ids": list(range(10, 40)), "ignore_eos": True},
    {"prompt": "c", "max_tokens": 9, "speculative": {"num_speculative_tokens": 4}},
]
FAILED = {1: "invalid_value", 8: "prompt_too_long", 9: "token_id_out_of_range", 13: "invalid_value"}

Run = Callable[..., Result]


@pytest.fixture
def pair(checkpoints: dict[str, Path]) -> list[str]:
    return ["--model", str(checkpoints["text"]), "--draft-model", str(checkpoints["text-eagle3"])]


@pytest.fixture
def run(tmp_path: Path, pair: list[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    with jsonlines.open(tmp_path / "in.jsonl", "w") as writer:
        writer.write_all(ROWS)

    def call(*args: str) -> Result:
        return CliRunner().invoke(cli, ["run", "in.jsonl", *pair, "--device", "cpu", *args])

    return call


def read(path: str | Path) -> list[dict[str, Any]]:
    with jsonlines.open(path) as reader:
        return list(reader)


@pytest.mark.parametrize("draft", ["greedy", "gumbel", "none"])
def test_a_mixed_file(run: Run, draft: str) -> None:
    flags = ["--num-speculative-tokens", "3", "--draft-sample", draft]
    if draft == "none":
        flags = ["--num-speculative-tokens", "0"]
    result = run("-o", "out.jsonl", "--return-token-ids", *flags)
    assert result.exit_code == 3, result.stderr
    records = read("out.jsonl")
    assert [r["index"] for r in records] == list(range(len(ROWS)))
    failed = {r["index"]: r["error"]["code"] for r in records if r["status"] == "error"}
    expected = dict(FAILED)
    if draft == "none":
        del expected[13]  # nothing to speculate with, nothing to be above
    assert failed == expected
    assert [r.get("custom_id") for r in records[:3]] == ["a", "b", None]
    for record in records:
        if record["status"] == "ok":
            check(record, k=0 if draft == "none" else 3)
    assert records[5]["choices"] == records[6]["choices"]
    assert records[5]["choices"] != records[7]["choices"]
    assert len({c["text"] for c in records[2]["choices"]}) == 3
    assert records[8]["error"]["message"].startswith("in.jsonl:9: ")
    assert records[10]["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    stopped = records[11]["choices"][0]
    if stopped["finish_reason"] == "stop":
        assert stopped["stop_reason"] in "aeiou"
        assert stopped["stop_reason"] not in stopped["text"]
    by_token = records[12]["choices"][0]
    assert by_token["finish_reason"] == "stop"
    assert by_token["stop_reason"] == by_token["token_ids"][-1]
    meta = json.loads(Path("out.jsonl.meta.json").read_text())
    assert meta["num_rows"] == len(ROWS)
    assert meta["settings"]["draft_logits_bytes"] == 0 or draft == "gumbel"


def check(record: dict[str, Any], k: int) -> None:
    """The identities that tie a row's tokens to its accounts."""
    usage = record["usage"]
    choices = record["choices"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == sum(len(c["token_ids"]) for c in choices)
    asked = ROWS[record["index"]]
    assert len(choices) == asked.get("n", 1)
    own = [c["metrics"] for c in choices] if len(choices) > 1 else [record["metrics"]]
    for choice, metrics in zip(choices, own, strict=True):
        spec = metrics["speculative_decoding"]
        tokens = len(choice["token_ids"])
        assert tokens <= asked["max_tokens"]
        assert choice["finish_reason"] == "stop" or tokens == asked["max_tokens"]
        accepted = spec["num_accepted_draft_tokens"]
        steps = spec["num_spec_steps"]
        assert sum(spec["acceptance_histogram"]) == steps
        assert len(spec["acceptance_histogram"]) == spec["num_speculative_tokens"] + 1
        assert spec["num_speculative_tokens"] <= k
        uncut = spec["num_plain_tokens"] + accepted + steps
        assert uncut - tokens in (0, 1)


def test_the_same_command_gives_the_same_choices(run: Run) -> None:
    for name in ("one", "two"):
        assert run("-o", name, "--return-token-ids").exit_code == 3
    assert run("-o", "few", "--return-token-ids", "--max-num-seqs", "2").exit_code == 3
    first, second, few = (
        [{k: r[k] for k in ("index", "choices", "seed", "error", "metrics")} for r in read(name)]
        for name in ("one", "two", "few")
    )
    assert first == second == few
    assert run("-o", "other", "--seed", "1").exit_code == 3
    other = read("other")
    assert [r["seed"] for r in other[5:7]] == [5, 5]
    assert other[7]["seed"] != first[7]["seed"]


def test_sampling_flags_are_defaults_and_lines_override_them(run: Run) -> None:
    result = run("-o", "out", "--temperature", "0", "--max-tokens", "3", "--limit", "8")
    assert result.exit_code == 3
    records = read("out")
    assert records[0]["usage"]["completion_tokens"] <= 20
    # Greedy by flag now: seeds no longer matter for a line without a temperature of its own.
    texts = {c["text"] for c in records[2]["choices"]}
    assert len(texts) == 1
    assert records[5]["choices"] != records[7]["choices"]


def test_generation_config_stands_behind_flags(
    tmp_path: Path, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoints["text"], "model")
    values = {"do_sample": True, "temperature": 0.25, "top_k": 7, "eos_token_id": 2}
    Path("model/generation_config.json").write_text(json.dumps(values))
    Path("in.jsonl").write_text('{"prompt": "a", "max_tokens": 2}\n')
    args = ["run", "in.jsonl", "--model", "model", "--device", "cpu", "--progress", "json"]

    def sampling(*flags: str) -> dict[str, Any]:
        result = CliRunner().invoke(cli, [*args, *flags])
        assert result.exit_code == 0, result.stderr
        values: dict[str, Any] = json.loads(result.stderr.splitlines()[0])["settings"]["sampling"]
        return values

    assert (sampling()["temperature"], sampling()["top_k"]) == (0.25, 7)
    assert sampling("--temperature", "0.5")["temperature"] == 0.5
    assert sampling("--generation-config", "none")["temperature"] == 1.0


@pytest.mark.parametrize(("flags", "warned"), [((), False), (("0.9",), False), (("0.5",), True)])
def test_a_share_of_a_gpu_means_nothing_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], warned: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"prompt": "a", "max_tokens": 2}\n')
    args = ["run", "in.jsonl", "--device", "cpu", "-o", "out"]
    result = CliRunner().invoke(
        cli, [*args, *(("--gpu-memory-utilization", *flags) if flags else ())]
    )
    assert result.exit_code == 0
    assert ("--gpu-memory-utilization means nothing on a CPU" in result.stderr) is warned


@pytest.mark.parametrize("form", ["flat", "openai"])
def test_overlong_prompts_are_cut_at_the_left_on_request_and_their_rows_say_so(
    run: Run, form: str
) -> None:
    flags = ["--overlong", "truncate-left", "--format", form, "--summary", "summary.json"]
    result = run("-o", "out", *flags)
    assert result.exit_code == 3
    bodies = {
        line["index"]: line if form == "flat" else line["response"]["body"]
        for line in read("out")
        if line["status"] == "ok"
    }
    assert bodies[8]["usage"]["total_tokens"] <= 256
    assert [i for i, body in bodies.items() if body["metrics"].get("prompt_truncated")] == [8]
    assert "1 prompt cut at the left, down to " in result.stderr
    flags = ["--overlong", "truncate-left", "--max-model-len", "140"]
    validated = CliRunner().invoke(cli, ["validate", "in.jsonl", *flags])
    assert "truncated prompts: 1" in validated.stderr
    counted = json.loads(CliRunner().invoke(cli, ["stats", "out", "--json"]).stdout)["rows"]
    summary = json.loads(Path("summary.json").read_text())["rows"]
    assert summary["truncated"] == counted["truncated"] == 1


PROBLEMS = [
    (["--model", "no/such/model"], "no/such/model: no such model directory"),
    (["--model", ".", "--no-draft"], "config.json"),
    (["--tokenizer", "no/such/tokenizer"], "no/such/tokenizer"),
    (["--draft-model", "no/such/draft"], "no/such/draft"),
    (["--chat-template", "no.jinja"], "--chat-template no.jinja"),
    (["--chat-template", "{{ x"], "--chat-template: not a Jinja template: "),
]


@pytest.mark.parametrize(("flags", "message"), PROBLEMS)
def test_models_that_cannot_be_used(
    run: Run, flags: list[str], message: str, pair: list[str]
) -> None:
    if "--no-draft" in flags:
        del pair[2:]
    result = run(*flags, "-o", "out")
    assert result.exit_code == 5, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert os.listdir() == ["in.jsonl"]


def test_stop_token_ids_beyond_the_vocabulary(run: Run) -> None:
    result = run("--stop-token-ids", "1,99999", "-o", "out")
    assert result.exit_code == 2, result.stderr
    assert "--stop-token-ids: 99999: the model has ids 0 to " in result.stderr
    assert os.listdir() == ["in.jsonl"]


def test_a_gpu_that_is_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("--device", "cuda", "-o", "out")
    assert result.exit_code == 5
    assert "error: --device cuda: torch sees no CUDA device here\nhint: " in result.stderr
    assert os.listdir() == ["in.jsonl"]


@pytest.fixture
def command(tmp_path: Path, pair: list[str]) -> list[str]:
    with jsonlines.open(tmp_path / "many.jsonl", "w") as writer:
        for _ in range(2000):
            writer.write({"prompt": "abc", "max_tokens": 40})
    python = [sys.executable, "-m", "specgen", "run", "many.jsonl"]
    return [*python, *pair, "--device", "cpu", "--max-num-seqs", "4"]


def start(command: list[str], cwd: Path, **options: Any) -> subprocess.Popen[bytes]:
    root = str(Path(specgen.__file__).parents[1])  # for a checkout that is not installed
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    return subprocess.Popen(command, cwd=cwd, env=environment, **options)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_signals_keep_what_was_finished(
    command: list[str], tmp_path: Path, signum: int, code: int
) -> None:
    process = start([*command, "-o", "out"], tmp_path, stderr=subprocess.PIPE)
    partial = tmp_path / "out.partial"
    deadline = time.monotonic() + 90
    while not (partial.exists() and partial.stat().st_size > 2000):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signum)
    sent = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - sent < 10
    assert process.returncode == code
    assert b"Traceback" not in stderr
    records = read(partial)  # every line is whole
    assert len(records) == len({r["index"] for r in records}) > 1
    assert not (tmp_path / "out").exists()
    if code > 0:
        assert f"{len(records):,} finished rows are kept in".encode() in stderr


def test_a_closed_pipe_is_quiet(command: list[str], tmp_path: Path) -> None:
    line = " ".join(map(shlex.quote, [*command, "--quiet"])) + " | head -n 2; exit ${PIPESTATUS[0]}"
    done = start(["bash", "-c", line], tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    stdout, stderr = done.communicate(timeout=120)
    assert (done.returncode, stderr) == (141, b"")
    assert len([json.loads(row) for row in stdout.splitlines()]) == 2

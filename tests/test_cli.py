"""The command line against a fake engine; the real one is in e2e."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_engine import FakeEngine

import specgen
from specgen.cli import cli
from specgen.commands import run as run_command
from specgen.commands import run_options
from specgen.commands.run import run
from specgen.commands.run_options import sampling_of
from specgen.config import DRAFT_OVERRIDES, EngineConfig
from specgen.errors import EnvironmentProblem
from specgen.interrupts import StopRun
from specgen.request_io import source
from specgen.request_io.file_writer import FileWriter
from specgen.request_io.reader import ReadOptions
from specgen.sampling_params import SamplingParams

Invoke = Callable[..., Result]
LINES = '{"prompt": "abc"}\n{"prompt": "de", "temperature": -1}\n\n{"prompt": "f", "n": 2}\n'


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> list[Any]:
    """Replaces the engine; collects the options it would have been loaded with."""
    seen: list[Any] = []

    def load(given: Any) -> tuple[FakeEngine, SamplingParams]:
        seen.append(given)
        return engine, sampling_of(given.sampling, {"top_k": 5})

    monkeypatch.setattr(run_command, "_load", load)
    monkeypatch.setattr(run_command, "_fingerprint", lambda given: {"seed": given.config.seed})
    return seen


@pytest.fixture
def invoke(options: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(LINES)

    def call(*args: str, **extra: Any) -> Result:
        return CliRunner().invoke(cli, list(args), **extra)

    return call


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_rows_go_to_stdout_and_talk_to_stderr(invoke: Invoke) -> None:
    result = invoke("run", "in.jsonl")
    assert result.exit_code == 3
    records = rows(result.stdout)
    assert sorted(r["index"] for r in records) == [0, 1, 2]
    assert "Summary" in result.stderr
    assert "model_dir" in result.stderr
    assert 'warning: in.jsonl:2: "temperature" must be >= 0, got -1\n' in result.stderr


def test_all_rows_ok_is_0(invoke: Invoke) -> None:
    result = invoke("run", "-", "--quiet", input='{"prompt": "abc"}\n')
    assert (result.exit_code, result.stderr) == (0, "")
    assert rows(result.stdout)[0]["choices"][0]["text"] == "cba"


def test_an_error_row_names_stdin(invoke: Invoke) -> None:
    result = invoke("run", "-", "--quiet", input='\n{"prompt": ""}\n')
    assert result.exit_code == 3
    assert result.stderr == "error: 1 row failed; the output has the reasons\n"
    assert rows(result.stdout)[0]["error"] == {
        "code": "empty_prompt",
        "message": '<stdin>:2: "prompt" is empty',
        "line": 2,
    }


def test_output_file(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("run", "in.jsonl", "in.jsonl", "-o", "out.jsonl", "--summary", "sum.json")
    assert result.exit_code == 3
    assert result.stdout == ""
    records = rows((tmp_path / "out.jsonl").read_text())
    assert [r["index"] for r in records] == [0, 1, 2, 3, 4, 5]
    assert sorted(os.listdir(tmp_path)) == [
        "in.jsonl", "out.jsonl", "out.jsonl.meta.json", "sum.json",
    ]  # fmt: skip
    summary = json.loads((tmp_path / "sum.json").read_text())
    assert summary["complete"] is True
    assert summary["rows"] == {
        "done": 6, "ok": 4, "failed": 2, "truncated": 0, "kept": 0, "errors": {"invalid_value": 2},
    }  # fmt: skip
    assert summary["speculative_decoding"]["acceptance_histogram"] == [0, 0, 6, 0]
    meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert meta["versions"]["specgen"] == specgen.__version__
    assert meta["settings"]["model_dir"] == "fake"
    assert meta["settings"]["sampling"]["top_k"] == 5
    assert meta["num_rows"] == 6
    assert len(meta["input_hash"]) == 32

    again = invoke("run", "in.jsonl", "-o", "out.jsonl")
    assert again.exit_code == 2
    assert again.stderr == (
        "error: out.jsonl: exists\n"
        "hint: choose another -o, or give --resume to keep it, --retry-errors or --overwrite\n"
    )
    assert invoke("run", "in.jsonl", "-o", "out.jsonl", "--overwrite").exit_code == 3
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3


def test_flags_reach_their_configurations(invoke: Invoke, options: list[Any]) -> None:
    result = invoke(
        "run", "-", "--model", "m", "--tokenizer", "t", "--revision", "r", "--dtype", "float16",
        "--max-model-len", "100", "--max-num-seqs", "7", "--max-num-batched-tokens", "64",
        "--gpu-memory-utilization", "0.5", "--device", "cpu", "--load-format", "dummy",
        "--trust-remote-code", "--generation-config", "none", "--chat-template", "x.jinja",
        "--draft-model", "d", "--num-speculative-tokens", "5", "--draft-sample", "probabilistic",
        "--rejection-sample", "standard", "--seed", "9", "--temperature", "0.5", "--top-p", "0.9",
        "--top-k", "40", "--max-tokens", "12", "--n", "2", "--stop", "a", "--stop", "b",
        "--stop-token-ids", "1,2", "--stop-token-ids", "3", "--ignore-eos", "--return-token-ids",
        "--prompt-field", "q", "--id-field", "id", "--system-prompt", "S",
        "--apply-chat-template", "always", "--overlong", "truncate-left", "--limit", "4",
        input="",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    (given,) = options
    assert given.config == EngineConfig(
        model="m", tokenizer="t", revision="r", dtype="float16", max_model_len=100,
        max_num_seqs=7, max_num_batched_tokens=64, gpu_memory_utilization=0.5, device="cpu",
        load_format="dummy", trust_remote_code=True, generation_config="none",
        chat_template="x.jinja", draft_model="d", num_speculative_tokens=5,
        draft_sample="gumbel", rejection_sample="standard", seed=9, overlong="truncate-left",
    )  # fmt: skip
    sampling = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=40, max_tokens=12, n=2, stop=("a", "b"),
        stop_token_ids=(1, 2, 3), ignore_eos=True,
    )  # fmt: skip
    assert given.read == ReadOptions(
        sampling=sampling, prompt_field="q", id_field="id", system_prompt="S",
        apply_chat_template="always", limit=4,
    )  # fmt: skip
    assert given.return_token_ids


def test_every_flag_is_used() -> None:
    """A flag that goes nowhere would be ignored in silence."""
    source = "".join(Path(m.__file__).read_text() for m in (run_command, run_options))
    source += json.dumps(DRAFT_OVERRIDES)
    for param in run.params:
        assert param.name is not None
        uses = source.count(f'"{param.name}"')
        assert uses >= 1 or param.name == "inputs", param.name


def test_defaults_are_left_to_the_engine_and_the_model(
    invoke: Invoke, options: list[Any], engine: FakeEngine
) -> None:
    invoke("run", "in.jsonl")
    assert options[0].config == EngineConfig()
    assert options[0].sampling == {}
    assert engine.seen[0].sampling == SamplingParams(top_k=5)
    invoke("run", "in.jsonl", "--top-k", "0")
    assert engine.seen[-1].sampling == SamplingParams(n=2)


def test_return_token_ids(invoke: Invoke) -> None:
    result = invoke("run", "in.jsonl", "--return-token-ids", "--limit", "1")
    assert rows(result.stdout)[0]["choices"][0]["token_ids"] == [7, 8, 9, 2]
    result = invoke("run", "in.jsonl", "--limit", "1")
    assert "token_ids" not in rows(result.stdout)[0]["choices"][0]


USAGE = [
    (["run"], 2, "Missing argument 'INPUT...'"),
    (["run", "in.jsonl", "--nonsense"], 2, "No such option"),
    (["run", "in.jsonl", "--min-p", "0.1"], 2, "No such option"),
    (["run", "in.jsonl", "--temperature", "-1"], 2, "error: --temperature must be >= 0, got -1"),
    (["run", "in.jsonl", "--temperature", "nan"], 2, "--temperature must be a finite number"),
    (["run", "in.jsonl", "--top-p", "0"], 2, "--top-p must be in (0, 1], got 0"),
    (["run", "in.jsonl", "--n", "0"], 2, "--n must be >= 1"),
    (["run", "in.jsonl", "--stop", ""], 2, "--stop must not hold an empty string"),
    (["run", "in.jsonl", "--stop-token-ids", "a"], 2, "must be token ids"),
    (["run", "in.jsonl", "--num-speculative-tokens", "-1"], 2, "--num-speculative-tokens"),
    (["run", "in.jsonl", "--gpu-memory-utilization", "2"], 2, "--gpu-memory-utilization"),
    (["run", "in.jsonl", "--draft-sample", "x"], 2, "--draft-sample"),
    (["run", "in.jsonl", "--rejection-sample", "block"], 2, "--rejection-sample"),
    (["run", "in.jsonl", "--limit", "-1"], 2, "--limit"),
    (
        ["run", "in.jsonl", "--no-draft", "--num-speculative-tokens", "2"],
        2,
        "--num-speculative-tokens needs a draft: --no-draft is given",
    ),
    (
        ["run", "in.jsonl", "--model", "m", "--draft-sample", "gumbel"],
        2,
        "--draft-sample needs a draft: --model without --draft-model has no draft",
    ),
    (["run", "-", "-"], 2, "only once"),
    (["run", "in.jsonl", "-o", "in.jsonl", "--overwrite"], 2, "is an input of this run"),
    (["run", "in.jsonl", "--summary", "in.jsonl"], 2, "is an input or the output"),
    (["run", "in.jsonl", "--summary", "-"], 2, "--summary -: must be a file"),
    *(
        (["run", "in.jsonl", "-o", "out", "--summary", f"out{suffix}"], 2, "is an input or the out")
        for suffix in ("", ".partial", ".partial.meta.json", ".meta.json", ".sorted")
    ),
    *(
        (["run", "in.jsonl", flag, "a\udcff"], 2, f"{flag}: a\ufffd is not UTF-8")
        for flag in ("--stop", "--system-prompt", "--prompt-field", "--id-field")
    ),
    (["run", "in.jsonl", "--chat-template", "{{a}}\udcff"], 2, "--chat-template: {{a}}\ufffd is"),
    (["run", "in.jsonl", "-o", ""], 6, "is a directory"),
    (["run", "in.jsonl", "-o", "new/"], 6, "is a directory"),
    (
        ["run", "in.jsonl", "--system-prompt", "S", "--apply-chat-template", "never"],
        2,
        "--system-prompt needs a chat template",
    ),
    (["run", "missing.jsonl"], 4, "error: missing.jsonl: cannot be read: No such file"),
    (["run", "."], 4, "is a directory"),
    (["run", "in.jsonl", "-o", "no/such/dir/out"], 6, "cannot be created: No such file"),
    (["run", "in.jsonl", "-o", "."], 6, "is a directory"),
    (["run", "in.jsonl", "-o", "/dev/full"], 6, "/dev/full: cannot be written: No space left"),
    (["run", "in.jsonl", "--summary", "no/such/dir/sum"], 6, "cannot be written: No such file"),
    (["nonsense"], 2, "No such command"),
]


@pytest.mark.parametrize(("args", "code", "message"), USAGE)
def test_what_is_wrong_is_said(invoke: Invoke, args: list[str], code: int, message: str) -> None:
    result = invoke(*args)
    assert message in result.stderr
    assert result.exit_code == code
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert sorted(os.listdir()) == ["in.jsonl"]  # nothing is left behind


def test_problems_of_model_and_machine(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(_: Any) -> Any:
        raise EnvironmentProblem("--device cuda: no GPU", "run `specgen doctor`")

    monkeypatch.setattr(run_command, "_load", fail)
    result = invoke("run", "in.jsonl", "-o", "out.jsonl")
    assert result.exit_code == 5
    assert result.stderr.endswith("error: --device cuda: no GPU\nhint: run `specgen doctor`\n")
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl"]


def test_out_of_gpu_memory_is_no_internal_error(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    def fail(_: Any) -> Any:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr(run_command, "_load", fail)
    result = invoke("run", "in.jsonl")
    assert result.exit_code == 5
    assert "out of GPU memory: CUDA out of memory. Tried to allocate\nhint: " in result.stderr


def test_an_internal_error_keeps_what_was_finished(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n' * 5 + '{"prompt": "crash"}\n')
    result = invoke("run", "in.jsonl", "-o", "out.jsonl")
    assert result.exit_code == 1
    assert "RuntimeError: the engine broke" in result.stderr
    assert "4 finished rows are kept in" in result.stderr
    assert len(rows((tmp_path / "out.jsonl.partial").read_text())) == 4
    assert not (tmp_path / "out.jsonl").exists()
    assert "to go on: " in result.stderr


@pytest.mark.parametrize("form", ["flat", "openai"])
def test_names_need_not_be_text(invoke: Invoke, tmp_path: Path, form: str) -> None:
    """Names of files hold any bytes; rows and metadata are UTF-8 all the same."""
    name = os.fsdecode(b"in\xff.jsonl")
    (tmp_path / name).write_text(LINES)
    out = os.fsdecode(b"out\xfe.jsonl")
    args = ["run", name, "-o", out, "--format", form]
    assert invoke(*args, "--max-errors", "0").exit_code == 4
    result = invoke(*args, "--model", os.fsdecode(b"m\xfd"))
    assert result.exit_code == 3, result.stderr
    failed = rows((tmp_path / out).read_text(encoding="utf-8"))[1]
    assert failed["error"]["message"].startswith("in\ufffd.jsonl:2: ")
    meta = json.loads((tmp_path / f"{out}.meta.json").read_text(encoding="utf-8"))
    assert meta["inputs"] == ["in\ufffd.jsonl"]
    assert invoke(*args, "--resume").exit_code == 0
    assert invoke(*args, "--retry-errors").exit_code == 3
    assert invoke("stats", out).exit_code == 0


@pytest.mark.parametrize("counted", [True, False])
def test_damaged_input_ends_the_run_with_its_place(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    noise = random.Random(0)
    data = "".join(f'{{"prompt": "{noise.getrandbits(300)}"}}\n' for _ in range(4_000))
    (tmp_path / "in.gz").write_bytes(gzip.compress(data.encode())[:-1000])
    if not counted:
        monkeypatch.setattr(source, "_COUNT_AT_MOST_BYTES", 0)
    result = invoke("run", "in.gz", "-o", "out.jsonl")
    assert result.exit_code == 4
    assert "error: in.gz:" in result.stderr
    assert "cannot be read further" in result.stderr
    # Found before anything ran, if the file is small enough to be counted first.
    assert (tmp_path / "out.jsonl.partial").exists() == (not counted)


@pytest.mark.parametrize(("signum", "code"), [(2, 130), (15, 143)])
def test_stopped_runs(
    invoke: Invoke, engine: FakeEngine, tmp_path: Path, signum: int, code: int
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n' * 20)
    finish, calls = engine._finish, []

    def signalled(row: Any) -> Any:
        calls.append(row)
        if len(calls) == 11:
            os.kill(os.getpid(), signum)
        return finish(row)

    engine._finish = signalled  # type: ignore[method-assign]
    result = invoke("run", "in.jsonl", "-o", "out.jsonl", "--summary", "s.json")
    assert result.exit_code == code
    assert "10 finished rows are kept in" in result.stderr
    assert "Summary" in result.stderr
    assert len(rows((tmp_path / "out.jsonl.partial").read_text())) == 10
    summary = json.loads((tmp_path / "s.json").read_text())
    assert (summary["complete"], summary["rows"]["done"]) == (False, 10)


def test_a_signal_while_the_output_is_completed_does_not_spoil_it(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = FileWriter.finish

    def signalled(self: FileWriter, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        finish(self, *args)

    monkeypatch.setattr(FileWriter, "finish", signalled)
    result = invoke("run", "in.jsonl", "-o", "out.jsonl", "--summary", "s.json")
    assert result.exit_code == 130
    assert "all rows are written" in result.stderr
    assert len(rows((tmp_path / "out.jsonl").read_text())) == 3
    assert not (tmp_path / "out.jsonl.partial").exists()
    assert json.loads((tmp_path / "s.json").read_text())["complete"] is True


def test_interrupted_before_the_first_row(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(_: Any) -> Any:
        raise StopRun(2)

    monkeypatch.setattr(run_command, "_load", interrupted)
    result = invoke("run", "in.jsonl", "-o", "out.jsonl")
    assert result.exit_code == 130
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_an_input_without_rows(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("run", "-", "-o", "out.jsonl", input="\n\n")
    assert result.exit_code == 0
    assert "the input holds no rows" in result.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_json_progress(invoke: Invoke) -> None:
    result = invoke("run", "in.jsonl", "--progress", "json")
    events = rows(result.stderr)
    assert [e["event"] for e in events] == ["start", "warning", "summary"]
    assert events[0]["total"] == 3
    assert rows(result.stderr)[0]["settings"]["sampling"]["max_tokens"] == "rest of the context"


@pytest.mark.parametrize(
    ("args", "exit_code", "message"),
    [
        (("missing.jsonl",), 4, "missing.jsonl"),
        (("in.jsonl", "-o", "nowhere/out.jsonl"), 6, "nowhere"),
        (("in.jsonl", "--summary", "in.jsonl"), 2, "is an input or the output"),
    ],
)
def test_programs_read_what_ended_a_run_as_an_event(
    invoke: Invoke, args: tuple[str, ...], exit_code: int, message: str
) -> None:
    result = invoke("run", *args, "--progress", "json")
    last = rows(result.stderr)[-1]
    assert (result.exit_code, last["event"], last["exit_code"]) == (exit_code, "error", exit_code)
    assert message in last["message"]
    in_words = invoke("run", *args)
    assert f"error: {last['message']}" in in_words.stderr
    assert (last["hint"] is None) == ("hint: " not in in_words.stderr)


def test_the_total_respects_the_limit_and_is_unknown_for_stdin(invoke: Invoke) -> None:
    limited = invoke("run", "in.jsonl", "--limit", "2", "--progress", "json")
    assert rows(limited.stderr)[0]["total"] == 2
    stdin = invoke("run", "-", "--progress", "json", input=LINES)
    assert rows(stdin.stderr)[0]["total"] is None


def test_version() -> None:
    result = CliRunner().invoke(cli, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"specgen, version {specgen.__version__}\n")


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(specgen.__file__).parents[1])}


def python(code: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        timeout=60,
        check=False,
        env=ENVIRONMENT,
        **options,
    )


def test_help_imports_no_heavy_library() -> None:
    done = python(
        "import sys\n"
        "from specgen.cli import cli\n"
        "try: cli(['run', '--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "heavy = {'torch', 'triton', 'transformers', 'numpy', 'rich', 'zstandard'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)\n"
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"--num-speculative-tokens" in done.stdout


def test_help_is_quick() -> None:
    # Processor time: the clock also counts whatever else the machine is doing.
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "specgen", "--help"]
        done = subprocess.run(command, capture_output=True, env=ENVIRONMENT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0
    assert min(times) < 0.5


@pytest.mark.parametrize(
    ("redirect", "code"),
    [("| true; exit ${PIPESTATUS[0]}", 141), (">/dev/full", 6), (">&-", 0)],
)
def test_help_without_a_reader(redirect: str, code: int) -> None:
    command = f"sleep 0.2; {sys.executable} -m specgen run --help {redirect}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, env=ENVIRONMENT)
    assert done.returncode == code
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr


def test_help_lists_every_exit_code() -> None:
    from specgen.errors import ExitCode

    listed = CliRunner().invoke(cli, ["run", "--help"]).output.partition("Exit codes:")[2]
    numbers = set(re.findall(r"[0-9]+", listed.partition("Options:")[0]))
    assert {str(int(code)) for code in ExitCode} | {"129"} == numbers

"""The command line on a real GPU."""

from __future__ import annotations

import json
from pathlib import Path

import jsonlines
import pytest
from click.testing import CliRunner
from models.tiny import make_eagle3, make_target

from specgen.cli import cli
from specgen.config import EngineConfig
from specgen.doctor import examine

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("pair")
    target = make_target(root / "target", with_tokenizer=True, bigram=True)
    return str(target), str(make_eagle3(root / "draft", target))


def test_doctor_finds_the_gpu_and_runs_a_kernel(pair: tuple[str, str]) -> None:
    found = {(f.section, f.name): f for f in examine(EngineConfig(*pair))}
    assert found["kernels", "triton"].value == "compiles and runs"
    assert found["kernels", "backend"].value == "triton"
    assert "GiB free" in found["machine", "GPU 0"].value
    assert found["machine", "driver"].value.startswith("for CUDA ")
    assert not [f for f in found.values() if f.status == "problem"]


@pytest.mark.parametrize("draft_sample", ["greedy", "gumbel"])
def test_run_takes_the_gpu_by_itself(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft_sample: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with jsonlines.open("in.jsonl", "w") as writer:
        writer.write_all({"prompt": f"row {i}", "max_tokens": 8 + i} for i in range(40))
    args = ["run", "in.jsonl", "-o", "out", "--model", pair[0], "--draft-model", pair[1]]
    result = CliRunner().invoke(cli, [*args, "--draft-sample", draft_sample])
    assert result.exit_code == 0, result.stderr
    with jsonlines.open("out") as reader:
        assert [r["index"] for r in reader] == list(range(40))
    meta = json.loads(Path("out.meta.json").read_text())
    assert meta["gpus"]
    assert meta["settings"]["device"] == "cuda"
    assert meta["settings"]["kernel_backend"] == "triton"

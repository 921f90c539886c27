"""A model that the host's memory does not hold is refused before its weights are there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from click.testing import CliRunner

from specgen.cli import cli
from specgen.errors import EnvironmentProblem
from specgen.kernels import select_kernels
from specgen.models import host_memory
from specgen.models.weights import load_target


@pytest.fixture
def small_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_memory", lambda: 1 << 20)


@pytest.mark.usefixtures("small_host")
@pytest.mark.parametrize("command", ["run", "bench"])
def test_weights_beyond_the_memory_are_refused(command: str, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(json.dumps({"prompt": "hi", "max_tokens": 2}) + "\n")
    arguments = {
        "run": [str(prompts), "-o", str(out)],
        "bench": ["--batch-size", "1", "--input-len", "2", "--output-len", "2"],
    }[command]
    result = CliRunner().invoke(cli, [command, "--device", "cpu", *arguments])
    assert result.exit_code == 5, result.stderr
    assert "GiB of weights, and 0.00 GiB of memory are available" in result.stderr
    assert "a machine with more memory" in result.stderr
    assert not out.exists()


@pytest.mark.usefixtures("small_host")
@pytest.mark.parametrize("load_format", ["auto", "dummy", "dummy-uniform"])
def test_targets_that_transformers_runs_are_no_exception(tmp_path: Path, load_format: str) -> None:
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=8192)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    kernels = select_kernels("cpu")
    with pytest.raises(EnvironmentProblem, match="GiB of weights"):
        load_target(tmp_path, device="cpu", kernels=kernels, load_format=load_format)
    assert load_target(tmp_path, device="meta", kernels=kernels, load_format=load_format)


def test_what_is_available_is_read_from_the_system() -> None:
    assert host_memory.available_memory() > 1 << 20

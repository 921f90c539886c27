"""`specgen bench` and the rule `synthetic` on a GPU, graphs on."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from specgen.bench.presets import write_preset
from specgen.cli import cli
from specgen.config import EngineConfig
from specgen.models.dummy import fill_dummy

pytestmark = pytest.mark.gpu


def bench(*args: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(cli, ["bench", "--device", "cuda", *args])
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("draft_sample", ["greedy", "gumbel"])
def test_acceptance_is_as_asked_through_graphs(draft_sample: str) -> None:
    small, large = bench(
        "--batch-size", "3,32", "--input-len", "40", "--output-len", "200",
        "--synthetic-acceptance", "0.8,0.6,0.1", "--draft-sample", draft_sample,
        "--num-speculative-tokens", "3",
    )  # fmt: skip
    assert large["mean_acceptance_length"] == pytest.approx(2.5, abs=0.08)
    assert small["mean_acceptance_length"] == pytest.approx(2.5, abs=0.3)
    for line in (small, large):
        assert line["faithful"] is False
        assert line["cuda_graphs"] is True
        assert line["kernel_backend"] == "triton"
        assert line["gpu"] == torch.cuda.get_device_name()
        assert line["peak_memory_bytes"] > 0
        assert line["output_tokens"] == 200 * line["prompts"]


def test_a_batch_beyond_the_memory_is_refused_before_weights_are_made() -> None:
    before = torch.cuda.memory_allocated()
    result = CliRunner().invoke(
        cli, ["bench", "--model", "llama-3.1-8b", "--input-len", "130000", "--batch-size", "4000"]
    )
    assert result.exit_code == 2
    assert "--batch-size 4000: the cache holds" in result.stderr
    assert "loading" not in result.stderr
    assert torch.cuda.memory_allocated() == before


def test_dummy_weights_are_made_on_the_device_in_place() -> None:
    """No copy on the host or the device: made where they stay, 8B take well under a second."""
    slots = {
        f"w{i}.weight": torch.empty(8192, 8192, dtype=torch.bfloat16, device="cuda")
        for i in range(4)
    }
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for load_format, deviation in (("dummy", 8192**-0.5), ("dummy-uniform", 1e-3 / 3**0.5)):
        fill_dummy(slots, load_format)
        assert torch.cuda.max_memory_allocated() - before < 1 << 20
        for slot in slots.values():
            assert slot.float().std().item() == pytest.approx(deviation, rel=0.05)
        torch.cuda.reset_peak_memory_stats()


def test_a_preset_resolves_to_bfloat16(tmp_path: Any) -> None:
    from specgen.resolve import resolve

    config = resolve(EngineConfig(model=str(write_preset("qwen3-8b", tmp_path)), device="cuda"))
    assert config.dtype == "bfloat16"

"""What is promised of the pair in the package and of the example file, through the real command."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import specgen
from tools.build_pair.evaluate import repeated_share

ROOT = Path(specgen.__file__).parents[1]
EXAMPLES = ROOT / "examples" / "prompts.jsonl"
HELD_OUT = ROOT / "benchmarks" / "data" / "heldout_prompts.jsonl"
MB = 2**20
_FLAGS = ("--device", "cpu", "--quiet")


def run(data: Path, out: Path, *flags: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "specgen", "run", str(data), "-o", str(out), *_FLAGS, *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in out.read_text().splitlines()]


def seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_example_file_in_a_minute_and_twice_the_same(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in EXAMPLES.read_text().splitlines()]
    assert len(lines) >= 32
    assert sum("n" in line for line in lines) == 2
    assert len({len(str(line.get("prompt", line.get("messages")))) for line in lines}) > 10
    assert len({line.get("temperature") for line in lines}) > 1
    assert any("seed" in line for line in lines)
    before = seconds_of_children()  # of a processor: the clock counts other programs too
    first = run(EXAMPLES, tmp_path / "one")
    assert seconds_of_children() - before < 60
    second = run(EXAMPLES, tmp_path / "two")
    assert [row["choices"] for row in first] == [row["choices"] for row in second]
    assert [len(row["choices"]) for row in first] == [line.get("n", 1) for line in lines]
    assert all(choice["text"] for row in first for choice in row["choices"])


def test_drafts_are_accepted_on_held_out_prompts_and_not_because_of_loops(tmp_path: Path) -> None:
    rows = run(HELD_OUT, tmp_path / "out", "--temperature", "0", "--num-speculative-tokens", "3")
    assert len(rows) == 200
    metrics = [row["metrics"]["speculative_decoding"] for row in rows]
    steps = sum(m["num_spec_steps"] for m in metrics)
    accepted = sum(m["num_accepted_draft_tokens"] for m in metrics)
    assert 1 + accepted / steps >= 2.5
    assert repeated_share([row["choices"][0]["text"] for row in rows]) <= 0.25
    meta = json.loads((tmp_path / "out.meta.json").read_text())
    assert meta["settings"]["draft_logits_bytes"] == 0


def test_the_pair_is_small_enough_for_a_package() -> None:
    sizes = [
        path.stat().st_size
        for path in (ROOT / "specgen" / "models" / "default").rglob("*")
        if path.is_file()
    ]
    assert max(sizes) <= 16 * MB
    assert sum(sizes) <= 32 * MB

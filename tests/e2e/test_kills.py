"""SIGKILL at all moments of a real run; `benchmarks/kill_soak.py` does the same for longer."""

from __future__ import annotations

import json
import random
from pathlib import Path

from e2e.killing import KillJob, write_input

NUM_ROWS = 300
MOMENTS = [
    "start-up", "first rows", "rows", "mid-write", "rows", "start-up", "mid-write", "rows",
    "reorder", "reorder",
]  # fmt: skip


def test_ten_kills_leave_no_trace(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", NUM_ROWS)
    pair = ["--model", str(checkpoints["text"]), "--draft-model", str(checkpoints["text-eagle3"])]
    flags = [*pair, "--device", "cpu", "--draft-sample", "gumbel", "--num-speculative-tokens", "3"]
    job = KillJob(flags, tmp_path, random.Random(0))
    uninterrupted = job.finish()
    records = [json.loads(line) for line in uninterrupted.splitlines()]
    assert [r["index"] for r in records] == [r["id"] for r in records] == list(range(NUM_ROWS))
    job.clear()
    for moment in MOMENTS:
        assert job.kill(moment), moment
    assert job.finish() == uninterrupted
    assert sum(job.kills.values()) == 10
    assert not job.partial.exists()

"""What the host does for each row of each decode step: schedule, read the record, account.

The device's part is replaced by a record made beforehand, so only Python is timed. On a GPU this is
time in which the device waits, as long as steps are not overlapped.

    python -m benchmarks.host_step --rows 256
"""

from __future__ import annotations

import cProfile
import json
import pstats
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.record import write_record
from specgen import Engine, EngineConfig
from specgen.bench.jobs import fixed_job, make_rows

_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 7,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
}
_HEAD = {
    **_TINY,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32,
}


def make_engine(directory: Path, num_rows: int, k: int) -> Engine:
    """An engine of a model so small that nothing but the host matters."""
    for name, config in (("target", _TINY), ("head", _HEAD)):
        (directory / name).mkdir(exist_ok=True)
        (directory / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    draft: dict[str, Any] = {"no_draft": True}
    if k:
        draft = {"draft_model": str(directory / "head"), "num_speculative_tokens": k}
    return Engine(
        EngineConfig(
            model=str(directory / "target"),
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cpu",
            max_num_seqs=num_rows,
            max_num_batched_tokens=16 * num_rows,
            max_model_len=4096,
            **draft,
        )
    )


def fake_decode(engine: Engine, num_rows: int, k: int) -> None:
    """Have every decode step commit half of its k + 1 tokens, at least one, at once."""
    committed = max((k + 1) // 2, 1)
    row = [5] * committed + [-1] * (k + 1 - committed) + [committed, k or 0, committed, 0]
    record = torch.tensor([row] * num_rows, dtype=torch.int32)
    engine._runner.decode_step = lambda slot_ids, *rest: record[: slot_ids.numel()]  # type: ignore[method-assign]


def time_steps(engine: Engine, num_rows: int, k: int, num_steps: int) -> list[float]:
    """Seconds of each decode step of a full batch."""
    job = fixed_job(num_rows, 16, 3000)
    for row in make_rows(job, vocab_size=64, temperature=1.0, seed=1):
        engine.add_request(row)
    while engine.num_waiting or engine._scheduler.prefilling:
        engine.step()
    fake_decode(engine, num_rows, k)
    seconds = []
    for _ in range(num_steps):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    return seconds


@click.command()
@click.option("--rows", "num_rows", default=256)
@click.option("--num-steps", default=200)
@click.option("--k", "draft_lengths", default="0,3", help="Draft lengths, comma-separated.")
@click.option("--profile", is_flag=True, help="Print where the time goes; no record.")
@click.option("--output-dir", default=None)
@click.option("--name", default="host_step")
def main(
    num_rows: int,
    num_steps: int,
    draft_lengths: str,
    profile: bool,
    output_dir: str | None,
    name: str,
) -> None:
    """Time the host's part of decode steps."""
    torch.set_num_threads(1)
    results = []
    for k in map(int, draft_lengths.split(",")):
        with tempfile.TemporaryDirectory() as directory:
            engine = make_engine(Path(directory), num_rows, k)
            profiler = cProfile.Profile()
            if profile:
                profiler.enable()
            seconds = time_steps(engine, num_rows, k, num_steps)
            if profile:
                profiler.disable()
                pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
        median = statistics.median(seconds)
        results.append(
            {
                "k": k,
                "rows": num_rows,
                "ms_per_step_median": round(1e3 * median, 3),
                "ms_per_step_best": round(1e3 * min(seconds), 3),
                "us_per_row_best": round(1e6 * min(seconds) / num_rows, 2),
            }
        )
        click.echo(json.dumps(results[-1]))
    if not profile:
        payload = {"experiment": "host time of a decode step, device faked", "results": results}
        click.echo(f"wrote {write_record(name, payload, output_dir)}")


if __name__ == "__main__":
    main()

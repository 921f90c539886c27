"""Where the time of a decode step goes on a GPU: kernels by name, and gaps between them.

The engine runs a full batch of rows that do not end; a stretch of its steps is timed as it is, then
another one is traced. A gap longer than ``GAP_US`` is the device waiting for the host: between the
kernels of a graph there are fewer than two. Kernels of specgen are named with their modules: a step
that called a torch twin would not show them.

    python -m benchmarks.decode_profile --model llama-3.1-8b --rows 1,64,256 --k 0,3
    python -m benchmarks.decode_profile --model built-in --draft-sample gumbel --rows 64 --k 3
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

import specgen.kernels
from benchmarks.record import write_record
from specgen import Engine, EngineConfig
from specgen.bench.jobs import fixed_job, make_rows
from specgen.bench.presets import head_of, write_preset

GAP_US = 5.0
INPUT_LEN = 256
OUTPUT_LEN = 2048  # at most: a model may have fewer positions
BUILT_IN = "built-in"


def make_engine(
    directory: Path, model: str, num_rows: int, k: int, draft_sample: Any = "greedy"
) -> Engine:
    """An engine of a preset and its head with synthetic acceptance, or of the built-in pair."""
    options: dict[str, Any] = {
        "draft_sample": draft_sample,
        "max_num_seqs": num_rows,
        "num_speculative_tokens": k,
    }
    if model == BUILT_IN:
        return Engine(EngineConfig(**options))
    head = head_of(model)
    assert head is not None, f"{model} has no head"
    return Engine(
        EngineConfig(
            model=str(write_preset(model, directory)),
            draft_model=str(write_preset(head, directory)),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=INPUT_LEN + OUTPUT_LEN,
            rejection_sample="synthetic",
            synthetic_acceptance=(k + 2) / 2,
            **options,
        )
    )


def fill(engine: Engine, num_rows: int, k: int) -> None:
    """Admit rows that go on for long, all with ``k`` drafts, and run the first steps."""
    room = engine.config.max_model_len - INPUT_LEN
    job = fixed_job(num_rows, INPUT_LEN, min(OUTPUT_LEN, room))
    rows = make_rows(job, vocab_size=engine.config.vocab_size, temperature=1.0, seed=num_rows)
    for row in rows:
        sampling = replace(row.sampling, num_speculative_tokens=k)
        engine.add_request(replace(row, sampling=sampling))
    while engine.num_waiting or engine._scheduler.prefilling:
        engine.step()
    run_steps(engine, 8)


def run_steps(engine: Engine, num_steps: int) -> float:
    """Run decode steps; milliseconds a step on a synchronised clock."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(num_steps):
        assert not engine.step(), "a row ended while it was timed"
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started) / num_steps


def trace(engine: Engine, num_steps: int, num_names: int) -> dict[str, Any]:
    """Trace decode steps: busy and idle device time of a step, and its kernels by name."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run_steps(engine, num_steps)
    spans: list[tuple[float, float]] = []
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        start, end = event.time_range.start, event.time_range.end
        if end <= start:
            continue
        spans.append((start, end))
        by_name[event.name].append(end - start)
    spans.sort()
    busy = small = large = 0.0
    num_large = 0
    last = spans[0][0]
    for start, end in spans:
        gap = start - last
        if gap > GAP_US:
            large += gap
            num_large += 1
        elif gap > 0:
            small += gap
        busy += max(end - max(start, last), 0.0)
        last = max(last, end)
    ranked = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    modules = specgen_kernels()
    return {
        "traced_step_ms": round((last - spans[0][0]) / num_steps / 1e3, 4),
        "busy_ms": round(busy / num_steps / 1e3, 4),
        "gaps_in_graphs_ms": round(small / num_steps / 1e3, 4),
        "waits_for_host_ms": round(large / num_steps / 1e3, 4),
        "waits_per_step": num_large / num_steps,
        "specgen_kernels": {name: modules[name] for name in sorted(by_name) if name in modules},
        "kernels": [
            {
                "name": name[:100],
                "per_step": len(times) / num_steps,
                "ms_per_step": round(sum(times) / num_steps / 1e3, 4),
            }
            for name, times in ranked[:num_names]
        ],
    }


def specgen_kernels() -> dict[str, str]:
    """Every jitted function of specgen, with its module."""
    from triton.runtime.jit import JITFunction

    names: dict[str, str] = {}
    for module_name in (info.name for info in pkgutil.iter_modules(specgen.kernels.__path__)):
        module = importlib.import_module(f"specgen.kernels.{module_name}")
        for name, value in vars(module).items():
            if isinstance(value, JITFunction):
                names.setdefault(name, module_name)
    return names


@click.command()
@click.option("--model", default="llama-3.1-8b", help=f"A preset, or {BUILT_IN}.")
@click.option("--draft-sample", type=click.Choice(["greedy", "gumbel"]), default="greedy")
@click.option("--rows", "sizes", default="1,64,256", help="Batch sizes, comma-separated.")
@click.option("--k", "draft_lengths", default="0,3", help="Draft lengths, comma-separated.")
@click.option("--num-steps", default=40)
@click.option("--num-names", default=24, help="Kernels to list.")
@click.option("--output-dir", default=None)
@click.option("--name", default="decode_profile")
def main(
    model: str,
    draft_sample: str,
    sizes: str,
    draft_lengths: str,
    num_steps: int,
    num_names: int,
    output_dir: str | None,
    name: str,
) -> None:
    """Profile decode steps of every batch size and draft length."""
    batches = [int(size) for size in sizes.split(",")]
    lengths = [int(k) for k in draft_lengths.split(",")]
    results = []
    with tempfile.TemporaryDirectory() as directory:
        longest = max(*lengths, 1)
        engine = make_engine(Path(directory), model, max(batches), longest, draft_sample)
        for num_rows in batches:
            for k in lengths:
                fill(engine, num_rows, k)
                step_ms = run_steps(engine, num_steps)
                result = {"rows": num_rows, "k": k, "step_ms": round(step_ms, 4)}
                results.append(result | trace(engine, num_steps, num_names))
                click.echo(json.dumps({n: v for n, v in results[-1].items() if n != "kernels"}))
                for kernel in results[-1]["kernels"]:
                    click.echo("  {ms_per_step:8.4f} ms {per_step:6.1f}x  {name}".format(**kernel))
                _drop(engine)
    payload = {
        "experiment": "time of a decode step",
        "model": model,
        "draft_sample": draft_sample,
        "kernel_backend": engine.describe()["kernel_backend"],
        "results": results,
    }
    click.echo(f"wrote {write_record(name, payload, output_dir)}")


def _drop(engine: Engine) -> None:
    """Forget all rows: they were not to end."""
    engine.preempt_all()
    engine._scheduler.waiting.clear()
    engine._groups.clear()


if __name__ == "__main__":
    main()

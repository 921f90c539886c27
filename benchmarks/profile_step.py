"""Which kernels a decode step launches on a GPU, and how long each takes.

Profiles steps of the built-in pair (or any other) with graphs on, sums kernel time by name and says
which Triton kernels of specgen ran: the proof that the step calls them and not their torch twins.

    python -m benchmarks.profile_step --draft-sample gumbel
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from typing import Any

import click
import torch
from torch.profiler import ProfilerActivity, profile

import specgen.kernels
from benchmarks.draft_sample import HELD_OUT, read_rows
from benchmarks.record import write_record
from specgen import Engine, EngineConfig


def triton_kernel_names() -> dict[str, str]:
    """Name of every jitted entry point or device function of specgen, with its module."""
    from triton.runtime.jit import JITFunction

    names: dict[str, str] = {}
    for module_name in (info.name for info in pkgutil.iter_modules(specgen.kernels.__path__)):
        module = importlib.import_module(f"specgen.kernels.{module_name}")
        for name, value in vars(module).items():
            if isinstance(value, JITFunction):
                names.setdefault(name, module_name)
    return names


def kernel_times(engine: Engine, num_steps: int) -> dict[str, dict[str, float]]:
    """Microseconds and launches a step, by kernel name."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(num_steps):
            engine.step()
        torch.cuda.synchronize()
    times: dict[str, dict[str, float]] = defaultdict(lambda: {"us": 0.0, "launches": 0.0})
    for event in trace.events():
        if event.device_type.name == "CUDA":
            times[event.name]["us"] += event.device_time_total / num_steps
            times[event.name]["launches"] += 1 / num_steps
    return dict(times)


@click.command()
@click.option("--draft-sample", type=click.Choice(["greedy", "gumbel"]), default="gumbel")
@click.option("--k", "num_speculative_tokens", default=3)
@click.option("--batch-size", default=64)
@click.option("--num-steps", default=10)
@click.option("--model", default=None)
@click.option("--draft-model", default=None)
@click.option("--output-dir", default=None)
@click.option("--name", default="profile_step")
def main(
    draft_sample: Any,
    num_speculative_tokens: int,
    batch_size: int,
    num_steps: int,
    model: str | None,
    draft_model: str | None,
    output_dir: str | None,
    name: str,
) -> None:
    """Profile decode steps of a full batch."""
    engine = Engine(
        EngineConfig(
            model=model,
            draft_model=draft_model,
            draft_sample=draft_sample,
            num_speculative_tokens=num_speculative_tokens,
            max_num_seqs=batch_size,
        )
    )
    rows = read_rows(HELD_OUT, temperature=1.0, max_tokens=400, num_samples=1)
    for row in (rows * (batch_size // len(rows) + 1))[:batch_size]:
        engine.add_request(row)
    for _ in range(5):  # prefill, compilation, capture
        engine.step()
    times = kernel_times(engine, num_steps)
    ours = triton_kernel_names()
    seen = {kernel: ours[kernel] for kernel in ours if any(kernel == t for t in times)}
    total = sum(entry["us"] for entry in times.values())
    table = sorted(times.items(), key=lambda item: -item[1]["us"])
    for kernel, entry in table[:25]:
        click.echo(f"{entry['us']:9.1f} us {entry['launches']:6.1f}x  {kernel[:90]}")
    click.echo(f"{total:9.1f} us a step in kernels; specgen kernels seen: {sorted(seen)}")
    payload = {
        "draft_sample": draft_sample,
        "k": num_speculative_tokens,
        "batch_size": batch_size,
        "kernel_us_per_step": total,
        "specgen_kernels_seen": seen,
        "kernel_backend": engine.describe()["kernel_backend"],
        "kernels": {kernel[:160]: entry for kernel, entry in table},
    }
    click.echo(f"wrote {write_record(name, payload, output_dir)}")


if __name__ == "__main__":
    main()

"""Admission policies on the mixed job, by a clock of step times measured on a GPU.

The scheduler is the engine's; the device is a table: matrix products by rows, cache reads by tokens
of context, prefill by tokens (Llama-3.1-8B on an H200). Seconds are simulated: they compare
policies, and say nothing of kernels.

    python -m benchmarks.admission
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import click
import numpy as np

from benchmarks.record import write_record
from specgen.bench.jobs import Job, make_rows, mixed_job
from specgen.pipeline.block_manager import BlockManager
from specgen.pipeline.request import PromptRow, Request
from specgen.pipeline.scheduler import ScheduledStep, Scheduler
from specgen.stats import SpeculationStats

TOKENS = [1, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
PRODUCTS_MS = [4.06, 4.05, 4.09, 4.15, 4.26, 4.38, 4.69, 6.35, 12.15, 23.52]
OTHER_MS = 0.6  # norms, rotary, sampling, gaps
CACHE_S_PER_TOKEN = 131072 / 4.0e12  # bytes of a token's entries, bytes a second
PREFILL_US_PER_TOKEN, PREFILL_LEAST_MS = 22.0, 5.0


def step_seconds(step: ScheduledStep) -> float:
    """What the step would take."""
    if step.chunks:
        num_tokens = sum(chunk.num_tokens for chunk in step.chunks)
        return max(num_tokens * PREFILL_US_PER_TOKEN / 1e6, PREFILL_LEAST_MS / 1e3)
    context = sum(request.num_tokens for request in step.decode)
    products = float(np.interp(len(step.decode), TOKENS, PRODUCTS_MS))
    return (products + OTHER_MS) / 1e3 + context * CACHE_S_PER_TOKEN


def simulate(
    job: Job, max_num_seqs: int, min_prefill_tokens: int, ahead: int, order: str
) -> dict[str, Any]:
    """Run the job without drafts; seconds, steps, and how full decode steps were.

    Args:
        ahead: rows read ahead, in multiples of ``max_num_seqs``.
        order: ``longest`` as the engine has it, ``input`` as rows come.
    """
    scheduler = Scheduler(
        block_manager=BlockManager(400_000, 16),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        num_speculative_tokens=0,
        min_prefill_tokens=min_prefill_tokens,
    )
    rows = iter(make_rows(job, vocab_size=1000, temperature=1.0, seed=0))
    as_given = order == "input"
    seconds, num_prefills, fill = 0.0, 0, []
    while True:
        room = ahead * max_num_seqs - len(scheduler.waiting)
        scheduler.add(_request(row, as_given) for row in itertools.islice(rows, max(room, 0)))
        step = scheduler.schedule()
        if step is None:
            break
        seconds += step_seconds(step)
        if step.chunks:
            num_prefills += 1
            scheduler.prefill_done(step.chunks)
            gained = [c.request for c in step.chunks if c.is_last]
        else:
            gained = list(step.decode)
            fill.append(len(gained))
        scheduler.record_read(gained, 1)
        for request in gained:
            request.output_token_ids.append(1)
            if request.num_tokens == request.max_len:
                scheduler.finish(request)
    return {
        "order": order,
        "ahead": ahead,
        "max_num_seqs": max_num_seqs,
        "min_prefill_tokens": min_prefill_tokens,
        "seconds": round(seconds, 3),
        "tok_s": round(job.num_output_tokens / seconds),
        "decode_steps": len(fill),
        "prefill_steps": num_prefills,
        "mean_rows": round(sum(fill) / len(fill), 1),
        "steps_below_half": sum(rows < max_num_seqs / 2 for rows in fill),
    }


def _request(row: PromptRow, as_given: bool) -> Request:
    prompt, max_tokens = row.prompt_token_ids, row.sampling.max_tokens
    assert prompt is not None
    assert max_tokens is not None
    unsorted = replace(row, sampling=replace(row.sampling, max_tokens=None))
    return Request(
        row=unsorted if as_given else row,
        sample_index=0,
        prompt_token_ids=prompt,
        max_len=len(prompt) + max_tokens,
        seed=0,
        num_speculative_tokens=0,
        stop_token_ids=(),
        stats=SpeculationStats(0),
    )


@click.command()
@click.option("--rows", "sizes", default="256,512", help="Values of --max-num-seqs.")
@click.option("--min-prefill-tokens", "floors", default="512,1024,2048,4096")
@click.option("--ahead", "windows", default="2,4,8")
@click.option("--output-dir", default=None)
def main(sizes: str, floors: str, windows: str, output_dir: str | None) -> None:
    """Simulate the mixed job under each setting; one JSON line each."""
    grid = itertools.product(
        map(int, sizes.split(",")),
        map(int, floors.split(",")),
        [("input", 2), *(("longest", int(window)) for window in windows.split(","))],
    )
    results = []
    for size, floor, (order, ahead) in grid:
        results.append(simulate(mixed_job(), size, floor, ahead, order))
        click.echo(json.dumps(results[-1]))
    payload = {"experiment": "admission of the mixed job, simulated", "results": results}
    click.echo(f"wrote {write_record('admission_simulated', payload, output_dir)}")


if __name__ == "__main__":
    main()

"""One measurement: the rows of a job through a warm engine, on a synchronised clock."""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specgen.bench.jobs import Job, fixed_job, make_rows
from specgen.errors import ModelError
from specgen.pipeline.engine import Engine
from specgen.pipeline.request import PromptRow, RequestOutput
from specgen.stats import SpeculationStats

__all__ = ["Measurement", "first_steps", "measure", "synchronized_clock"]


@dataclass(frozen=True)
class Measurement:
    """Figures of one job; times in seconds, memory in bytes, ``batch`` rows at a time.

    Of several runs they are sums, and ``seconds_of_runs`` has each.
    """

    job: Job
    batch: int
    num_input_tokens: int
    num_output_tokens: int
    num_steps: int
    num_steps_by_k: dict[int, int]
    warmup_seconds: float
    seconds_of_runs: tuple[float, ...]
    peak_memory: int
    speculation: SpeculationStats

    def to_dict(self) -> dict[str, Any]:
        """The measurement's part of a line of output."""
        num_runs = len(self.seconds_of_runs)
        num_prompts = num_runs * len(self.job.lengths)
        seconds = sum(self.seconds_of_runs)
        num_output_tokens_of_run = self.num_output_tokens / num_runs
        speeds = [round(num_output_tokens_of_run / s, 1) for s in self.seconds_of_runs]
        return {
            "job": self.job.name,
            "batch": self.batch,
            "prompts": num_prompts,
            "input_len": self.num_input_tokens / num_prompts,
            "output_len": self.num_output_tokens / num_prompts,
            "input_tokens": self.num_input_tokens,
            "output_tokens": self.num_output_tokens,
            "steps": self.num_steps,
            "decode_steps_by_k": {str(k): n for k, n in sorted(self.num_steps_by_k.items())},
            "seconds": round(seconds, 4),
            "tok_s": round(self.num_output_tokens / seconds, 1),
            "tok_s_of_runs": speeds,
            "mean_acceptance_length": self.speculation.mean_acceptance_length,
            "draft_acceptance_rate": self.speculation.draft_acceptance_rate,
            "faithful": self.speculation.faithful,
            "warmup_s": round(self.warmup_seconds, 2),
            "peak_memory_bytes": self.peak_memory,
        }


def measure(
    engine: Engine,
    job: Job,
    *,
    temperature: float,
    seed: int = 0,
    num_runs: int = 1,
    warms_up: bool = True,
    notify: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Run the job once to warm up, then ``num_runs`` times, always with other prompts and draws.

    The first run compiles kernels and captures a graph for every batch size that occurs while rows
    end, as an engine that has run for long has them. With ``warms_up`` false, the caller knows that
    this engine has run such a job before. ``notify`` hears of each run's end.

    Raises:
        ModelError: a row failed, so that there is nothing to measure.
    """
    seeds = itertools.count(seed * (num_runs + 1))

    def run() -> tuple[float, list[RequestOutput], int]:
        rows = make_rows(
            job,
            vocab_size=engine.config.vocab_size,
            temperature=temperature,
            seed=next(seeds),
        )
        return _run(engine, rows)

    warmup_seconds = 0.0
    if warms_up:
        with engine.warming_up():
            warmup_seconds, _, _ = run()
        notify(f"warmed up in {warmup_seconds:.1f} s")
    cuda = engine.config.device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = engine.num_decode_steps_by_k
    runs = []
    for number in range(1, num_runs + 1):
        runs.append(run())
        notify(f"run {number} of {num_runs} took {runs[-1][0]:.1f} s")
    outputs = [output for _, found, _ in runs for output in found]
    return Measurement(
        job=job,
        batch=job.batch or min(len(job.lengths), engine.config.max_num_seqs),
        num_input_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        num_output_tokens=sum(_count_output(job, found) for _, found, _ in runs),
        num_steps=sum(num_steps for _, _, num_steps in runs),
        num_steps_by_k=dict(engine.num_decode_steps_by_k - before),
        warmup_seconds=warmup_seconds,
        seconds_of_runs=tuple(seconds for seconds, _, _ in runs),
        peak_memory=torch.cuda.max_memory_allocated() if cuda else _host_peak(),
        speculation=SpeculationStats.merged(output.stats for output in outputs),
    )


def first_steps(engine: Engine, temperature: float) -> None:
    """One prefill and, where the model has room, one decode step: the end of a start-up."""
    output_len = min(2, engine.config.max_model_len - 1)
    rows = make_rows(
        fixed_job(1, 1, output_len),
        vocab_size=engine.config.vocab_size,
        temperature=temperature,
        seed=-1,
    )
    _run(engine, rows)


def synchronized_clock(device: str) -> float:
    """Now (seconds), once the device has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _run(engine: Engine, rows: Sequence[PromptRow]) -> tuple[float, list[RequestOutput], int]:
    outputs = []
    steps_before = engine.num_steps
    started = synchronized_clock(engine.config.device)
    for output in engine.generate(rows):
        outputs.append(output)
    seconds = synchronized_clock(engine.config.device) - started
    return seconds, outputs, engine.num_steps - steps_before


def _count_output(job: Job, outputs: Sequence[RequestOutput]) -> int:
    """Tokens generated, after a check that every row ran to its length.

    Raises:
        ModelError: one did not.
    """
    for output in outputs:
        if output.error is not None:
            raise ModelError(f"row {output.row.index} failed: {output.error.message}")
    count = sum(len(choice.token_ids) for output in outputs for choice in output.choices)
    assert count == job.num_output_tokens, (count, job.num_output_tokens)
    return count


def _host_peak() -> int:
    """Most memory that the process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

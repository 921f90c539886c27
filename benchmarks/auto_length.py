"""A draft length chosen step by step against every fixed one, at several batch sizes and lengths.

One engine with a draft measures them all: only the chooser and the rates of the rule ``synthetic``
change between cells. ``none`` is an engine that has no draft at all.

    python -m benchmarks.auto_length --model llama-3.1-8b --batch-size 1,8,64,256 --length 1,1.5,2.5

A mean acceptance length L is what a head with the same chance at every position reaches with three
drafts: the rates are a, a^2, a^3, ... with 1 + a + a^2 + a^3 = L.
"""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.record import write_record
from specgen import Engine, EngineConfig
from specgen.bench.jobs import fixed_job
from specgen.bench.measure import measure
from specgen.bench.presets import PRESETS, head_of, write_preset
from specgen.pipeline.draft_length import AutoDraftLength, DraftLength, FixedDraftLength
from specgen.synthetic import conditional_rates

LENGTH_AT = 3  # drafts with which a mean length is reached


def rates_of(length: float, num_rates: int) -> tuple[float, ...]:
    """Unconditional rates of a constant chance that has this mean length at three drafts."""
    low, high = 0.0, 1.0
    for _ in range(60):
        chance = (low + high) / 2
        if sum(chance**i for i in range(LENGTH_AT + 1)) < length:
            low = chance
        else:
            high = chance
    return tuple(low ** (i + 1) for i in range(num_rates))


class Bench:
    """An engine with a draft whose chooser and rates can be replaced between measurements."""

    def __init__(self, config: EngineConfig, lengths: tuple[int, int], num_runs: int) -> None:
        self.engine = Engine(config)
        self._lengths, self._num_runs = lengths, num_runs
        self._seed = 0

    def set_rates(self, rates: tuple[float, ...]) -> None:
        """Judge by these rates from now on, in captured steps too."""
        held: Any = self.engine._runner._rejection_sampler._synthetic_rates
        held.copy_(torch.tensor(conditional_rates(rates), device=held.device))

    def run(self, batch: int, chooser: DraftLength | None) -> dict[str, Any]:
        """Measure one cell; None keeps the chooser."""
        if chooser is not None:
            self.engine._scheduler.draft_length = chooser
        self._seed += 1
        result = measure(
            self.engine,
            fixed_job(batch, *self._lengths),
            temperature=1.0,
            seed=self._seed,
            num_runs=self._num_runs,
        ).to_dict()
        names = ("tok_s", "tok_s_of_runs", "mean_acceptance_length", "decode_steps_by_k")
        return {name: result[name] for name in names}

    def auto(self, max_k: int) -> AutoDraftLength:
        """A chooser that has seen nothing yet."""
        runner, config = self.engine._runner, self.engine.config
        return AutoDraftLength(max_k, config.max_num_seqs, runner.time_inert_step)


def _numbers(kind: type) -> Any:
    return lambda _context, _parameter, text: [kind(part) for part in text.split(",")]


@click.command()
@click.option("--model", default=None, help="A preset; default: the built-in pair.")
@click.option("--batch-size", "batches", default="1,8,64,256", callback=_numbers(int))
@click.option("--length", "lengths", default="1,1.5,2.5", callback=_numbers(float))
@click.option("--max-k", default=5)
@click.option("--input-len", default=64)
@click.option("--output-len", default=128)
@click.option("--repeat", default=2)
@click.option("--output-dir", type=click.Path(path_type=Path), default=None)
@click.option("--name", default="auto_length")
def main(
    model: str | None,
    batches: list[int],
    lengths: list[float],
    max_k: int,
    input_len: int,
    output_len: int,
    repeat: int,
    output_dir: Path | None,
    name: str,
) -> None:
    """Measure every fixed draft length and the chosen one."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        options: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "max_num_seqs": max(batches),
            "max_model_len": input_len + output_len,
        }
        head = None
        if model in PRESETS:
            head = head_of(model)
            options |= {"model": str(write_preset(model, Path(directory))), "load_format": "dummy"}
        cell = (input_len, output_len)
        plain = Bench(EngineConfig(no_draft=True, **options), cell, repeat)
        none = {batch: plain.run(batch, None) for batch in batches}
        del plain
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if head is not None:
            options["draft_model"] = str(write_preset(head, Path(directory)))
        bench = Bench(
            EngineConfig(
                num_speculative_tokens=f"auto:{max_k}",
                rejection_sample="synthetic",
                synthetic_acceptance=rates_of(lengths[0], max_k),
                **options,
            ),
            cell,
            repeat,
        )
        results = []
        for length in lengths:
            rates = rates_of(length, max_k)
            bench.set_rates(rates)
            for batch in batches:
                found = {str(k): bench.run(batch, FixedDraftLength(k)) for k in range(max_k + 1)}
                found |= {"none": none[batch], "auto": bench.run(batch, bench.auto(max_k))}
                speeds = {way: result["tok_s"] for way, result in found.items()}
                auto = speeds.pop("auto")
                best = max(speeds, key=lambda way: speeds[way])
                ratio = auto / speeds[best]
                results.append(
                    {"length": length, "rates": rates, "batch": batch, "ways": found}
                    | {"best": best, "auto_to_best": round(ratio, 4)}
                )
                shown = "  ".join(f"{way} {speed:.0f}" for way, speed in speeds.items())
                click.echo(
                    f"length {length:g}, {batch:>3} rows: {shown}  auto {auto:.0f} "
                    f"({ratio:.3f} of k = {best}; {found['auto']['decode_steps_by_k']})"
                )
    click.echo(f"{time.perf_counter() - started:.0f} s")
    payload = {"input_len": input_len, "output_len": output_len, "results": results}
    click.echo(f"wrote {write_record(name, payload, output_dir)}")


if __name__ == "__main__":
    main()

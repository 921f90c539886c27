"""A draft length chosen step by step against every fixed one, at several batch sizes and lengths.

One engine with a draft measures them all: only the chooser and the rates of the rule ``synthetic``
change between cells. ``none`` is an engine that has no draft at all.

    python -m benchmarks.auto_length --model llama-3.1-8b --batch-size 1,8,64,256 --length 1,1.5,2.5

A mean acceptance length L is what a head with the same chance at every position reaches with three
drafts: the rates are a, a^2, a^3, ... with 1 + a + a^2 + a^3 = L.

Rows follow one another, with outputs from a quarter to seven quarters of the mean: in a job of one
batch whose rows all end at once without drafts and apart with them, the end would decide.

With few rows the luck of the draws decides more than what is compared. So speeds are told as they
would be with as many drafts accepted as the rates say: ``tok_s`` times the tokens that the judged
drafts should have given over those that they gave. Each length is run in several rounds, all ways
in turns; the chooser has seen one such job before, as it has after the first rows of a file.
"""

from __future__ import annotations

import functools
import gc
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.record import write_record
from specgen import Engine, EngineConfig
from specgen.bench.jobs import Job
from specgen.bench.measure import measure
from specgen.bench.presets import PRESETS, head_of, write_preset
from specgen.pipeline.draft_length import AutoDraftLength, DraftLength, FixedDraftLength
from specgen.synthetic import conditional_rates

LENGTH_AT = 3  # drafts with which a mean length is reached
ROWS_OF_A_SLOT, ROWS_OF_A_LARGE_BATCH_SLOT, LARGE_BATCH = 4, 2, 128


def staggered_job(batch: int, input_len: int, output_len: int) -> Job:
    """Rows that take each other's places, their outputs ``output_len`` long in the mean."""
    rows = batch * (ROWS_OF_A_SLOT if batch < LARGE_BATCH else ROWS_OF_A_LARGE_BATCH_SLOT)
    rng = random.Random(0)
    lengths = (rng.randint(output_len // 4, 2 * output_len - output_len // 4) for _ in range(rows))
    return Job("staggered", tuple((input_len, length) for length in lengths))


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

    def __init__(self, config: EngineConfig, lengths: tuple[int, int]) -> None:
        self.engine = Engine(config)
        self._lengths = lengths
        self._rates: tuple[float, ...] = ()
        self._seed = 0
        self._has_run: set[tuple[int, str]] = set()
        # An engine times its steps once, not in every run.
        self._time_step = functools.cache(self.engine._runner.time_inert_step)

    def set_rates(self, rates: tuple[float, ...]) -> None:
        """Judge by these rates from now on, in captured steps too."""
        self._rates = rates
        held: Any = self.engine._runner._rejection_sampler._synthetic_rates
        held.copy_(torch.tensor(conditional_rates(rates), device=held.device))

    def run(self, batch: int, way: str, chooser: DraftLength | None) -> dict[str, Any]:
        """Measure one cell; None keeps the chooser. The first time of a way warms up for it."""
        scheduler = self.engine._scheduler
        if chooser is not None:
            scheduler.draft_length = chooser
        scheduler.limits.num_seqs = scheduler.limits._max_num_seqs = batch
        self._seed += 1
        measured = measure(
            self.engine,
            staggered_job(batch, *self._lengths),
            temperature=1.0,
            seed=self._seed,
            warms_up=(batch, way) not in self._has_run,
        )
        self._has_run.add((batch, way))
        result = measured.to_dict()
        stats, num_tokens = measured.speculation, measured.num_output_tokens
        drafted = zip(stats.drafted_per_position, self._rates, strict=False)
        expected = sum(count * rate for count, rate in drafted)
        luck = (num_tokens - sum(stats.accepted_per_position) + expected) / num_tokens
        names = ("tok_s", "mean_acceptance_length", "decode_steps_by_k")
        return {name: result[name] for name in names} | {"expected_tok_s": result["tok_s"] * luck}

    def auto(self, max_k: int) -> AutoDraftLength:
        """A chooser that has seen no draft yet."""
        return AutoDraftLength(max_k, self.engine.config.max_num_seqs, self._time_step)


def _numbers(kind: type) -> Any:
    return lambda _context, _parameter, text: [kind(part) for part in text.split(",")]


@click.command()
@click.option("--model", default=None, help="A preset; default: the built-in pair.")
@click.option("--batch-size", "batches", default="1,8,64,256", callback=_numbers(int))
@click.option("--length", "lengths", default="1,1.5,2.5", callback=_numbers(float))
@click.option("--max-k", default=5)
@click.option("--input-len", default=64)
@click.option("--output-len", default=128)
@click.option("--rounds", default=1)
@click.option("--output-dir", type=click.Path(path_type=Path), default=None)
@click.option("--name", default="auto_length")
def main(
    model: str | None,
    batches: list[int],
    lengths: list[float],
    max_k: int,
    input_len: int,
    output_len: int,
    rounds: int,
    output_dir: Path | None,
    name: str,
) -> None:
    """Measure every fixed draft length and the chosen one."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        options: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "max_num_seqs": max(batches),
            "max_model_len": input_len + 2 * output_len,
        }
        head = None
        if model in PRESETS:
            head = head_of(model)
            options |= {"model": str(write_preset(model, Path(directory))), "load_format": "dummy"}
        cell = (input_len, output_len)
        plain = Bench(EngineConfig(no_draft=True, **options), cell)
        none = {batch: [plain.run(batch, "none", None) for _ in range(rounds)] for batch in batches}
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
        )
        results = []
        for batch in batches:
            for length in lengths:
                bench.set_rates(rates_of(length, max_k))
                results.append(
                    {"length": length, "batch": batch} | compare(bench, batch, max_k, rounds)
                )
                found = results[-1]
                found["ways"]["none"] = none[batch]
                speeds = {way: speed_of(runs) for way, runs in found["ways"].items()}
                auto = speeds.pop("auto")
                found["best"] = best = max(speeds, key=lambda way: speeds[way])
                found["auto_to_best"] = ratio = round(auto / speeds[best], 4)
                shown = "  ".join(f"{way} {speed:.0f}" for way, speed in speeds.items())
                steps = [run["decode_steps_by_k"] for run in found["ways"]["auto"]]
                click.echo(
                    f"length {length:g}, {batch:>3} rows: {shown}  auto {auto:.0f} "
                    f"({ratio:.3f} of k = {best}; {steps[-1]}; "
                    f"{time.perf_counter() - started:.0f} s)"
                )
                # Written each time: what was measured is not lost if time runs out.
                payload = {"input_len": input_len, "output_len": output_len, "results": results}
                path = write_record(name, payload, output_dir)
    click.echo(f"wrote {path}")


def compare(bench: Bench, batch: int, max_k: int, rounds: int) -> dict[str, Any]:
    """Every fixed length and the chosen one, in turns."""
    ways: dict[str, list[dict[str, Any]]] = {}
    chooser = bench.auto(max_k)
    bench.run(batch, "settling", chooser)
    for _ in range(rounds):
        for k in range(max_k + 1):
            ways.setdefault(str(k), []).append(bench.run(batch, str(k), FixedDraftLength(k)))
        ways.setdefault("auto", []).append(bench.run(batch, "auto", chooser))
    return {"ways": ways}


def speed_of(runs: list[dict[str, Any]]) -> float:
    """The median round's tokens a second."""
    return statistics.median(run["expected_tok_s"] for run in runs)


if __name__ == "__main__":
    main()

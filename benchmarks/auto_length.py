"""A draft length chosen step by step against every fixed one, at several batch sizes and lengths.

One engine with a draft measures them all: only the chooser and the rates of the rule ``synthetic``
change between cells. ``none`` is an engine that has no draft at all, which is what the flag
``--num-speculative-tokens 0`` gives; it is measured before and after the others, since a GPU that
grows warm grows slower, and the mean counts.

    python -m benchmarks.auto_length --model llama-3.1-8b --batch-size 1,8,64,256 --length 1,1.5,2.5

A mean acceptance length L is what a head with the same chance at every position reaches with three
drafts: the rates are a, a^2, a^3, ... with 1 + a + a^2 + a^3 = L.

What is compared is the speed of decode steps of full batches until each row has so many tokens in
the mean: the tokens that the judged drafts give in expectation, over the time from the end of the
step before to their own. No row ends in the meantime. The luck of the draws, and an end of a job in
which a few rows happen to run on alone, would otherwise decide more than what is compared. The
chooser has seen one such run before, as it has after the first rows of a file.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.record import write_record
from specgen import Engine, EngineConfig
from specgen.bench.jobs import fixed_job, make_rows
from specgen.bench.presets import PRESETS, head_of, write_preset
from specgen.pipeline.draft_length import AutoDraftLength, DraftLength, FixedDraftLength
from specgen.pipeline.step_record import RowRecord
from specgen.synthetic import conditional_rates

LENGTH_AT = 3  # drafts with which a mean length is reached
# Tokens a row that a run measures. One row yields few, with which a chooser learns little.
OUTPUT_LEN, OUTPUT_LEN_OF_ONE_ROW = 128, 400
SLACK = 2  # no row is lucky enough to get that many times the mean


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


class Watch:
    """Passes on to a chooser, and counts what full steps took and gave."""

    def __init__(self, chooser: DraftLength, batch: int, rates: tuple[float, ...]) -> None:
        self._chooser = chooser
        self._batch = batch
        self._gained = (*itertools.accumulate(rates, initial=1.0),)  # by drafts judged
        self._tokens = self._seconds = 0.0
        self._steps_by_k: Counter[int] = Counter()
        self.num_tokens = 0  # those really generated

    def choose(self, num_rows: int, limit: int) -> int:
        """As the chooser does."""
        return self._chooser.choose(num_rows, limit)

    def observe(
        self, records: Iterable[RowRecord], num_rows: int, k: int, seconds: float | None
    ) -> None:
        """A step."""
        records = list(records)
        self._chooser.observe(records, num_rows, k, seconds)
        self.num_tokens += sum(len(record.token_ids) for record in records)
        if num_rows == self._batch and seconds is not None:
            self._tokens += sum(self._gained[record.num_draft_tokens] for record in records)
            self._seconds += seconds
            self._steps_by_k[k] += 1

    def to_dict(self) -> dict[str, Any]:
        """What was counted."""
        return {
            "tok_s": round(self._tokens / self._seconds, 1),
            "ms": round(1e3 * self._seconds / self._steps_by_k.total(), 4),
            "steps_by_k": {str(k): n for k, n in sorted(self._steps_by_k.items())},
        }


class Bench:
    """An engine whose chooser and rates can be replaced between measurements."""

    def __init__(self, config: EngineConfig, input_len: int) -> None:
        self.engine = Engine(config)
        self._input_len = input_len
        self._rates: tuple[float, ...] = ()
        self._seed = 0
        # An engine times its steps once, not in every run.
        self._time_step = functools.cache(self.engine._runner.time_inert_step)

    def set_rates(self, rates: tuple[float, ...]) -> None:
        """Judge by these rates from now on, in captured steps too."""
        self._rates = rates
        held: Any = self.engine._runner._rejection_sampler._synthetic_rates
        held.copy_(torch.tensor(conditional_rates(rates), device=held.device))

    def run(self, batch: int, chooser: DraftLength) -> dict[str, Any]:
        """Measure a batch until its rows have their tokens, in the mean."""
        engine, scheduler = self.engine, self.engine._scheduler
        watch = scheduler.draft_length = Watch(chooser, batch, self._rates)
        scheduler.limits.num_seqs = scheduler.limits._max_num_seqs = batch
        self._seed += 1
        output_len = output_len_of(batch)
        rows = make_rows(
            fixed_job(batch, self._input_len, SLACK * output_len),
            vocab_size=engine.config.vocab_size,
            temperature=1.0,
            seed=self._seed,
        )
        for row in rows:
            engine.add_request(row)
        while watch.num_tokens < batch * output_len:
            for output in engine.step():
                raise RuntimeError(f"row {output.row.index} has ended") from output.error
        engine.preempt_all()
        while scheduler.waiting:
            scheduler.give_up(scheduler.waiting.first)
        engine._groups.clear()
        return watch.to_dict()

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
@click.option(
    "--warm-up",
    "warm_up_seconds",
    type=float,
    default=None,
    help="Seconds of work before, until a GPU is as warm, and as slow, as it will be (0 on a CPU).",
    show_default="15",
)
@click.option("--output-dir", type=click.Path(path_type=Path), default=None)
@click.option("--name", default="auto_length")
def main(
    model: str | None,
    batches: list[int],
    lengths: list[float],
    max_k: int,
    input_len: int,
    warm_up_seconds: float | None,
    output_dir: Path | None,
    name: str,
) -> None:
    """Measure every fixed draft length and the chosen one."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        options: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "max_num_seqs": max(batches),
            "max_model_len": input_len + max(SLACK * output_len_of(batch) for batch in batches),
        }
        head = None
        if model in PRESETS:
            head = head_of(model)
            options |= {"model": str(write_preset(model, Path(directory))), "load_format": "dummy"}
        # Both lie in the memory of one device; the second may take what the first has left.
        plain = Bench(EngineConfig(no_draft=True, gpu_memory_utilization=0.4, **options), input_len)
        if head is not None:
            options["draft_model"] = str(write_preset(head, Path(directory)))
        bench = Bench(
            EngineConfig(
                num_speculative_tokens=f"auto:{max_k}",
                rejection_sample="synthetic",
                synthetic_acceptance=rates_of(lengths[0], max_k),
                gpu_memory_utilization=0.85,
                **options,
            ),
            input_len,
        )
        bench.set_rates(rates_of(lengths[0], max_k))
        if warm_up_seconds is None:
            warm_up_seconds = 15.0 if torch.cuda.is_available() else 0.0
        warm_up(bench, max(batches), max_k, warm_up_seconds)
        results = []
        for batch in batches:
            for length in lengths:
                bench.set_rates(rates_of(length, max_k))
                ways = compare(bench, plain, batch, max_k)
                speeds = {way: found["tok_s"] for way, found in ways.items()}
                auto = speeds.pop("auto")
                best = max(speeds, key=lambda way: speeds[way])
                cell_found = {
                    "length": length,
                    "batch": batch,
                    "ways": ways,
                    "best": best,
                    "auto_to_best": round(auto / speeds[best], 4),
                    "auto_to_best_with_draft": round(
                        auto / max(speed for way, speed in speeds.items() if way != "none"), 4
                    ),
                }
                results.append(cell_found)
                shown = "  ".join(f"{way} {speed:.0f}" for way, speed in speeds.items())
                click.echo(
                    f"length {length:g}, {batch:>3} rows: {shown}  auto {auto:.0f} "
                    f"({cell_found['auto_to_best']:.3f} of k = {best}; "
                    f"{cell_found['auto_to_best_with_draft']:.3f} of those with a draft; "
                    f"{ways['auto']['steps_by_k']}; {time.perf_counter() - started:.0f} s)"
                )
                # Written each time: what was measured is not lost if time runs out.
                payload = {"input_len": input_len, "results": results}
                path = write_record(name, payload, output_dir)
    click.echo(f"wrote {path}")


def output_len_of(batch: int) -> int:
    """Tokens a row that are measured."""
    return OUTPUT_LEN_OF_ONE_ROW if batch == 1 else OUTPUT_LEN


def warm_up(bench: Bench, batch: int, max_k: int, seconds: float) -> None:
    """Work for so long."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        bench.run(batch, FixedDraftLength(max_k))


def compare(bench: Bench, plain: Bench, batch: int, max_k: int) -> dict[str, dict[str, Any]]:
    """Every fixed length, the chosen one, and no draft."""
    nones = [plain.run(batch, FixedDraftLength(0))]
    ways = {str(k): bench.run(batch, FixedDraftLength(k)) for k in range(max_k + 1)}
    chooser = bench.auto(max_k)
    bench.run(batch, chooser)
    ways["auto"] = bench.run(batch, chooser)
    nones.append(plain.run(batch, FixedDraftLength(0)))
    speeds = [none["tok_s"] for none in nones]
    ways["none"] = nones[0] | {"tok_s": round(sum(speeds) / 2, 1), "tok_s_of_runs": speeds}
    return ways


if __name__ == "__main__":
    main()

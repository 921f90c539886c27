"""The built-in pair on a CPU against ``transformers.generate``: same model, prompts and process.

Two jobs: ``fixed``, one batch whose rows all run to the same length, and ``natural``, several
batches of prompts whose rows end where they end (a batch of ``generate`` waits for its longest
row). Runs alternate between the two, so that a busy machine slows both, and medians are compared.
transformers gets the thread count that serves it best, by a short trial of each.

    python -m benchmarks.cpu_vs_transformers --batch-size 16
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import click
import torch

from benchmarks.draft_sample import HELD_OUT, read_rows
from benchmarks.record import write_record
from specgen import Engine, EngineConfig
from specgen.pipeline.request import PromptRow
from specgen.pipeline.tokenization import Tokenizer
from specgen.resolve import BUILTIN_TARGET
from specgen.stats import SpeculationStats

Run = Callable[[], int]


class TransformersGenerate:
    """``generate`` over padded batches of the same token ids, in float32."""

    def __init__(self, batch_size: int) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(
            BUILTIN_TARGET, dtype=torch.float32
        ).eval()
        self._batch_size = batch_size

    def run(
        self, prompts: Sequence[Sequence[int]], temperature: float, length: int, fixed: bool
    ) -> int:
        """Tokens generated, those up to each row's end."""
        eos = self._model.generation_config.eos_token_id
        ends_row = set() if fixed else {eos} if isinstance(eos, int) else set(eos)
        pad = self._model.config.pad_token_id
        count = 0
        for start in range(0, len(prompts), self._batch_size):
            batch = prompts[start : start + self._batch_size]
            longest = max(map(len, batch))
            ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in batch])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch])
            out = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=temperature > 0,
                temperature=temperature or None,
                top_k=0,
                top_p=1.0,
                max_new_tokens=length,
                eos_token_id=None if fixed else eos,
                pad_token_id=pad,
            )[:, longest:]
            for row in out.tolist():
                ends = (i for i, token in enumerate(row) if token in ends_row)
                count += next(ends, len(row) - 1) + 1
        return count


def best_threads(peer: TransformersGenerate, prompts: Sequence[Sequence[int]]) -> dict[int, float]:
    """Tokens a second of short batches by thread count, the best first."""
    speeds = {}
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        for _ in range(2):  # the first warms up
            started = time.perf_counter()
            count = peer.run(prompts, 1.0, 12, True)
            speeds[threads] = round(count / (time.perf_counter() - started), 1)
    return dict(sorted(speeds.items(), key=lambda item: -item[1]))


def specgen_run(engine: Engine, rows: Sequence[PromptRow], stats: SpeculationStats) -> int:
    """Tokens generated; acceptance is added to ``stats``."""
    count = 0
    for output in engine.generate(rows):
        assert output.error is None, output.error
        count += sum(len(choice.token_ids) for choice in output.choices)
        stats.add(output.stats)
    return count


def alternate(runs: dict[str, tuple[int, Run]], repeats: int) -> dict[str, dict[str, Any]]:
    """Run each in turn, ``repeats`` times after a warm-up; ``runs`` give threads and work.

    Tokens a second of the wall clock, and of the process's own CPU time, which other programs on
    the machine disturb less.
    """
    figures: dict[str, dict[str, Any]] = {
        name: {"tokens": [], "tok_s": [], "tok_cpu_s": []} for name in runs
    }
    for repeat in range(repeats + 1):
        for name, (threads, run) in runs.items():
            torch.set_num_threads(threads)
            started, cpu_started = time.perf_counter(), time.process_time()
            count = run()
            speed = count / (time.perf_counter() - started)
            cpu_speed = count / (time.process_time() - cpu_started)
            if repeat:
                figures[name]["tokens"].append(count)
                figures[name]["tok_s"].append(round(speed, 1))
                figures[name]["tok_cpu_s"].append(round(cpu_speed, 1))
    for name, figure in figures.items():
        figure["median_tok_s"] = statistics.median(figure["tok_s"])
        figure["median_tok_cpu_s"] = statistics.median(figure["tok_cpu_s"])
        figure["threads"] = runs[name][0]
    return figures


@click.command()
@click.option("--batch-size", default=16)
@click.option("--num-batches", default=4, help="Batches of the natural job.")
@click.option("--length", default=96, help="Most tokens a row.")
@click.option("--temperature", default=1.0)
@click.option("--repeats", default=3)
@click.option("--k", "num_speculative_tokens", type=int, default=None, help="Default: specgen's.")
@click.option("--output-dir", default=None)
@click.option("--name", default="cpu_vs_transformers")
def main(
    batch_size: int,
    num_batches: int,
    length: int,
    temperature: float,
    repeats: int,
    num_speculative_tokens: int | None,
    output_dir: str | None,
    name: str,
) -> None:
    """Compare tokens a second."""
    load = os.getloadavg()[0]
    peer = TransformersGenerate(batch_size)
    tokenizer = Tokenizer(str(BUILTIN_TARGET))
    source = read_rows(HELD_OUT, temperature, length, 1)[: batch_size * num_batches]
    prompts = [tokenizer.encode(row) for row in source]
    trials = best_threads(peer, prompts[:batch_size])
    click.echo(f"transformers tok/s by threads: {trials}")
    num_threads = next(iter(trials))
    fitted = 1
    engines = {}
    for label, fields in (
        ("specgen", {"num_speculative_tokens": num_speculative_tokens}),
        ("specgen, sampled drafts", {"num_speculative_tokens": 1, "draft_sample": "gumbel"}),
        ("specgen without a draft", {"no_draft": True}),
    ):
        engines[label] = Engine(EngineConfig(device="cpu", max_num_seqs=batch_size, **fields))  # type: ignore[arg-type]
        fitted = torch.get_num_threads()  # as the engine chose them

    results = {}
    for job in ("fixed", "natural"):
        fixed = job == "fixed"
        used = prompts[:batch_size] if fixed else prompts
        rows = [
            replace(
                row,
                prompt=None,
                messages=None,
                prompt_token_ids=ids,
                sampling=replace(row.sampling, ignore_eos=fixed),
            )
            for row, ids in zip(source, used, strict=False)
        ]
        accounts = {label: SpeculationStats(0) for label in engines}
        runs: dict[str, tuple[int, Run]] = {}
        for label, engine in engines.items():
            runs[label] = (
                fitted,
                lambda e=engine, r=rows, a=accounts[label]: specgen_run(e, r, a),  # type: ignore[misc]
            )
        runs["transformers"] = (
            num_threads,
            lambda u=used, f=fixed: peer.run(u, temperature, length, f),  # type: ignore[misc]
        )
        figures = alternate(runs, repeats)
        for label, stats in accounts.items():
            figures[label]["mean_acceptance_length"] = stats.mean_acceptance_length
        ratio = {
            kind: {
                label: round(figures[label][figure] / figures["transformers"][figure], 2)
                for label in engines
            }
            for kind, figure in (("wall", "median_tok_s"), ("cpu_time", "median_tok_cpu_s"))
        }
        results[job] = {"num_prompts": len(rows), "ratio": ratio, **figures}
        for label, figure in figures.items():
            click.echo(f"{job:>8}  {label:<26} {figure['median_tok_s']:>9.1f} tok/s")
        click.echo(f"{job:>8}  ratio {ratio}")
    payload = {
        "experiment": "the built-in pair in specgen against transformers.generate, float32, CPU",
        "batch_size": batch_size,
        "max_tokens": length,
        "temperature": temperature,
        "repeats": repeats,
        "transformers_tok_s_by_threads": trials,
        "load_average_before": load,
        "results": results,
    }
    click.echo(f"wrote {write_record(name, payload, output_dir)}")


if __name__ == "__main__":
    main()

"""The experiment of the field: which way of drafting pays, judged by exact rejection sampling.

Runs the same prompts without a draft, with greedy drafts (one-hot rule) and with sampled drafts
(ratio rule), and records acceptance, speed and the memory of the draft logits.

    python -m benchmarks.draft_sample --k 3,7 --temperature 1.0
"""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.record import write_record
from specgen import Engine, EngineConfig, SamplingParams
from specgen.pipeline.request import PromptRow
from specgen.stats import RunStats

HELD_OUT = Path(__file__).parent / "data" / "heldout_prompts.jsonl"


def read_rows(
    path: Path, temperature: float, max_tokens: int | None, num_samples: int
) -> list[PromptRow]:
    """Prompt rows with one temperature, their own or one ``max_tokens``, and seeds by index."""
    rows = []
    for index, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        data = json.loads(line)
        sampling = SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens or data.get("max_tokens"),
            n=num_samples,
        )
        rows.append(
            PromptRow(
                index=index,
                input_hash="0" * 16,
                line=index + 1,
                source=path.name,
                sampling=sampling,
                prompt=data.get("prompt"),
                messages=data.get("messages"),
            )
        )
    return rows


def measure(config: EngineConfig, rows: list[PromptRow]) -> dict[str, Any]:
    """One cell: a warm-up run that compiles and captures, then a timed run of the same rows."""
    started = time.perf_counter()
    engine = Engine(config)
    startup = time.perf_counter() - started
    for _ in engine.generate(rows):
        pass
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    stats = RunStats()
    stats.restart_clock()
    for output in engine.generate(rows):
        stats.add(output)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    summary = stats.summary(stats.elapsed())
    speculation = summary["speculative_decoding"]
    described = engine.describe()
    return {
        "draft": "none" if config.no_draft else config.draft_sample,
        "k": described["num_speculative_tokens"],
        "device": described["device"],
        "dtype": described["dtype"],
        "kernels": described["kernel_backend"],
        "max_num_seqs": described["max_num_seqs"],
        "rows_ok": summary["rows"]["ok"],
        "rows_failed": summary["rows"]["failed"],
        "completion_tokens": summary["usage"]["completion_tokens"],
        "seconds": round(summary["elapsed_s"], 3),
        "tokens_per_s": round(summary["completion_tokens_per_s"], 1),
        "startup_s": round(startup, 2),
        "draft_acceptance_rate": speculation["draft_acceptance_rate"],
        "mean_acceptance_length": speculation["mean_acceptance_length"],
        "acceptance_per_position": speculation["acceptance_per_position"],
        "draft_logits_bytes": described["draft_logits_bytes"],
        "peak_memory_bytes": torch.cuda.max_memory_allocated()
        if torch.cuda.is_available()
        else None,
    }


@click.command()
@click.option("--prompts", type=click.Path(exists=True, path_type=Path), default=HELD_OUT)
@click.option("--k", "draft_lengths", default="3,7", help="Draft lengths, comma-separated.")
@click.option("--temperature", default=1.0)
@click.option("--max-tokens", type=int, default=None, help="Default: each prompt's own.")
@click.option("--n", "num_samples", default=1, help="Samples a prompt.")
@click.option("--max-num-seqs", type=int, default=None)
@click.option("--model", default=None)
@click.option("--draft-model", default=None)
@click.option("--output-dir", type=click.Path(path_type=Path), default=None)
@click.option("--name", default="draft_sample")
def main(
    prompts: Path,
    draft_lengths: str,
    temperature: float,
    max_tokens: int | None,
    num_samples: int,
    max_num_seqs: int | None,
    model: str | None,
    draft_model: str | None,
    output_dir: Path | None,
    name: str,
) -> None:
    """Measure no draft, greedy and gumbel drafts at every draft length."""
    rows = read_rows(prompts, temperature, max_tokens, num_samples)
    cells: list[dict[str, Any]] = [{"no_draft": True}]
    cells += [
        {"num_speculative_tokens": int(k), "draft_sample": draft_sample}
        for k in draft_lengths.split(",")
        for draft_sample in ("greedy", "gumbel")
    ]
    results = []
    for cell in cells:
        fixed: dict[str, Any] = {"model": model, "max_num_seqs": max_num_seqs}
        if not cell.get("no_draft"):
            fixed["draft_model"] = draft_model
        result = measure(EngineConfig(**fixed, **cell), rows)
        results.append(result)
        length = result["mean_acceptance_length"]
        click.echo(
            f"{result['draft']:>7} k={result['k']} {result['tokens_per_s']:>10.1f} tok/s  "
            f"length {'-' if length is None else f'{length:.3f}'}  "
            f"draft logits {result['draft_logits_bytes']} B"
        )
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    payload = {
        "experiment": "no draft, greedy draft and sampled draft under the standard rule",
        "temperature": temperature,
        "num_prompts": len(rows),
        "samples_per_prompt": num_samples,
        "results": results,
    }
    click.echo(f"wrote {write_record(name, payload, output_dir)}")


if __name__ == "__main__":
    main()

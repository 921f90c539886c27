"""The experiment of the field: which way of drafting pays, judged by exact rejection sampling.

Runs the same prompts without a draft, with greedy drafts (one-hot rule) and with sampled drafts
(ratio rule), and records acceptance, speed and the memory of the draft logits.

    python -m benchmarks.draft_sample --k 3,7 --temperature 1.0
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
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


@dataclass
class Cell:
    """One way to draft: its engine, warm, and what each timed run of it gave."""

    engine: Engine
    runs: list[dict[str, Any]] = field(default_factory=list)

    def run(self, rows: list[PromptRow]) -> None:
        """Run the rows once on a synchronised clock."""
        _synchronize()
        stats = RunStats()
        stats.restart_clock()
        for output in self.engine.generate(rows):
            stats.add(output)
        _synchronize()
        self.runs.append(stats.summary(stats.elapsed()))

    def result(self) -> dict[str, Any]:
        """The median run, with the speeds of all."""
        ordered = sorted(self.runs, key=lambda run: float(run["completion_tokens_per_s"]))
        summary = ordered[len(ordered) // 2]
        speculation = summary["speculative_decoding"]
        config, described = self.engine.config, self.engine.describe()
        return {
            "draft": "none" if config.draft_dir is None else config.draft_sample,
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
            "tokens_per_s_of_runs": [round(run["completion_tokens_per_s"], 1) for run in self.runs],
            "draft_acceptance_rate": speculation["draft_acceptance_rate"],
            "mean_acceptance_length": speculation["mean_acceptance_length"],
            "acceptance_per_position": speculation["acceptance_per_position"],
            "draft_logits_bytes": described["draft_logits_bytes"],
        }


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@click.command()
@click.option("--prompts", type=click.Path(exists=True, path_type=Path), default=HELD_OUT)
@click.option("--k", "draft_lengths", default="3,7", help="Draft lengths, comma-separated.")
@click.option("--temperature", default=1.0)
@click.option("--max-tokens", type=int, default=None, help="Default: each prompt's own.")
@click.option("--n", "num_samples", default=1, help="Samples a prompt.")
@click.option("--rounds", default=1, help="Timed runs of every cell, in turns.")
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
    rounds: int,
    max_num_seqs: int | None,
    model: str | None,
    draft_model: str | None,
    output_dir: Path | None,
    name: str,
) -> None:
    """Measure no draft, greedy and gumbel drafts at every draft length."""
    rows = read_rows(prompts, temperature, max_tokens, num_samples)
    ways: list[dict[str, Any]] = [{"no_draft": True}]
    ways += [
        {
            "num_speculative_tokens": int(k),
            "draft_sample": draft_sample,
            "draft_model": draft_model,
        }
        for k in draft_lengths.split(",")
        for draft_sample in ("greedy", "gumbel")
    ]
    cells = [
        Cell(Engine(EngineConfig(model=model, max_num_seqs=max_num_seqs, **way))) for way in ways
    ]
    for cell in cells:  # compiles and captures
        for _ in cell.engine.generate(rows):
            pass
    # In turns, so that whatever else the machine does meets all of them.
    for _ in range(rounds):
        for cell in cells:
            cell.run(rows)
    results = [cell.result() for cell in cells]
    for result in results:
        length = result["mean_acceptance_length"]
        click.echo(
            f"{result['draft']:>7} k={result['k']} {result['tokens_per_s']:>10.1f} tok/s  "
            f"({', '.join(f'{speed:.0f}' for speed in result['tokens_per_s_of_runs'])})  "
            f"length {'-' if length is None else f'{length:.3f}'}  "
            f"draft logits {result['draft_logits_bytes']} B"
        )
    payload = {
        "experiment": "no draft, greedy draft and sampled draft under the standard rule",
        "temperature": temperature,
        "num_prompts": len(rows),
        "samples_per_prompt": num_samples,
        "rounds": rounds,
        "results": results,
    }
    click.echo(f"wrote {write_record(name, payload, output_dir)}")


if __name__ == "__main__":
    main()

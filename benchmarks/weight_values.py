"""How much the values of dummy weights change the speed of `specgen bench`.

A GPU at its power limit runs as fast as its power allows, and what a product draws depends on the
numbers in it. specgen's dummy weights are normal with variance 1/fan-in, and its norms are ones;
vLLM's are uniform between -0.001 and 0.001, norms included. The same cell is measured with both, in
turns, each in a process of its own.

    python -m benchmarks.weight_values --batch-size 64
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from collections.abc import Mapping

import click
import torch

import specgen.models
from benchmarks.record import write_record
from specgen.cli import cli

LARGEST = 1e-3
FILLS = ("specgen", "uniform")


def fill_uniform(slots: Mapping[str, torch.Tensor], seed: int = 0) -> None:
    """Fill every slot in place, norms and biases included, with small uniform numbers."""
    generators: dict[torch.device, torch.Generator] = {}
    for slot in slots.values():
        if slot.is_meta:
            continue  # shapes alone
        if slot.device not in generators:
            generators[slot.device] = torch.Generator(slot.device).manual_seed(seed)
        slot.uniform_(-LARGEST, LARGEST, generator=generators[slot.device])


def run_bench(fill: str, arguments: list[str]) -> None:
    """`specgen bench` in this process, with weights of this kind."""
    if fill == "uniform":
        for info in pkgutil.iter_modules(specgen.models.__path__):
            module = importlib.import_module(f"specgen.models.{info.name}")
            if hasattr(module, "fill_dummy"):
                setattr(module, "fill_dummy", fill_uniform)  # noqa: B010 (a module has no such field)
    cli.main(["bench", *arguments])


@click.command()
@click.option("--model", default="llama-3.1-8b")
@click.option("--batch-size", default=64)
@click.option("--k", default=3)
@click.option("--length", default=2.5, help="Mean acceptance length.")
@click.option("--repeat", default=1, help="Runs of a measurement, one after the other.")
@click.option("--rounds", default=3)
@click.option("--output-dir", default=None)
@click.option("--name", default="weight_values_h200")
def main(
    model: str,
    batch_size: int,
    k: int,
    length: float,
    repeat: int,
    rounds: int,
    output_dir: str | None,
    name: str,
) -> None:
    """Measure with both kinds of weights, in turns."""
    arguments = (
        f"--model {model} --batch-size {batch_size} --input-len 256 --output-len 256 "
        f"--synthetic-acceptance {length} --num-speculative-tokens {k} --repeat {repeat}"
    ).split()
    results: dict[str, list[float]] = {fill: [] for fill in FILLS}
    for _ in range(rounds):
        for fill in FILLS:
            command = [sys.executable, "-m", "benchmarks.weight_values", "--as", fill, *arguments]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results[fill] += json.loads(done.stdout.splitlines()[-1])["tok_s_of_runs"]
            click.echo(f"{fill}: {results[fill][-repeat:]} tokens/s")
    payload = {"bench": " ".join(arguments), "tok_s": results}
    click.echo(f"wrote {write_record(name, payload, output_dir)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:
        run_bench(sys.argv[2], sys.argv[3:])
    else:
        main()

"""How much the values of dummy weights change the speed of `specgen bench`.

A GPU at its power limit runs as fast as its power allows, and what a product draws depends on the
numbers in it. The same cell is measured with either kind of dummy weights, in turns, each in a
process of its own.

    python -m benchmarks.weight_values --batch-size 64
"""

from __future__ import annotations

import json
import subprocess
import sys

import click

from benchmarks.record import write_record

FILLS = ("dummy", "dummy-uniform")


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
            command = [sys.executable, "-m", "specgen", "bench", "--load-format", fill, *arguments]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results[fill] += json.loads(done.stdout.splitlines()[-1])["tok_s_of_runs"]
            click.echo(f"{fill}: {results[fill][-repeat:]} tokens/s")
    payload = {"bench": " ".join(arguments), "tok_s": results}
    click.echo(f"wrote {write_record(name, payload, output_dir)}")


if __name__ == "__main__":
    main()

"""The choice of a draft length on step times that were measured, with steps that wait and drift.

:mod:`benchmarks.auto_length` measures it on a GPU: twelve cells, once each, in some four minutes.
Here the chooser meets the same cells many times, with the step times of that record, inert times
that are wrong by up to an eighth, and several kinds of noise. Drafts are accepted by chance.

    python -m benchmarks.auto_simulated --runs 30
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.auto_length import output_len_of, rates_of
from benchmarks.record import RESULTS, write_record
from specgen.pipeline.draft_length import AutoDraftLength, expected_tokens
from specgen.pipeline.step_record import RowRecord

LONG_STEPS = 400
PASSES = 0.98  # of the best fixed length


@dataclass(frozen=True)
class Noise:
    """What a step's time differs by, in shares of it."""

    each: float
    """A step's own, as a standard deviation."""
    waits: float
    """Chance of a step to wait for something."""
    waited: float
    """The most that such a step takes beyond."""
    drift: float
    """How far a common factor moves a step; it decays by a fiftieth."""


NOISES = {
    "a GPU": Noise(0.003, 0.02, 0.3, 0.001),
    "a busy GPU": Noise(0.01, 0.05, 0.3, 0.002),
    "a busy CPU": Noise(0.1, 0.05, 0.5, 0.005),
}


class World:
    """A device whose steps take ``seconds`` by k, and a head with a chance for every draft."""

    def __init__(
        self, seconds: Sequence[float], chance: float, batch: int, noise: Noise, seed: int
    ) -> None:
        self._rng = random.Random(seed)
        self._seconds = seconds
        self._chances = [chance] * (len(seconds) - 1)
        self._batch = batch
        self._noise = noise
        beyond = 1 + self._rng.uniform(0.0, 0.12)  # inert rows read no cache
        inert = [max(s * self._rng.gauss(1.0, 0.02), 0.0) / beyond for s in seconds]
        self._inert = [max(inert[: k + 1]) for k in range(len(inert))]
        self._factor, self._pending = 0.0, 0
        self.tokens = self.passed = 0.0
        self.changes = 0

    def measure(self, num_rows: int, k: int) -> float:
        """Seconds of an inert step."""
        return self._inert[k] * max(num_rows / self._batch, 0.3)

    def step(self, chooser: AutoDraftLength) -> None:
        """Choose, run and observe a step; its drafts are judged in the next one."""
        rng, noise = self._rng, self._noise
        k = chooser.choose(self._batch, len(self._chances))
        judged = min(k, self._pending)
        records = []
        for _ in range(self._batch):
            num = 1
            while num <= judged and rng.random() < self._chances[0]:
                num += 1
            records.append(RowRecord([], num, judged, 0))
        self._factor = 0.98 * self._factor + rng.gauss(0.0, noise.drift)
        seen = self._seconds[k] * (1 + self._factor) * max(rng.gauss(1.0, noise.each), 0.1)
        if rng.random() < noise.waits:
            seen *= 1 + rng.uniform(0.0, noise.waited)
        chooser.observe(records, self._batch, k, seen)
        self.changes += k != self._pending
        self._pending = k
        self.tokens += expected_tokens(self._chances, judged)
        self.passed += self._seconds[k]

    def share(self, chooser: AutoDraftLength, tokens: float, steps: int = 0) -> float:
        """Speed until a row has so many tokens, or for so many steps, in that of the best k."""
        self.tokens = self.passed = 0.0
        self.changes = 0
        while steps > 0 or self.tokens < tokens:
            self.step(chooser)
            steps -= 1
        best = max(expected_tokens(self._chances, k) / s for k, s in enumerate(self._seconds))
        return self.tokens / self.passed / best


def figures(shares: list[float]) -> dict[str, float]:
    """What is said of many cells."""
    return {
        "mean": round(sum(shares) / len(shares), 4),
        "least": round(min(shares), 4),
        "below": round(sum(share < PASSES for share in shares) / len(shares), 4),
    }


@click.command()
@click.option("--runs", default=30, help="Of every cell.")
@click.option("--output-dir", type=click.Path(path_type=Path), default=None)
@click.option("--name", default="auto_simulated")
def main(runs: int, output_dir: Path | None, name: str) -> None:
    """Share of the best fixed length, as the benchmark measures it and in the long run."""
    cells = json.loads((RESULTS / "auto_length_h200.json").read_text())["results"]
    results: dict[str, Any] = {}
    for noise_name, noise in NOISES.items():
        short, long = [], []
        for cell in cells:
            ways, batch = cell["ways"], cell["batch"]
            lengths = sorted(int(way) for way in ways if way.isdigit())
            seconds = [ways[str(k)]["ms"] / 1e3 for k in lengths]
            (chance,) = rates_of(cell["length"], 1)
            for seed in range(runs):
                world = World(seconds, chance, batch, noise, seed)
                chooser = AutoDraftLength(lengths[-1], 256, world.measure)
                world.share(chooser, output_len_of(batch))
                short.append(world.share(chooser, output_len_of(batch)))
                long.append(world.share(chooser, 0.0, LONG_STEPS))
        results[noise_name] = {"as measured": figures(short), "in the long run": figures(long)}
        click.echo(f"{noise_name}: {results[noise_name]}")
    path = write_record(name, {"runs_of_a_cell": runs, "shares": results}, output_dir)
    click.echo(f"wrote {path}")


if __name__ == "__main__":
    main()

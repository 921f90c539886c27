"""Kills the real command line at random moments, hundreds of times, and looks for traces.

    python -m benchmarks.kill_soak --kills 200

Each output is made under ten kills of all kinds (in start-up, while rows are written, in the midst
of a write, while rows are put in order) and must then be the file of an uninterrupted run, byte by
byte. Uses small random checkpoints; the record goes to `results/kill_soak.json`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.record import write_record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

KILLS_PER_OUTPUT = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir")
    given = parser.parse_args()

    from e2e.engines import make_checkpoints
    from e2e.killing import MOMENTS, KillJob, write_input

    noise = random.Random(given.seed)
    started = time.monotonic()
    kills: dict[str, int] = {}
    num_outputs = num_early = 0
    with tempfile.TemporaryDirectory() as scratch:
        pairs = make_checkpoints(Path(scratch, "pairs"))
        work = Path(scratch, "work")
        work.mkdir()
        write_input(work / "in.jsonl", given.rows)
        flags = ["--model", str(pairs["text"]), "--draft-model", str(pairs["text-eagle3"])]
        flags += ["--device", "cpu", "--draft-sample", "gumbel", "--num-speculative-tokens", "3"]
        whole = KillJob(flags, work, noise).finish()
        assert whole.count(b"\n") == given.rows
        while sum(kills.values()) < given.kills:
            job = KillJob(flags, work, noise, kills)
            job.clear()
            before = sum(kills.values())
            while sum(kills.values()) - before < KILLS_PER_OUTPUT:
                if not job.kill(noise.choice(MOMENTS)):
                    num_early += 1  # the run was done before its moment came
                    break
            assert job.finish() == whole, "the output shows traces of a kill"
            num_outputs += 1
            print(f"{sum(kills.values())} kills, {num_outputs} outputs", flush=True)
    write_record(
        "kill_soak",
        {
            "rows": given.rows,
            "seed": given.seed,
            "kills": sum(kills.values()),
            "kills_by_moment": dict(sorted(kills.items())),
            "outputs": num_outputs,
            "outputs_done_before_the_last_kill": num_early,
            "outputs_identical_to_the_uninterrupted_one": num_outputs,
            "seconds": round(time.monotonic() - started, 1),
        },
        given.output_dir,
    )


if __name__ == "__main__":
    main()

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
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.record import write_record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

KILLS_PER_OUTPUT = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=1, help="outputs made at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir")
    given = parser.parse_args()

    from e2e.engines import make_checkpoints
    from e2e.killing import MOMENTS, KillJob, write_input

    started = time.monotonic()
    kills: dict[str, int] = {}
    num_outputs = num_early = 0
    with tempfile.TemporaryDirectory() as scratch:
        pairs = make_checkpoints(Path(scratch, "pairs"))
        flags = ["--model", str(pairs["text"]), "--draft-model", str(pairs["text-eagle3"])]
        flags += ["--device", "cpu", "--draft-sample", "gumbel", "--num-speculative-tokens", "3"]
        works = [Path(scratch, f"work{number}") for number in range(given.jobs)]
        for work in works:
            work.mkdir()
            write_input(work / "in.jsonl", given.rows)
        whole = KillJob(flags, works[0], random.Random(given.seed)).finish()
        assert whole.count(b"\n") == given.rows
        lock = threading.Lock()

        def make_outputs(number: int) -> None:
            """Make outputs under kills until there were enough."""
            nonlocal num_outputs, num_early
            noise = random.Random(given.seed * 1000 + number)
            while sum(kills.values()) < given.kills:
                job = KillJob(flags, works[number], noise)
                job.clear()
                early = False
                while sum(job.kills.values()) < KILLS_PER_OUTPUT and not early:
                    # False where the run was done before its moment came.
                    early = not job.kill(noise.choice(MOMENTS))
                assert job.finish() == whole, "the output shows traces of a kill"
                with lock:
                    num_early += early
                    num_outputs += 1
                    for moment, count in job.kills.items():
                        kills[moment] = kills.get(moment, 0) + count
                    print(f"{sum(kills.values())} kills, {num_outputs} outputs", flush=True)

        with ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(make_outputs, range(given.jobs)))
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

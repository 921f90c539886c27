"""Fuzzes the reader with mutated lines and with hypothesis, and records that nothing was found.

    python -m benchmarks.reader_fuzz --cases 200000 --examples 100000

A case is one line. After every file it is asserted that each line became exactly one row, with its
own number, hash and index, that nothing raised, that good lines between bad ones were read as they
are, and that what a row carries can be written. The record goes to `results/reader_fuzz.json`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.record import write_record
from specgen.request_io import fast_json
from specgen.request_io.reader import ReadOptions

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

LINES_PER_FILE = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200_000)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir")
    asked = parser.parse_args()

    from request_io.fuzzing import CORPUS, check_file, random_file

    noise, started = random.Random(asked.seed), time.monotonic()
    options = [
        ReadOptions(),
        ReadOptions(prompt_field="text", id_field="custom_id"),
        ReadOptions(system_prompt="S", apply_chat_template="always"),
    ]
    parsers = [(fast_json._LOADS, fast_json._DUMPS), (None, None)]
    num_cases = num_good = num_examples = 0
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "x.jsonl")
        while num_cases < asked.cases:
            fast_json._LOADS, fast_json._DUMPS = parsers[num_cases // LINES_PER_FILE % 2]
            which = options[num_cases // LINES_PER_FILE % 3]
            num_good += check_file(path, random_file(noise, LINES_PER_FILE), which)
            num_cases += LINES_PER_FILE
        fast_json._LOADS, fast_json._DUMPS = parsers[0]
        print(f"{num_cases} mutated lines, {num_good} good rows", flush=True)

        @settings(
            max_examples=asked.examples,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(
            parts=st.lists(st.binary(max_size=40) | st.sampled_from(CORPUS), max_size=8),
            ends=st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n"]),
        )
        def any_bytes(parts: list[bytes], ends: bytes) -> None:
            nonlocal num_examples
            num_examples += 1
            check_file(path, ends.join(parts))

        any_bytes()
    write_record(
        "reader_fuzz",
        {
            "seed": asked.seed,
            "mutated_lines": num_cases,
            "good_rows_among_them": num_good,
            "hypothesis_files": num_examples,
            "failures": 0,
            "with_and_without_fast_parser": parsers[0][0] is not None,
            "seconds": round(time.monotonic() - started, 1),
        },
        asked.output_dir,
    )


if __name__ == "__main__":
    main()

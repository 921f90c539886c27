"""Runs of the real command line that are killed again and again until they are done."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import specgen

CHILD = Path(__file__).parents[1] / "cli_child.py"
MOMENTS = ("start-up", "first rows", "rows", "mid-write", "reorder")


def write_input(path: Path, num_rows: int, seed: int = 0) -> None:
    """Rows of very different lengths, so that they do not finish in order."""
    noise = random.Random(seed)
    letters = "abcdefghij "
    with open(path, "w") as file:
        for index in range(num_rows):
            prompt = f"{index} " + "".join(noise.choices(letters, k=noise.randrange(30)))
            row = {"prompt": prompt, "max_tokens": noise.choice([2, 5, 12, 30]), "id": index}
            if index % 50 == 7:
                row["temperature"] = -1  # an error row, which is a result too
            file.write(json.dumps(row) + "\n")


@dataclass
class KillJob:
    """One output that is made under kills.

    Attributes:
        arguments: of `specgen run`, without inputs and output.
        directory: holds `in.jsonl`; the output is `out.jsonl` in it.
        kills: what was survived, by moment.
    """

    arguments: Sequence[str]
    directory: Path
    noise: random.Random
    kills: dict[str, int] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        """The output."""
        return self.directory / "out.jsonl"

    @property
    def partial(self) -> Path:
        """The output while it is made."""
        return self.directory / "out.jsonl.partial"

    def start(self, faults: dict[str, Any] | None = None) -> subprocess.Popen[bytes]:
        """The command in a process of its own."""
        root = str(Path(specgen.__file__).parents[1])
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{root}:{CHILD.parent}",
        }
        words = ["run", "in.jsonl", *self.arguments, "-o", "out.jsonl", "--resume", "--quiet"]
        return subprocess.Popen(
            [sys.executable, str(CHILD), json.dumps({"real": True, **(faults or {})}), *words],
            cwd=self.directory,
            env=environment,
            stderr=subprocess.PIPE,
        )

    def finish(self) -> bytes:
        """Run to the end without a kill; returns the output's bytes."""
        process = self.start()
        _, stderr = process.communicate(timeout=300)
        assert process.returncode in (0, 3), stderr.decode()
        return self.out.read_bytes()

    def kill(self, moment: str) -> bool:
        """Start it and kill it at such a moment; False if it was done before that."""
        before = self.whole_lines()
        faults: dict[str, Any] = {}
        if moment == "mid-write":
            faults = {"kill_write": self.noise.randrange(60)}
        elif moment == "reorder":
            faults = {"kill_copy": self.noise.randrange(300)}
        process = self.start(faults)
        if moment == "start-up":
            time.sleep(self.noise.uniform(0, 3))
            process.send_signal(signal.SIGKILL)
        elif not faults:
            more = 1 if moment == "first rows" else self.noise.randrange(2_000, 40_000)
            while process.poll() is None and not self._has_grown(len(before) + more):
                time.sleep(0.005)
            time.sleep(self.noise.uniform(0, 0.1))
            process.send_signal(signal.SIGKILL)
        _, stderr = process.communicate(timeout=300)
        assert process.returncode in (0, 3, -signal.SIGKILL), stderr.decode()
        if process.returncode != -signal.SIGKILL:
            return False
        self.kills[moment] = self.kills.get(moment, 0) + 1
        self.check(before)
        return True

    def _has_grown(self, size: int) -> bool:
        return self.partial.exists() and self.partial.stat().st_size >= size

    def whole_lines(self) -> bytes:
        """What the partial output holds, without a torn line at its end."""
        data = self.partial.read_bytes() if self.partial.exists() else b""
        return data[: data.rfind(b"\n") + 1]

    def check(self, before: bytes) -> None:
        """Nothing that was finished is gone, and whole lines are valid and of different rows."""
        if self.out.exists():
            return
        now = self.whole_lines()
        assert now.startswith(before), "finished rows were lost"
        indices = [json.loads(line)["index"] for line in now.splitlines()]
        assert len(indices) == len(set(indices)), "a row is there twice"

    def clear(self) -> None:
        """Remove everything but the input."""
        for path in self.directory.iterdir():
            if path.name != "in.jsonl":
                path.unlink()

"""What every benchmark record says about where it was measured.

As a filter it stamps JSON lines, such as those of `specgen bench`, which know no commit:

    python -m specgen bench ... | python -m benchmarks.record >> results.jsonl
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import specgen

RESULTS = Path(__file__).parent / "results"


def provenance() -> dict[str, Any]:
    """Machine, versions, commit and command of this process."""
    facts: dict[str, Any] = {
        "command": command_of(sys.orig_argv[1:]),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": _commit(),
        "specgen": specgen.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
    else:
        facts["cpu_threads"] = torch.get_num_threads()
    return facts


def command_of(arguments: Sequence[str]) -> str:
    """The command that repeats a measurement, without the place on one machine it wrote to."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--output-dir":
            next(rest, None)
        elif not argument.startswith("--output-dir="):
            kept.append(argument)
    return shlex.join(["python", *kept])


def write_record(name: str, payload: dict[str, Any], directory: str | Path | None = None) -> Path:
    """Write ``name.json`` with provenance first; returns its path."""
    path = Path(directory or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"provenance": provenance(), **payload}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def stamp_lines(lines: Iterable[str]) -> Iterator[str]:
    """Return JSON lines that say of which commit and when they are."""
    facts = provenance()
    stamp = {key: facts[key] for key in ("commit", "date")}
    for line in lines:
        yield json.dumps({**json.loads(line), **stamp})


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit, marked where the tree differs from it.

    A tree that is no checkout (an unpacked archive on another machine) names its commit in the
    environment variable ``SPECGEN_COMMIT``; without it the commit is ``None``.
    """
    if "SPECGEN_COMMIT" in os.environ:
        return os.environ["SPECGEN_COMMIT"]
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()


if __name__ == "__main__":
    for stamped in stamp_lines(sys.stdin):
        print(stamped, flush=True)

"""The command line as a process of its own, with a fake engine and, if asked, a failing system.

Run as `python cli_child.py FAULTS ARGUMENT...`, where FAULTS is a JSON object with any of

* `kill_at`: SIGKILL at this system call that concerns the output, counted from 0 in halves: even
  numbers strike before a call (in the midst of a write), odd ones after it;
* `write`, `fsync`: `[errno name, n]`, the n-th call and all after it fail so (a write of rows first
  writes what still fits);
* `short`: most bytes that one write takes;
* `kill_write`: SIGKILL in the midst of the n-th write of the output;
* `kill_copy`: SIGKILL when so many rows have been copied into input order;
* `real`: use the real engine;
* `row_seconds`: how long a row takes; `end_seconds`: how long it takes to give up unfinished rows.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine

import specgen.doctor
from specgen.commands import run as run_command
from specgen.request_io.file_writer import FileWriter
from specgen.sampling_params import SamplingParams


class Engine(FakeEngine):
    row_seconds = 0.0
    end_seconds = 0.0

    def _finish(self, row: Any) -> Any:
        time.sleep(self.row_seconds)
        return super()._finish(row)

    def take_finished(self) -> list[Any]:
        print("giving up", file=sys.stderr, flush=True)
        time.sleep(self.end_seconds)
        return []


def install(faults: dict[str, Any]) -> None:
    if not faults.get("real"):
        _use_fake_engine(faults)
    if "kill_at" in faults:
        _kill_at(faults["kill_at"])
    if "kill_write" in faults:
        _kill_at(2 * faults["kill_write"], "write")
    if "kill_copy" in faults:
        _kill_copy(faults["kill_copy"])
    if "short" in faults:
        _replace("write", lambda real, fd, data: real(fd, bytes(data)[: faults["short"]]))
    for name in ("write", "fsync"):
        if name in faults:
            _fail(name, *faults[name])


def _use_fake_engine(faults: dict[str, Any]) -> None:
    engine = Engine()
    engine.row_seconds = faults.get("row_seconds", 0.0)
    engine.end_seconds = faults.get("end_seconds", 0.0)
    stand_ins: dict[str, Any] = {
        "_load": lambda options: (engine, SamplingParams()),
        "_fingerprint": lambda options: {"seed": options.config.seed},
    }
    for name, stand_in in stand_ins.items():
        setattr(run_command, name, stand_in)
    specgen.doctor.gpu_names = list  # would import torch


def _kill_copy(num_rows: int) -> None:
    copy = FileWriter._write_copy

    def killed(self: FileWriter, offsets: Iterable[int]) -> None:
        def some() -> Iterator[int]:
            for position, offset in enumerate(offsets):
                if position == num_rows:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield offset

        copy(self, some())

    FileWriter._write_copy = killed  # type: ignore[method-assign]


def _is_output(target: Any) -> bool:
    """Whether a call's first argument is the output or one of its companions."""
    try:
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
    except OSError:
        return False
    return Path(path).name.startswith("out")


def _replace(name: str, with_: Callable[..., Any]) -> None:
    real = getattr(os, name)

    def call(target: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_output(target):
            return with_(real, target, *args, **kwargs)
        return real(target, *args, **kwargs)

    setattr(os, name, call)


def _kill_at(point: int, *names: str) -> None:
    passed = 0

    def watch(name: str) -> None:
        def call(real: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal passed
            if passed == point:
                if name == "write":
                    real(target, bytes(args[0])[: len(args[0]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            done = real(target, *args, **kwargs)
            if passed + 1 == point:
                os.kill(os.getpid(), signal.SIGKILL)
            passed += 2
            return done

        _replace(name, call)

    for name in names or ("write", "fsync", "rename", "unlink", "ftruncate"):
        watch(name)


def _fail(name: str, code: str, first: int) -> None:
    number = getattr(errno, code)
    calls = 0

    def call(real: Any, target: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < first:
            return real(target, *args)
        if calls == first and name == "write":
            return real(target, bytes(args[0])[: len(args[0]) // 2])
        raise OSError(number, os.strerror(number))

    _replace(name, call)


def main() -> None:
    install(json.loads(sys.argv[1]))
    from specgen.cli import cli

    sys.argv[:] = ["specgen", *sys.argv[2:]]
    cli()


if __name__ == "__main__":
    main()

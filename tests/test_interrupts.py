from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import specgen
from specgen.interrupts import Interrupts, StopRun


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_at_once(signum: int, code: int) -> None:
    before = signal.getsignal(signum)
    threading.Timer(0.05, os.kill, (os.getpid(), signum)).start()
    with Interrupts(), pytest.raises(StopRun) as stop:
        time.sleep(5)
    assert stop.value.exit_code == code
    assert signal.getsignal(signum) is before


def test_nothing_catches_it_by_accident() -> None:
    assert not issubclass(StopRun, Exception)
    assert not issubclass(StopRun, KeyboardInterrupt)


def test_a_held_block_finishes_first() -> None:
    steps = []

    def work(interrupts: Interrupts) -> None:
        with interrupts.held():
            with interrupts.held():
                os.kill(os.getpid(), signal.SIGINT)
                steps.append("inner")
            steps.append("outer")
        steps.append("after")

    with Interrupts() as interrupts, pytest.raises(StopRun):
        work(interrupts)
    assert steps == ["inner", "outer"]


def test_it_stops_only_once() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(StopRun), interrupts.held():
            os.kill(os.getpid(), signal.SIGINT)
        with interrupts.held():
            pass  # last words may be written


class _Finalized:
    """Python calls `__del__` and throws away what it raises."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_that_is_lost_comes_again() -> None:
    with Interrupts() as interrupts:
        interrupts.check()
        _Finalized()
        with interrupts.held():
            interrupts.check()  # not here
        with pytest.raises(StopRun) as stop:
            interrupts.check()
    assert stop.value.exit_code == 143


def test_an_error_inside_a_held_block_is_not_hidden() -> None:
    def work(interrupts: Interrupts) -> None:
        with interrupts.held():
            os.kill(os.getpid(), signal.SIGINT)
            raise OSError("disk")

    with Interrupts() as interrupts, pytest.raises(OSError, match="disk"):
        work(interrupts)


def test_the_second_signal_leaves() -> None:
    code = """
import os, signal, sys
from specgen.interrupts import Interrupts
with Interrupts(on_leave=lambda: os.write(1, b"left")) as interrupts:
    with interrupts.held():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        os.write(1, b"not reached")
"""
    root = str(Path(specgen.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert (done.returncode, done.stdout) == (143, b"left")


def test_other_threads_can_use_it() -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with Interrupts() as interrupts, interrupts.held():
                pass
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == []

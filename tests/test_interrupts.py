from __future__ import annotations

import importlib
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


IMPATIENT = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):
        pass
    whole = True
except BaseException:  # as packages have it around what they can do without
    whole = False
"""


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module in whose import a signal comes."""
    name = f"impatient_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(IMPATIENT)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def import_and_wait(name: str) -> None:
    importlib.import_module(name)
    time.sleep(5)


def test_an_import_is_not_torn_apart_and_does_not_swallow_the_signal(impatient: str) -> None:
    began = time.monotonic()
    with pytest.raises(StopRun) as stop, Interrupts():
        import_and_wait(impatient)
    assert stop.value.signum == signal.SIGTERM
    assert sys.modules[impatient].whole
    assert time.monotonic() - began < 2
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_block_inside_hears_of_a_signal_that_was_put_off(impatient: str) -> None:
    def work() -> None:
        importlib.import_module(impatient)
        with Interrupts(deadline=time.monotonic() + 60):
            time.sleep(5)

    before = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGALRM)]
    with pytest.raises(StopRun) as stop, Interrupts():
        work()
    assert stop.value.signum == signal.SIGTERM
    assert not stop.value.timed_out
    assert [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGALRM)] == before


def test_the_time_limit_waits_for_an_import_too(impatient: str, tmp_path: Path) -> None:
    slow = (tmp_path / f"{impatient}.py").read_text().replace("range(1000)", "range(3_000_000)")
    slow = slow.replace("os.kill(os.getpid(), signal.SIGTERM)", "pass")
    (tmp_path / f"{impatient}.py").write_text(slow)
    with pytest.raises(StopRun) as stop, Interrupts(deadline=time.monotonic() + 0.01):
        import_and_wait(impatient)
    assert stop.value.timed_out
    assert sys.modules[impatient].whole


def test_a_second_signal_in_an_import_leaves(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text("import os\nfor _ in range(2): os.kill(os.getpid(), 15)\n")
    root = str(Path(specgen.__file__).parents[1])
    script = "from specgen.interrupts import Interrupts\nwith Interrupts(): import twice\n"
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env=environment, timeout=60
    )
    assert (done.returncode, done.stderr) == (143, b"")


def test_ctrl_c_before_anything_listens_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import os, time\nos.kill(os.getpid(), 2)\ntime.sleep(9)\n")
    root = str(Path(specgen.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    done = subprocess.run(
        [sys.executable, "-m", "specgen", "--help"],
        capture_output=True,
        env=environment,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")

"""Signals and the time limit: stop at once, but never inside a write.

The first signal raises `StopRun` in the main thread, wherever it is, except in a `held` block,
where it waits for the block's end, and in an import, where it waits for that: packages swallow what
is raised there, or are left half imported. The second leaves without further ado. The time limit
counts as a first signal only.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from specgen.errors import ExitCode

__all__ = ["Interrupts", "StopRun"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TRY_AGAIN_SECONDS = 0.02


class StopRun(BaseException):
    """The user, the system or the time limit asked the process to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    @property
    def timed_out(self) -> bool:
        """Whether it was the time limit."""
        return self.signum == signal.SIGALRM

    @property
    def exit_code(self) -> int:
        """128 + signal number: 130 for SIGINT, 143 for SIGTERM; the time limit is like SIGTERM."""
        return ExitCode.TERMINATED if self.timed_out else 128 + self.signum


class Interrupts:
    """Installs the handlers for the length of a `with` block.

    A signal that is ignored when the block begins stays ignored: that is how `nohup` and shells
    protect a job.

    Args:
        on_leave: called when a second signal ends the process on the spot; must not block.
        deadline: reading of `time.monotonic` at which to stop; None never stops.
    """

    def __init__(
        self, on_leave: Callable[[], None] = lambda: None, deadline: float | None = None
    ) -> None:
        self._on_leave = on_leave
        self._deadline = deadline
        self._signum: int | None = None
        self._raised = False
        self._depth = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        """Install the handlers; in a thread other than the main one nothing can be installed."""
        if threading.current_thread() is not threading.main_thread():
            return self
        around = getattr(signal.getsignal(signal.SIGALRM), "__self__", None)
        if isinstance(around, Interrupts):
            around.check()  # what it has put off is not to be forgotten in here
        for signum in _SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._handle)
        if self._deadline is not None:
            # A timer of 0 would never go off.
            self._set_timer(max(self._deadline - time.monotonic(), 1e-6))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Put the former handlers back."""
        if signal.SIGALRM in self._previous:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _set_timer(self, seconds: float) -> None:
        if signal.SIGALRM not in self._previous:
            self._previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._handle)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._signum is None:
            self._signum = signum
        elif signum != signal.SIGALRM:
            self._on_leave()
            os._exit(128 + signum)
        if self._depth or self._raised:
            return
        if _is_importing(frame):
            self._set_timer(_TRY_AGAIN_SECONDS)
        else:
            self._raise()

    def _raise(self) -> None:
        if self._signum is not None and not self._raised:
            self._raised = True
            raise StopRun(self._signum)

    def check(self) -> None:
        """Raise again if a signal came and the run goes on all the same.

        A `StopRun` is lost where Python calls code that cannot raise: in finalizers and in some
        callbacks of C. Must not be called once the run has been stopped.
        """
        if self._signum is not None and not self._depth:
            raise StopRun(self._signum)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let the block finish before a signal takes effect."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if not self._depth:
            self._raise()


def _is_importing(frame: FrameType | None) -> bool:
    """Whether the main thread is in an import, in its finalizers included."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False

"""SIGINT and SIGTERM: stop at once, but never inside a write.

The first signal raises `StopRun` in the main thread, wherever it is, except in a `held` block,
where it waits for the block's end. The second leaves without further ado.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupts", "StopRun"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRun(BaseException):
    """The user, or the system, asked the process to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """128 + signal number: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signum


class Interrupts:
    """Installs the handlers for the length of a `with` block.

    Args:
        on_leave: called when a second signal ends the process on the spot; must not block.
    """

    def __init__(self, on_leave: Callable[[], None] = lambda: None) -> None:
        self._on_leave = on_leave
        self._signum: int | None = None
        self._raised = False
        self._depth = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        """Install the handlers; in a thread other than the main one nothing can be installed."""
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Put the former handlers back."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._signum is not None:
            self._on_leave()
            os._exit(128 + signum)
        self._signum = signum
        if not self._depth:
            self._raise()

    def _raise(self) -> None:
        if self._signum is not None and not self._raised:
            self._raised = True
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

"""Lines of an input that may take its time, such as a pipe, read by a thread of their own."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Iterator

from specgen.request_io.source import RawLine

__all__ = ["ReadAhead"]

_MOST_LINES = 4096
_MOST_BYTES = 16 * 2**20


class ReadAhead(Iterator[RawLine]):
    """The lines in order; what reading them raises comes after those that were read before it.

    Args:
        lines: where they come from; taken by the thread alone.
    """

    def __init__(self, lines: Iterator[RawLine]) -> None:
        self._lines = lines
        self._read: deque[RawLine] = deque()
        self._num_bytes = 0
        self._ended = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="input", daemon=True).start()

    def ready(self) -> bool:
        """Whether the next line, or the end, is there without waiting."""
        with self._changed:
            return bool(self._read) or self._ended

    def __next__(self) -> RawLine:
        """The next line, waiting for it; a signal ends the wait."""
        with self._changed:
            while not self._read:
                if self._ended:
                    if self._error is not None:
                        raise self._error
                    raise StopIteration
                self._changed.wait()
            line = self._read.popleft()
            self._num_bytes -= len(line.data)
            self._changed.notify()
            return line

    def _run(self) -> None:
        # Signals are for the main thread, which may be waiting for this one.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            for line in self._lines:
                with self._changed:
                    while len(self._read) >= _MOST_LINES or self._num_bytes >= _MOST_BYTES:
                        self._changed.wait()
                    self._read.append(line)
                    self._num_bytes += len(line.data)
                    self._changed.notify()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify()

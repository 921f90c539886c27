"""Steps that the device was given and whose records the host has not read.

A step is launched before the record of the one before it is read, so the device goes from step to
step while the host accounts for an earlier one. Each record is copied to one of a few pinned
buffers in stream order behind its step; an event tells when it has arrived. The copy stands between
two steps, so a step may overwrite the tensor that its predecessor's record was made in.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specgen.pipeline.request import Request
from specgen.pipeline.step_record import RowRecord, unpack_record

__all__ = ["InFlight", "ReadStep"]

_LARGEST_LAG = 2


@dataclass(frozen=True)
class ReadStep:
    """A step whose record has arrived.

    Attributes:
        requests: The rows it ran, as they were when it was launched; some may have ended since.
        records: What it did to each of them.
        num_speculative_tokens: The k of a decode step; None for a prefill step.
        seconds: From the end of the step before it to its own, waits for the host included; None
            if nothing ran before, or if that is known to tell nothing.
    """

    requests: Sequence[Request]
    records: Sequence[RowRecord]
    num_speculative_tokens: int | None
    seconds: float | None

    @property
    def max_num_tokens(self) -> int:
        """The most tokens that it may have added to a row."""
        return (self.num_speculative_tokens or 0) + 1


@dataclass(frozen=True)
class _Launched:
    requests: Sequence[Request]
    number: int
    width: int
    num_speculative_tokens: int | None
    is_timed: bool


class InFlight:
    """Steps under way, oldest first.

    Args:
        max_lag: Steps that may be under way when the next one is launched: 0 reads every record
            before anything else happens, 1 hides the host's work behind the device's.
        max_num_rows: Rows of the largest step.
        max_width: Integers of a row of the widest record.
    """

    def __init__(
        self, max_lag: int, *, max_num_rows: int, max_width: int, device: torch.device
    ) -> None:
        self.max_lag = max_lag
        self._steps: deque[_Launched] = deque()
        self._num_launched = 0
        num_buffers, on_gpu = _LARGEST_LAG + 1, device.type == "cuda"
        self._buffers = torch.zeros(
            (num_buffers, max_num_rows * max_width), dtype=torch.int32, pin_memory=on_gpu
        )
        self._ends = [_End(on_gpu) for _ in range(num_buffers + 1)]

    def __len__(self) -> int:
        """Steps under way."""
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        """Whether a record must be read before another step is launched."""
        return len(self._steps) > self.max_lag

    def push(
        self,
        requests: Sequence[Request],
        record: torch.Tensor,
        num_speculative_tokens: int | None,
        *,
        is_timed: bool = True,
    ) -> None:
        """Have the record of the step just launched copied to the host.

        Args:
            requests: The rows of the step.
            record: Int32 [R or more, width], on the device; its first R rows are theirs.
            num_speculative_tokens: The k of a decode step; None for a prefill step.
            is_timed: Whether the time until its end says how long such a step takes.
        """
        assert len(self._steps) <= _LARGEST_LAG, "a record would overwrite one that is not read"
        num_rows, width = len(requests), record.shape[1]
        self._num_launched += 1
        self._view(self._num_launched, num_rows, width).copy_(record[:num_rows], non_blocking=True)
        self._end(self._num_launched).mark()
        self._steps.append(
            _Launched(requests, self._num_launched, width, num_speculative_tokens, is_timed)
        )

    def pop(self) -> ReadStep:
        """Wait for the oldest step and read its record."""
        step = self._steps.popleft()
        end = self._end(step.number)
        end.wait()
        records = unpack_record(self._view(step.number, len(step.requests), step.width))
        seconds = None
        if step.is_timed and step.number > 1:
            seconds = end.since(self._end(step.number - 1))
        return ReadStep(step.requests, records, step.num_speculative_tokens, seconds)

    def clear(self) -> None:
        """Forget steps whose rows have all ended: they changed nothing."""
        self._steps.clear()

    def _view(self, number: int, num_rows: int, width: int) -> torch.Tensor:
        buffer = self._buffers[number % len(self._buffers)]
        return buffer[: num_rows * width].view(num_rows, width)

    def _end(self, number: int) -> _End:
        return self._ends[number % len(self._ends)]


class _End:
    """The moment at which a step and the copy of its record are done."""

    def __init__(self, on_gpu: bool) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self._time = 0.0

    def mark(self) -> None:
        """Take the end of what was launched so far."""
        if self._event is not None:
            self._event.record()
        else:
            self._time = time.perf_counter()

    def wait(self) -> None:
        """Wait for it."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: _End) -> float:
        """Seconds from an earlier end; both have come."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1e3

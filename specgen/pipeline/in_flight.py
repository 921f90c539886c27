"""Steps that the device was given and whose records the host has not read.

A step is launched before the record of the one before it is read, so the device goes from step to
step while the host accounts for an earlier one. Each record is copied to one of a few pinned
buffers in stream order behind its step; an event tells when it has arrived. The copy stands between
two steps, so a step may overwrite the tensor that its predecessor's record was made in.
"""

from __future__ import annotations

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
        max_num_tokens: The most tokens that it may have added to a row.
    """

    requests: Sequence[Request]
    records: Sequence[RowRecord]
    max_num_tokens: int


@dataclass(frozen=True)
class _Launched:
    requests: Sequence[Request]
    buffer: int
    width: int
    max_num_tokens: int


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
        self._events = [torch.cuda.Event() for _ in range(num_buffers)] if on_gpu else None

    def __len__(self) -> int:
        """Steps under way."""
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        """Whether a record must be read before another step is launched."""
        return len(self._steps) > self.max_lag

    def push(self, requests: Sequence[Request], record: torch.Tensor, max_num_tokens: int) -> None:
        """Have the record of the step just launched copied to the host.

        Args:
            requests: The rows of the step.
            record: Int32 [R or more, width], on the device; its first R rows are theirs.
            max_num_tokens: The most tokens that the step may add to a row.
        """
        assert len(self._steps) <= _LARGEST_LAG, "a record would overwrite one that is not read"
        num_rows, width = len(requests), record.shape[1]
        buffer = self._num_launched % len(self._buffers)
        self._num_launched += 1
        self._view(buffer, num_rows, width).copy_(record[:num_rows], non_blocking=True)
        if self._events is not None:
            self._events[buffer].record()
        self._steps.append(_Launched(requests, buffer, width, max_num_tokens))

    def pop(self) -> ReadStep:
        """Wait for the oldest step and read its record."""
        step = self._steps.popleft()
        if self._events is not None:
            self._events[step.buffer].synchronize()
        records = unpack_record(self._view(step.buffer, len(step.requests), step.width))
        return ReadStep(step.requests, records, step.max_num_tokens)

    def clear(self) -> None:
        """Forget steps whose rows have all ended: they changed nothing."""
        self._steps.clear()

    def _view(self, buffer: int, num_rows: int, width: int) -> torch.Tensor:
        return self._buffers[buffer, : num_rows * width].view(num_rows, width)

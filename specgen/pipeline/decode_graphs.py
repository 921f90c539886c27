"""Decode steps as CUDA graphs: one for every (batch bucket, step variant), captured on first use.

A decode step has no input but the slot ids: everything else is a persistent device row. So a graph
needs one static buffer, and a batch is padded to its bucket with slot -1, which is inert. In most
steps the rows are those of the step before: then there is nothing to upload.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from specgen.pipeline.cuda_capture import Capture
from specgen.pipeline.uploads import pinned

__all__ = ["DecodeGraphs", "DecodeStep", "batch_buckets"]

DecodeStep = Callable[[torch.Tensor], torch.Tensor]
"""A step as a function of its slot ids; returns its record."""
logger = logging.getLogger(__name__)

# What a capture costs, in steps: as many may be wasted on padding before one is made.
_STEPS_OF_A_CAPTURE = 8.0


def batch_buckets(largest: int, sizes_per_doubling: int = 4) -> tuple[int, ...]:
    """Batch sizes to capture: 1, 2, 4, 8, 16, then so many up to each doubling, up to ``largest``.

    With four, 16, 20, 24, 28, 32, 40, 48, ...: steps of at most one quarter bound the padding while
    a batch drains. With fewer, fewer captures are made.
    """
    sizes = [1, 2, 4, 8]
    size = 16
    while size < largest:
        sizes += [size + size * i // sizes_per_doubling for i in range(sizes_per_doubling)]
        size *= 2
    return (*(size for size in sizes if size < largest), largest)


@dataclass
class _Captured:
    """A captured step with its two static tensors: the slots it reads, the record it writes."""

    replay: Callable[[], None]
    slots: torch.Tensor
    record: torch.Tensor
    held: list[int] = field(default_factory=list)  # what ``slots`` holds, before padding


class DecodeGraphs:
    """Captures decode steps on first use and replays them.

    Args:
        max_num_seqs: The largest batch.
        device: Where the steps run.
        capture: How they are captured.
    """

    def __init__(self, max_num_seqs: int, device: torch.device, capture: Capture) -> None:
        self._device = device
        self._capture = capture
        self._buckets = batch_buckets(max_num_seqs)
        self._graphs: dict[tuple[int, Hashable], _Captured] = {}
        self._wasted: dict[tuple[int, Hashable], float] = {}
        self.captures_every_size = False
        """Whether each batch size gets its graph when it first occurs, whatever that costs."""

    @property
    def max_num_rows(self) -> int:
        """The largest batch that can be run; less than there was after memory ran out."""
        return self._buckets[-1]

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far and not forgotten."""
        return len(self._graphs)

    def bucket(self, num_rows: int) -> int:
        """The smallest captured batch size that holds ``num_rows``.

        Raises:
            torch.OutOfMemoryError: there is none, since memory ran out for larger ones.
        """
        for size in self._buckets:
            if size >= num_rows:
                return size
        raise torch.OutOfMemoryError(f"no CUDA graph holds {num_rows} rows")

    def clear(self) -> None:
        """Forget all graphs, after a persistent tensor was replaced; waits for those that run."""
        if self._graphs and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._wasted.clear()

    def run(
        self, slots: Sequence[int], variant: Hashable, step: DecodeStep, *, exact: bool = False
    ) -> torch.Tensor:
        """Replay the step for the rows of ``slots``; capture it if it is new.

        A batch that shrinks, as at the end of a file, passes through many sizes quickly: it goes on
        in a larger graph until the padding has cost as much as a capture.

        Args:
            slots: One a row of the batch.
            variant: What else the captured work depends on (draft length, filters).
            step: The step, as a function of the slot ids on the device (int32 [B], -1 inert).
            exact: Whether to run in the batch's own bucket in any case.

        Returns:
            The step's record; overwritten by the next replay of the same graph.

        Raises:
            torch.OutOfMemoryError: there is no room for a new graph; a batch as large will not be
                tried again, unless it is the smallest.
        """
        size = self.bucket(len(slots))
        if not (exact or self.captures_every_size):
            size = self._size_to_run(size, variant)
        captured = self._graphs.get((size, variant))
        if captured is None:
            captured = self._graphs[size, variant] = self._capture_step(size, step)
        if captured.held != slots:
            captured.held = list(slots)
            padded = np.full(size, -1, dtype=np.int32)
            padded[: len(slots)] = slots
            captured.slots.copy_(pinned(padded, self._device), non_blocking=True)
        captured.replay()
        return captured.record

    def _size_to_run(self, size: int, variant: Hashable) -> int:
        """A bucket to run instead of one that has no graph yet, as long as that is cheaper."""
        if (size, variant) in self._graphs:
            return size
        larger = next((s for s in self._buckets if s > size and (s, variant) in self._graphs), None)
        if larger is None:
            return size
        wasted = self._wasted.get((size, variant), 0.0) + 1.0 - size / larger
        self._wasted[size, variant] = wasted
        return larger if wasted < _STEPS_OF_A_CAPTURE else size

    def _capture_step(self, size: int, step: DecodeStep) -> _Captured:
        try:
            slots = torch.full((size,), -1, dtype=torch.int32, device=self._device)
            replay, record = self._capture(partial(step, slots))
        except torch.OutOfMemoryError:
            self._give_up(size)
            raise
        return _Captured(replay, slots, record)

    def _give_up(self, size: int) -> None:
        """Do without batches of this size and larger ones."""
        smaller = tuple(bucket for bucket in self._buckets if bucket < size)
        if not smaller:
            return
        self._buckets = smaller
        logger.warning(
            "memory ran out as the step of %d rows was captured: at most %d rows will run at a "
            "time (a lower --gpu-memory-utilization leaves more to graphs)",
            size,
            smaller[-1],
        )

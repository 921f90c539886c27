"""Decode steps as CUDA graphs: one for every (batch bucket, step variant), captured on first use.

A decode step has no input but the slot ids: everything else is a persistent device row. So a graph
needs one static buffer, and a batch is padded to its bucket with slot -1, which is inert. In most
steps the rows are those of the step before: then there is nothing to upload.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specgen.pipeline.uploads import pinned

DecodeStep = Callable[[torch.Tensor], torch.Tensor]


def batch_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to capture: 1, 2, 4, 8, then 16, 24, 32, 48, 64, 96, ... up to the largest.

    Steps of at most one half bound the padding, and their number bounds the time that captures
    take while a batch drains.
    """
    sizes = [1, 2, 4, 8]
    size = 16
    while size < max_num_seqs:
        sizes += [size, size + size // 2]
        size *= 2
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


@dataclass
class _Captured:
    """A graph with its two static tensors: the slots it reads and the record it writes."""

    graph: torch.cuda.CUDAGraph
    slots: torch.Tensor
    record: torch.Tensor
    held: list[int] = field(default_factory=list)  # what ``slots`` holds, before padding


class DecodeGraphs:
    """Captures and replays decode steps on the current CUDA device.

    Args:
        max_num_seqs: The largest batch.
        device: A CUDA device.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._device = device
        self._buckets = batch_buckets(max_num_seqs)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, _Captured] = {}

    def bucket(self, num_rows: int) -> int:
        """The smallest captured batch size that holds ``num_rows``."""
        return next(size for size in self._buckets if size >= num_rows)

    def clear(self) -> None:
        """Forget all graphs, after a persistent tensor was replaced; waits for those that run."""
        if self._graphs:
            torch.cuda.synchronize(self._device)
        self._graphs.clear()

    def run(self, slots: Sequence[int], variant: Hashable, step: DecodeStep) -> torch.Tensor:
        """Replay the step for the rows of ``slots``; capture it if it is new.

        Args:
            slots: One a row of the batch.
            variant: What else the captured work depends on (draft length, filters).
            step: The step, as a function of the slot ids on the device (int32 [B], -1 inert).

        Returns:
            The step's record; overwritten by the next replay of the same graph.
        """
        size = self.bucket(len(slots))
        key = (size, variant)
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._graphs[key] = self._capture(size, step)
        if captured.held != slots:
            captured.held = list(slots)
            padded = np.full(size, -1, dtype=np.int32)
            padded[: len(slots)] = slots
            captured.slots.copy_(pinned(padded, self._device), non_blocking=True)
        captured.graph.replay()
        return captured.record

    def _capture(self, size: int, step: DecodeStep) -> _Captured:
        # All rows inert: the warm-up compiles kernels and touches no request.
        slots = torch.full((size,), -1, dtype=torch.int32, device=self._device)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            step(slots)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            record = step(slots)
        return _Captured(graph, slots, record)

"""Decode steps as CUDA graphs: one for every (batch bucket, step variant), captured on first use.

A decode step has no input but the slot ids: everything else is a persistent device row. So a graph
needs one static buffer, and a batch is padded to its bucket with slot -1, which is inert.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

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
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}

    def bucket(self, num_rows: int) -> int:
        """The smallest captured batch size that holds ``num_rows``."""
        return next(size for size in self._buckets if size >= num_rows)

    def clear(self) -> None:
        """Forget all graphs, after a persistent tensor was replaced."""
        self._graphs.clear()

    def run(self, slot_ids: torch.Tensor, variant: Hashable, step: DecodeStep) -> torch.Tensor:
        """Replay the step for ``slot_ids`` (int32 [B], host); capture it if it is new.

        Args:
            variant: What else the captured work depends on (draft length, filters).
            step: The step, as a function of the slot ids on the device.

        Returns:
            The step's record; overwritten by the next replay of the same graph.
        """
        size = self.bucket(slot_ids.numel())
        padded = torch.full((size,), -1, dtype=torch.int32)
        padded[: slot_ids.numel()] = slot_ids
        key = (size, variant)
        if key not in self._graphs:
            self._graphs[key] = self._capture(size, step)
        graph, graph_slots, record = self._graphs[key]
        graph_slots.copy_(padded.pin_memory(), non_blocking=True)
        graph.replay()
        return record

    def _capture(
        self, size: int, step: DecodeStep
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
        # All rows inert: the warm-up compiles kernels and touches no request.
        graph_slots = torch.full((size,), -1, dtype=torch.int32, device=self._device)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            step(graph_slots)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            record = step(graph_slots)
        return graph, graph_slots, record

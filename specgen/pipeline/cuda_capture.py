"""Capturing work on fixed tensors as a CUDA graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

__all__ = ["Capture", "CudaCapture", "SideStream"]

T = TypeVar("T")


class Capture(Protocol):
    """Makes of a step on fixed tensors what repeats it, and what every repetition overwrites."""

    def __call__(self, step: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Run the step once to warm up, then capture it.

        Args:
            step: must touch no request, as when all its rows are inert.

        Returns:
            What repeats the step, and the step's result, which every repetition overwrites.

        Raises:
            torch.OutOfMemoryError: there is no room for it.
        """


class CudaCapture:
    """Captures work as CUDA graphs, whose temporaries share one pool of memory.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # Work of a side stream, whose priority is the usual one, is to fill what a step leaves.
        self._stream = torch.cuda.Stream(device, priority=-1)
        # A pool ends with the last graph that uses it; nothing can be captured into it then.
        self._living: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def __call__(self, step: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """See :class:`Capture`."""
        if not self._living:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._stream)
        # The warm-up compiles kernels. It runs in the stream of captures, since every stream that
        # products ran in keeps a workspace for good.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            step()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        try:
            with capture:
                made = step()
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
        else:
            self._living.add(graph)
            return graph.replay, made
        # Outside the handler: what the error's frames hold is let go of first.
        raise torch.OutOfMemoryError("no memory for a CUDA graph")


class SideStream:
    """Work that a captured step does beside its own, in a branch of the graph.

    Outside a capture the work is done in its turn.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def fork(self, work: Callable[[], T]) -> T:
        """Start what depends on nothing that follows; its result is there after :meth:`join`."""
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return work()
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            return work()

    def join(self) -> None:
        """Wait for what was started, as every captured step has to."""
        if self._stream is not None and torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(self._stream)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out; ending a capture that failed fails too, and hides what came first."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__context__
    return error is not None

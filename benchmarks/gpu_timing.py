"""Times of kernels on a GPU, free of launches: many calls in one CUDA graph, replayed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

import torch


def graph_us(calls: Callable[[], object], num_calls: int = 1, num_replays: int = 7) -> float:
    """Median microseconds of one of the ``num_calls`` that ``calls`` makes.

    Give every call inputs of its own where they would fit the L2 cache: a step reads each weight
    once.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls()  # compiles, and lets the libraries choose
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(events)]
    return statistics.median(times) * 1e3 / num_calls


def copy_bandwidth() -> float:
    """Bytes a second that a large copy reads and writes: what other numbers are held against.

    By a kernel: in a graph, `Tensor.copy_` becomes a node for the copy engines, which are slower.
    """
    source = torch.randn(1 << 28, device="cuda")  # 1 GB
    target = torch.empty_like(source)
    return 2 * source.nbytes / (graph_us(lambda: torch.add(source, 1.0, out=target)) * 1e-6)

"""Buckets, what is uploaded, and what happens without memory; the capture itself needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from specgen.pipeline.decode_graphs import DecodeGraphs, batch_buckets

CPU = torch.device("cpu")


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8, 15, 16, 17, 64, 100, 256, 1024])
def test_buckets_rise_to_the_largest_batch_with_bounded_padding(max_num_seqs: int) -> None:
    buckets = batch_buckets(max_num_seqs)
    assert buckets[-1] == max_num_seqs
    assert list(buckets) == sorted(set(buckets))
    for smaller, larger in pairwise(buckets):
        assert larger <= (2 * smaller if smaller < 16 else 1.25 * smaller)
    assert len(buckets) <= 32
    halves = batch_buckets(max_num_seqs, 2)
    assert set(halves) <= set(buckets)
    assert all(larger <= 2 * smaller for smaller, larger in pairwise(halves))


def repeat(step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Like a graph: runs the step on the same slots again and overwrites the same record."""
    record = step()

    def replay() -> None:
        record.copy_(step())

    return replay, record


def echo(slots: torch.Tensor) -> torch.Tensor:
    return slots[:, None].clone()


def test_a_batch_is_padded_to_its_bucket_and_a_graph_serves_all_batches_of_it() -> None:
    graphs = DecodeGraphs(16, CPU, repeat)
    for slots in ([4, 2, 9], [4, 2, 9], [9, 4], [1, 2, 3, 4], [3], [4, 2, 9], [5, 6, 7]):
        record = graphs.run(slots, "plain", echo, exact=True)
        size = graphs.bucket(len(slots))
        assert record[:, 0].tolist() == slots + [-1] * (size - len(slots))


def test_variants_do_not_share_a_graph() -> None:
    graphs = DecodeGraphs(4, CPU, repeat)
    assert graphs.run([1], 0, echo)[0, 0] == 1
    assert graphs.run([1], 1, lambda slots: echo(slots) + 10)[0, 0] == 11
    assert graphs.run([1], 0, echo)[0, 0] == 1


def test_what_is_forgotten_is_captured_again() -> None:
    graphs = DecodeGraphs(4, CPU, repeat)
    graphs.run([3, 1], 0, echo)
    graphs.clear()
    assert graphs.run([3, 1], 0, lambda slots: echo(slots) + 5)[:, 0].tolist() == [8, 6]


def test_memory_that_runs_out_lowers_the_largest_bucket_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def crowded(step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        if step().numel() > 8:
            raise torch.OutOfMemoryError("injected")
        return repeat(step)

    graphs = DecodeGraphs(32, CPU, crowded)
    for num_rows, left in ((20, 16), (16, 8)):
        with pytest.raises(torch.OutOfMemoryError):
            graphs.run(list(range(num_rows)), 0, echo)
        assert graphs.max_num_rows == left
        assert f"at most {left} rows" in caplog.messages[-1]
    assert len(graphs.run(list(range(8)), 0, echo)) == 8


def test_the_smallest_bucket_is_never_given_up(caplog: pytest.LogCaptureFixture) -> None:
    def full(step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        raise torch.OutOfMemoryError("injected")

    graphs = DecodeGraphs(4, CPU, full)
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            graphs.run([0], 0, echo)
    assert graphs.max_num_rows == 4
    assert not caplog.messages


def sizes_run(graphs: DecodeGraphs, batches: list[int], *, exact: bool = False) -> list[int]:
    """How many rows each batch was padded to."""
    return [len(graphs.run(list(range(n)), 0, echo, exact=exact)) for n in batches]


def test_a_batch_that_shrinks_goes_on_in_a_larger_graph_until_a_capture_would_pay() -> None:
    graphs = DecodeGraphs(64, CPU, repeat)
    assert sizes_run(graphs, [64, 40, 33, 20, 9, 3, 1]) == [64] * 7
    # Nearly empty: seven eighths of each step are wasted, the eighth time around.
    ran = sizes_run(graphs, [8] * 12)
    assert ran[0] == 64
    assert ran[-1] == 8
    assert ran == sorted(ran, reverse=True)
    wasted = sum(1 - 8 / size for size in ran)
    assert 7 <= wasted < 9
    # From now on the smallest of the larger ones is taken.
    assert sizes_run(graphs, [4, 40, 8]) == [8, 64, 8]
    # A batch that stays is served by its own graph in the end, however little it saves.
    assert sizes_run(graphs, [48] * 40)[-1] == 48


def test_a_larger_graph_of_another_variant_is_no_help() -> None:
    graphs = DecodeGraphs(8, CPU, repeat)
    graphs.run(list(range(8)), "plain", echo)
    assert len(graphs.run([1], "drafts", echo)) == 1


def test_while_warming_up_every_size_gets_its_graph() -> None:
    graphs = DecodeGraphs(64, CPU, repeat)
    graphs.captures_every_size = True
    assert sizes_run(graphs, [64, 37, 9]) == [64, 40, 16]
    graphs.captures_every_size = False
    assert sizes_run(graphs, [64, 40, 20, 9]) == [64, 40, 40, 16]


def test_what_is_timed_runs_in_its_own_bucket() -> None:
    graphs = DecodeGraphs(64, CPU, repeat)
    assert sizes_run(graphs, [64]) == [64]
    assert sizes_run(graphs, [1, 16, 32], exact=True) == [1, 16, 32]

"""Records on their way to the host: each is read whole, once and in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specgen.kernels.batch_types import FINISH_LENGTH, RUNNING
from specgen.pipeline.in_flight import InFlight
from specgen.pipeline.step_record import RowRecord, record_width, unpack_record

K = 3


def make(lag: int, device: str, max_num_rows: int = 8) -> InFlight:
    return InFlight(
        lag, max_num_rows=max_num_rows, max_width=record_width(K), device=torch.device(device)
    )


def record_of(step: int, num_rows: int, k: int, device: str) -> torch.Tensor:
    values = torch.arange(num_rows * record_width(k), dtype=torch.int32, device=device)
    record = values.view(num_rows, record_width(k)) + 1000 * step
    record[:, -2] = k + 1  # committed
    return record


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_every_record_arrives_although_its_tensor_is_overwritten(lag: int, device: str) -> None:
    """As a graph does: the next replay writes into the tensor of the record before it."""
    in_flight = make(lag, device)
    graph_output = torch.empty((8, record_width(K)), dtype=torch.int32, device=device)
    read = []
    for step in range(20):
        num_rows = 1 + step % 8
        graph_output.fill_(-7)
        graph_output[:num_rows] = record_of(step, num_rows, K, device)
        in_flight.push([f"{step}/{row}" for row in range(num_rows)], graph_output, K)  # type: ignore[misc]
        if in_flight.is_full:
            read.append(in_flight.pop())
    assert len(in_flight) == lag
    while in_flight:
        read.append(in_flight.pop())
    for step, got in enumerate(read):
        num_rows = 1 + step % 8
        assert got.requests == [f"{step}/{row}" for row in range(num_rows)]
        assert got.records == unpack_record(record_of(step, num_rows, K, "cpu"))
        assert got.max_num_tokens == K + 1


def test_records_of_other_widths_share_the_buffers(device: str) -> None:
    in_flight = make(2, device)
    steps: list[tuple[int, int]] = [(8, 0), (0, 2), (3, K), (8, 1), (1, 0), (8, K)]
    for at in range(0, len(steps), 3):
        for step, (num_rows, k) in enumerate(steps[at : at + 3]):
            rows: list[Any] = list(range(num_rows))
            in_flight.push(rows, record_of(step, max(num_rows, 1), k, device), k)
        for step, (num_rows, k) in enumerate(steps[at : at + 3]):
            expected = record_of(step, num_rows, k, "cpu")
            assert in_flight.pop().records == unpack_record(expected)


def test_a_record_that_is_not_read_is_never_overwritten(device: str) -> None:
    in_flight = make(2, device)
    record = record_of(0, 1, 0, device)
    for _ in range(3):
        in_flight.push([None], record, 0)  # type: ignore[list-item]
    with pytest.raises(AssertionError, match="overwrite"):
        in_flight.push([None], record, 0)  # type: ignore[list-item]


def test_a_record_says_what_was_committed() -> None:
    packed = torch.tensor(
        [[5, 6, -1, 2, 2, 1, FINISH_LENGTH], [7, -1, -1, 1, 1, 1, RUNNING], [-1] * 4 + [-1, 0, 0]],
        dtype=torch.int32,
    )
    packed[2, 3] = 0
    assert packed.shape == (3, record_width(2))
    assert unpack_record(packed) == [
        RowRecord([5], 2, 2, FINISH_LENGTH),
        RowRecord([7], 1, 1, RUNNING),
        RowRecord([], 0, -1, RUNNING),
    ]


def test_a_step_that_is_not_timed_says_no_time(device: str) -> None:
    in_flight = make(1, device)
    for step in range(3):
        in_flight.push([None], record_of(step, 1, K, device), K, is_timed=step != 1)  # type: ignore[list-item]
        if in_flight.is_full:
            in_flight.pop()
    assert in_flight.pop().seconds is not None
    for is_timed in (True, False, True):
        in_flight.push([None], record_of(0, 1, K, device), K, is_timed=is_timed)  # type: ignore[list-item]
        assert (in_flight.pop().seconds is not None) == is_timed

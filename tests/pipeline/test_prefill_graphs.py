"""Captured passes over prompt tokens: their sizes, what they are fed, and what happens without
memory; the capture itself needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specgen.models.attention import AttentionMetadata
from specgen.pipeline.prefill_graphs import PrefillGraphs, most_prefill_tokens
from specgen.pipeline.uploads import upload_together

MAX_NUM_SEQS, MAX_CONTEXT_LEN = 3, 99


def repeat(step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Like a graph: runs the pass on the same tensors again and overwrites its results."""
    made = step()

    def replay() -> None:
        made[0].copy_(step()[0])

    return replay, made


def batch(
    token_ids: list[int], size: int
) -> tuple[torch.Tensor, AttentionMetadata, AttentionMetadata]:
    """One row of these tokens, padded to ``size``."""
    count, num_rows = len(token_ids), min(size, MAX_NUM_SEQS)

    def ints(*values: int, fill: int = 0, length: int = size) -> torch.Tensor:
        return torch.tensor([*values, *[fill] * (length - len(values))], dtype=torch.int32)

    metadata = AttentionMetadata(
        positions=ints(*range(count)),
        slot_mapping=ints(*range(count), fill=-1).long(),
        block_tables=torch.zeros(4, 4, dtype=torch.int32),
        slot_ids=ints(2, fill=-1, length=num_rows),
        first_positions=ints(length=num_rows),
        context_lens=ints(count, length=num_rows),
        query_len=0,
        max_query_len=count,
        max_context_len=count,
        query_start_loc=ints(0, fill=count, length=num_rows + 1),
    )
    last = ints(fill=count - 1, length=num_rows)
    return ints(*token_ids), metadata, metadata.of_last_tokens(last.long(), last)


def echo(
    input_ids: torch.Tensor, metadata: AttentionMetadata, last: AttentionMetadata
) -> tuple[torch.Tensor, None]:
    """All that a pass reads, side by side."""
    assert metadata.query_start_loc is not None
    assert last.query_idx is not None
    assert metadata.max_query_len == input_ids.numel()
    assert metadata.max_context_len == MAX_CONTEXT_LEN
    by_row = (metadata.slot_ids, metadata.first_positions, metadata.context_lens)
    read = (input_ids, metadata.positions, metadata.slot_mapping, *by_row)
    of_last = (last.query_idx, last.first_positions)
    return torch.cat((*read, metadata.query_start_loc, *of_last)), None


def graphs(largest: int = 64, capture: Callable[..., Any] = repeat) -> PrefillGraphs:
    return PrefillGraphs(largest, MAX_NUM_SEQS, MAX_CONTEXT_LEN, capture)


def test_a_batch_is_padded_to_the_next_size_and_not_beyond_the_largest() -> None:
    sizes = [graphs(100).padded_size(n) for n in (1, 16, 17, 49, 65, 97, 100, 101)]
    assert sizes == [(16, 3), (16, 3), (24, 3), (64, 3), (96, 3), (100, 3), (100, 3), None]
    one_row = PrefillGraphs(64, 1, MAX_CONTEXT_LEN, repeat)
    assert one_row.padded_size(40) == (48, 1)


@pytest.mark.parametrize(
    ("num_weights", "num_layers", "tokens"),
    [(8_030_000_000, 32, 1195), (12_000_000, 8, 8192), (400_000_000_000, 80, 60), (10**15, 1, 16)],
)
def test_the_largest_size_depends_on_how_long_a_layer_computes(
    num_weights: int, num_layers: int, tokens: int
) -> None:
    assert most_prefill_tokens(num_weights, num_layers) == tokens


def test_every_replay_reads_its_own_batch() -> None:
    prefill = graphs()
    for tokens in ([5, 6, 7], list(range(20)), [9], list(range(16)), [5, 6, 7]):
        size = prefill.padded_size(len(tokens))
        assert size is not None
        input_ids, metadata, last = batch(tokens, size[0])
        done = prefill.run(input_ids, metadata, last, echo)
        assert done is not None
        slots = metadata.slot_mapping
        assert done[0][: size[0]].tolist() == input_ids.tolist()
        assert done[0][2 * size[0] : 3 * size[0]].tolist() == slots.tolist()
        assert done[0][3 * size[0] :].tolist() == [
            *metadata.slot_ids.tolist(),
            *metadata.first_positions.tolist(),
            *metadata.context_lens.tolist(),
            *metadata.query_start_loc.tolist(),  # type: ignore[union-attr]
            *last.query_idx.tolist(),  # type: ignore[union-attr]
            *last.first_positions.tolist(),
        ]


def test_a_capture_runs_over_nothing_but_padding() -> None:
    seen: list[torch.Tensor] = []

    def look(
        input_ids: torch.Tensor, metadata: AttentionMetadata, _: AttentionMetadata
    ) -> tuple[torch.Tensor, None]:
        seen.append(torch.cat((metadata.slot_mapping, metadata.slot_ids)).clone())
        return input_ids.clone(), None

    graphs().run(*batch([1, 2, 3], 16), look)
    assert (seen[0] == -1).all()
    assert not (seen[1] == -1).all()


def test_a_batch_of_no_captured_size_is_left_to_the_caller() -> None:
    assert graphs(64).run(*batch([1] * 70, 70), echo) is None


def test_memory_that_runs_out_gives_up_that_size_and_larger_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def crowded(step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        if step()[0].numel() > 100:
            raise torch.OutOfMemoryError("injected")
        return repeat(step)

    prefill = graphs(capture=crowded)
    assert prefill.run(*batch([1] * 40, 48), echo) is None
    assert "48 prompt tokens" in caplog.messages[-1]
    assert prefill.padded_size(40) is None
    assert prefill.padded_size(20) == (24, 3)
    assert prefill.run(*batch([1] * 20, 24), echo) is not None


def test_what_is_forgotten_is_captured_again() -> None:
    prefill = graphs()
    prefill.run(*batch([1], 16), echo)
    prefill.clear()

    def other(input_ids: torch.Tensor, *_: AttentionMetadata) -> tuple[torch.Tensor, None]:
        return input_ids + 5, None

    done = prefill.run(*batch([1, 2], 16), other)
    assert done is not None
    assert done[0][:2].tolist() == [6, 7]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_arrays_that_go_up_together_come_apart_as_they_were(dtype: Any) -> None:
    arrays = [
        np.arange(5, dtype=dtype),
        np.zeros(0, dtype=dtype),
        np.arange(6, dtype=dtype).reshape(3, 2),
        np.arange(1, dtype=dtype),
    ]
    tensors = upload_together(arrays, torch.device("cpu"))
    for array, tensor in zip(arrays, tensors, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
    base = tensors[0].data_ptr()
    assert all((tensor.data_ptr() - base) % 16 == 0 for tensor in tensors if tensor.numel())

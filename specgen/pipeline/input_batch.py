"""The tensors of one prefill step, packed on the host and uploaded at once.

(A decode step has no such thing: its inputs come from the device rows.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specgen.models.attention import AttentionMetadata
from specgen.pipeline import uploads
from specgen.pipeline.request_state import RequestState
from specgen.pipeline.scheduler import PrefillChunk


@dataclass(frozen=True)
class PrefillBatch:
    """R chunks of prompts, T tokens in all.

    Attributes:
        input_ids: int32 [T].
        next_ids: int32 [T], each token's successor, which the draft pairs with its feature; 0 where
            the step itself samples it.
        fresh_slots, fresh_idx: slots (int32) and last-token rows (int64) of the requests whose
            first output token this step samples.
        resumed_slots, resumed_idx: the same for requests that re-enter decode.
        needs_filter: whether a fresh request has top-k or top-p on.
    """

    input_ids: torch.Tensor
    next_ids: torch.Tensor
    metadata: AttentionMetadata
    fresh_slots: torch.Tensor
    fresh_idx: torch.Tensor
    resumed_slots: torch.Tensor
    resumed_idx: torch.Tensor
    needs_filter: bool


def build_prefill_batch(
    chunks: Sequence[PrefillChunk], state: RequestState, block_size: int
) -> PrefillBatch:
    """Pack ``chunks`` and upload them to the state's device."""
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    input_ids = np.empty(num_tokens, dtype=np.int32)
    next_ids = np.zeros(num_tokens, dtype=np.int32)
    positions = np.empty(num_tokens, dtype=np.int32)
    slot_mapping = np.empty(num_tokens, dtype=np.int64)
    query_start_loc = np.zeros(len(chunks) + 1, dtype=np.int32)
    rows = np.empty((3, len(chunks)), dtype=np.int32)  # slot, first position, context length
    fresh: list[tuple[int, int]] = []
    resumed: list[tuple[int, int]] = []
    at = 0
    for row, chunk in enumerate(chunks):
        request, start, stop = chunk.request, chunk.start, chunk.start + chunk.num_tokens
        assert request.slot is not None, "a scheduled request has a slot"
        span = slice(at, at + chunk.num_tokens)
        # One token more than the chunk, where it is known: the successor of its last token.
        tokens = request.token_ids(start, min(stop + 1, request.num_tokens))
        input_ids[span] = tokens[: chunk.num_tokens]
        next_ids[at : at + len(tokens) - 1] = tokens[1:]
        span_positions = np.arange(start, stop, dtype=np.int64)
        positions[span] = span_positions
        block_ids = np.asarray(request.block_ids, dtype=np.int64)
        slot_mapping[span] = (
            block_ids[span_positions // block_size] * block_size + span_positions % block_size
        )
        at += chunk.num_tokens
        query_start_loc[row + 1] = at
        rows[:, row] = (request.slot, start, stop)
        if chunk.is_last:
            (resumed if request.is_resuming else fresh).append((request.slot, at - 1))

    def upload(array: np.ndarray) -> torch.Tensor:
        return uploads.upload(array, state.device)

    def split(pairs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return upload(array[:, 0].astype(np.int32)), upload(array[:, 1].copy())

    device_rows = upload(rows)
    fresh_slots, fresh_idx = split(fresh)
    resumed_slots, resumed_idx = split(resumed)
    sampled = [c.request for c in chunks if c.is_last and not c.request.is_resuming]
    return PrefillBatch(
        input_ids=upload(input_ids),
        next_ids=upload(next_ids),
        metadata=AttentionMetadata(
            positions=upload(positions),
            slot_mapping=upload(slot_mapping),
            block_tables=state.block_tables,
            slot_ids=device_rows[0],
            first_positions=device_rows[1],
            context_lens=device_rows[2],
            query_len=0,
            query_start_loc=upload(query_start_loc),
            max_query_len=max(chunk.num_tokens for chunk in chunks),
            max_context_len=int(rows[2].max()),
            starts_at_zero=all(chunk.start == 0 for chunk in chunks),
        ),
        fresh_slots=fresh_slots,
        fresh_idx=fresh_idx,
        resumed_slots=resumed_slots,
        resumed_idx=resumed_idx,
        needs_filter=any(request.needs_filter for request in sampled),
    )

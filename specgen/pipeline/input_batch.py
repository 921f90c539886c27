"""The tensors of one prefill step, packed on the host and uploaded at once.

(A decode step has no such thing: its inputs come from the device rows.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specgen.models.attention import AttentionMetadata
from specgen.pipeline.request_state import RequestState
from specgen.pipeline.scheduler import PrefillChunk
from specgen.pipeline.uploads import upload_together


@dataclass(frozen=True)
class PrefillBatch:
    """R chunks of prompts, T tokens in all, padding included.

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
    chunks: Sequence[PrefillChunk],
    state: RequestState,
    block_size: int,
    padded_size: tuple[int, int] | None = None,
) -> PrefillBatch:
    """Pack ``chunks`` and upload them to the state's device.

    Args:
        padded_size: tokens and rows to pad to. Padding tokens stand behind the others and write to
            no slot of the cache; padding rows are empty and have slot -1.
    """
    num_tokens, num_rows = sum(chunk.num_tokens for chunk in chunks), len(chunks)
    if padded_size is not None:
        num_tokens, num_rows = padded_size
    input_ids = np.zeros(num_tokens, dtype=np.int32)
    next_ids = np.zeros(num_tokens, dtype=np.int32)
    positions = np.zeros(num_tokens, dtype=np.int32)
    slot_mapping = np.full(num_tokens, -1, dtype=np.int64)
    query_start_loc = np.zeros(num_rows + 1, dtype=np.int32)
    rows = np.zeros((3, num_rows), dtype=np.int32)  # slot, first position, context length
    rows[0] = -1
    starting: dict[bool, list[tuple[int, int]]] = {False: [], True: []}  # by whether they resume
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
            starting[request.is_resuming].append((request.slot, at - 1))
    query_start_loc[len(chunks) + 1 :] = at

    fresh, resumed = (np.array(starting[key], np.int64).reshape(-1, 2) for key in (False, True))
    narrow = (input_ids, next_ids, positions, rows, query_start_loc)
    slots = (fresh[:, 0].astype(np.int32), resumed[:, 0].astype(np.int32))
    wide = (slot_mapping, fresh[:, 1], resumed[:, 1])
    d_ids, d_next, d_positions, d_rows, d_starts, fresh_slots, resumed_slots = upload_together(
        (*narrow, *slots), state.device
    )
    d_mapping, fresh_idx, resumed_idx = upload_together(wide, state.device)
    sampled = [c.request for c in chunks if c.is_last and not c.request.is_resuming]
    return PrefillBatch(
        input_ids=d_ids,
        next_ids=d_next,
        metadata=AttentionMetadata(
            positions=d_positions,
            slot_mapping=d_mapping,
            block_tables=state.block_tables,
            slot_ids=d_rows[0],
            first_positions=d_rows[1],
            context_lens=d_rows[2],
            query_len=0,
            query_start_loc=d_starts,
            max_query_len=max(chunk.num_tokens for chunk in chunks),
            max_context_len=int(rows[2].max()),
        ),
        fresh_slots=fresh_slots,
        fresh_idx=fresh_idx,
        resumed_slots=resumed_slots,
        resumed_idx=resumed_idx,
        needs_filter=any(request.needs_filter for request in sampled),
    )

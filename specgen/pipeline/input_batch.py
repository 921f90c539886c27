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
        last: as ``metadata``, but only the last token of each row attends.
        next_ids: int32 [T], each token's successor, which the draft pairs with its feature; 0 where
            the step itself samples it.
        fresh_slots, fresh_rows, fresh_idx: slots (int32), rows (int64) and last tokens (int64) of
            the requests whose first output token this step samples.
        resumed_slots, resumed_idx: slots and last tokens of requests that re-enter decode.
        needs_filter: whether a fresh request has top-k or top-p on.
    """

    input_ids: torch.Tensor
    next_ids: torch.Tensor
    metadata: AttentionMetadata
    last: AttentionMetadata
    fresh_slots: torch.Tensor
    fresh_rows: torch.Tensor
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
    # Slot, first position, context length, last position.
    rows = np.zeros((4, num_rows), dtype=np.int32)
    rows[0] = -1
    # Slot, row and last token, by whether they resume.
    starting: dict[bool, list[tuple[int, int, int]]] = {False: [], True: []}
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
        rows[:, row] = (request.slot, start, stop, stop - 1)
        if chunk.is_last:
            starting[request.is_resuming].append((request.slot, row, at - 1))
    query_start_loc[len(chunks) + 1 :] = at

    fresh, resumed = (np.array(starting[key], np.int64).reshape(-1, 3) for key in (False, True))
    narrow = (input_ids, next_ids, positions, rows, query_start_loc)
    slots = (fresh[:, 0].astype(np.int32), resumed[:, 0].astype(np.int32))
    last_idx = np.maximum(query_start_loc[1:] - 1, 0).astype(np.int64)
    wide = (slot_mapping, last_idx, fresh[:, 1], fresh[:, 2], resumed[:, 2])
    d_ids, d_next, d_positions, d_rows, d_starts, fresh_slots, resumed_slots = upload_together(
        (*narrow, *slots), state.device
    )
    d_mapping, d_last_idx, fresh_rows, fresh_idx, resumed_idx = upload_together(wide, state.device)
    metadata = AttentionMetadata(
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
    )
    sampled = [c.request for c in chunks if c.is_last and not c.request.is_resuming]
    return PrefillBatch(
        input_ids=d_ids,
        next_ids=d_next,
        metadata=metadata,
        last=metadata.of_last_tokens(d_last_idx, d_rows[3]),
        fresh_slots=fresh_slots,
        fresh_rows=fresh_rows,
        fresh_idx=fresh_idx,
        resumed_slots=resumed_slots,
        resumed_idx=resumed_idx,
        needs_filter=any(request.needs_filter for request in sampled),
    )

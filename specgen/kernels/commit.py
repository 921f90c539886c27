"""The end of a step on the device, one program a row: cut at stops and lengths, then advance."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.batch_types import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    RUNNING,
    CommitResult,
)
from specgen.kernels.overlap import enter, overlap_options
from specgen.kernels.rows import row_slot

_RUNNING = tl.constexpr(RUNNING)
_STOP = tl.constexpr(FINISH_STOP)
_LENGTH = tl.constexpr(FINISH_LENGTH)
_ERROR = tl.constexpr(FINISH_ERROR)


@triton.jit
def _commit_kernel(
    slot_ids_ptr,
    tokens_ptr,
    num_sampled_ptr,
    ok_ptr,
    num_draft_tokens_ptr,
    stop_ids_ptr,
    max_lens_ptr,
    seq_lens_ptr,
    last_tokens_ptr,
    active_ptr,
    num_committed_ptr,
    finish_ptr,
    record_ptr,
    width,
    num_stops,
    stop_stride,
    WIDTH_PAD: tl.constexpr,
    STOPS_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    enter(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    slot, live = row_slot(slot_ids_ptr, active_ptr, row)
    num_drafts = tl.load(num_draft_tokens_ptr + row)
    live = live & (num_drafts >= 0)
    ok = tl.load(ok_ptr + row) != 0
    num_sampled = tl.load(num_sampled_ptr + row)
    failed = live & (ok == 0)
    live = live & ok & (num_sampled > 0)

    seq_len = tl.load(seq_lens_ptr + slot)
    room = tl.maximum(tl.load(max_lens_ptr + slot) - seq_len, 0)
    count = tl.minimum(num_sampled, room)  # before stops
    i = tl.arange(0, WIDTH_PAD)
    w = tl.arange(0, STOPS_PAD)
    tokens = tl.load(tokens_ptr + row * width + i, mask=i < width, other=-1)
    stops = tl.load(stop_ids_ptr + slot * stop_stride + w, mask=w < num_stops, other=-1)
    # Padding equals padding, but only behind the sampled tokens, where no stop counts.
    is_stop = tokens[:, None] == stops[None, :]
    stop_at = tl.min(tl.where(is_stop, i[:, None], WIDTH_PAD), axis=1)
    stop_at = tl.min(stop_at, axis=0)  # index of the first stop; WIDTH_PAD if none
    stopped = live & (stop_at < count)
    count = tl.where(live, tl.where(stopped, stop_at + 1, count), 0)

    finish = tl.where(live & (count >= room), _LENGTH, _RUNNING)
    finish = tl.where(stopped, _STOP, finish)
    finish = tl.where(failed, _ERROR, finish)

    last = tl.sum(tl.where(i == count - 1, tokens, 0), axis=0)
    tl.store(last_tokens_ptr + slot, last, mask=count > 0)
    tl.store(seq_lens_ptr + slot, seq_len + count, mask=count > 0)
    tl.store(active_ptr + slot, 0, mask=finish != _RUNNING)
    tl.store(num_committed_ptr + row, count)
    tl.store(finish_ptr + row, finish)
    record_ptr += row * (width + 4)
    tl.store(record_ptr + i, tokens, mask=i < width)
    tl.store(record_ptr + width, num_sampled)
    tl.store(record_ptr + width + 1, num_drafts)
    tl.store(record_ptr + width + 2, count)
    tl.store(record_ptr + width + 3, finish)


@triton.jit
def _commit_drafts_kernel(
    slot_ids_ptr,
    tokens_ptr,
    ok_ptr,
    seq_lens_ptr,
    active_ptr,
    draft_limits_ptr,
    draft_tokens_ptr,
    num_draft_tokens_ptr,
    num_rows,
    position_limit,
    draft_stride,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    HAS_POSITION_LIMIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    enter(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ids_ptr + row).to(tl.int64)
    if slot >= 0:
        j = tl.arange(0, K_PAD)
        at = j * num_rows + row
        ok = tl.load(ok_ptr + at, mask=j < K, other=0) != 0
        tokens = tl.load(tokens_ptr + at, mask=ok, other=0)
        count = tl.min(tl.where(ok, K, j), axis=0)  # drafts before the first that broke
        count = tl.minimum(count, tl.load(draft_limits_ptr + slot))
        if HAS_POSITION_LIMIT:  # draft j comes from the pair at position n - 2 + j
            room = position_limit + 2 - tl.load(seq_lens_ptr + slot)
            count = tl.minimum(count, tl.maximum(room, 0))
        count = tl.where(tl.load(active_ptr + slot) != 0, count, 0)
        tl.store(draft_tokens_ptr + slot * draft_stride + j, tokens, mask=j < K)
        tl.store(num_draft_tokens_ptr + slot, count)


def commit_tokens(
    slot_ids: Tensor,
    tokens: Tensor,
    num_sampled: Tensor,
    ok: Tensor,
    num_draft_tokens: Tensor,
    stop_ids: Tensor,
    max_lens: Tensor,
    seq_lens: Tensor,
    last_tokens: Tensor,
    active: Tensor,
) -> CommitResult:
    """Append the tokens of a step to the persistent rows, up to the first stop token or the length
    cap.

    The stop token is kept and counts. A stop token on the last allowed place is a stop, not a
    length. Rows that end are set inactive. No slot may occur twice among the rows that are not
    inert.

    Args:
        slot_ids: int32 `[B]`; -1 for a padding row.
        tokens: int32 `[B, k+1]`, sampled tokens, padded with -1.
        num_sampled: int32 `[B]`; 0 with `ok` true makes the row inert.
        ok: bool `[B]`; false ends the row with an error and commits nothing.
        num_draft_tokens: int32 `[B]`, drafts that were judged; -1 makes the row inert.
        stop_ids: int32 `[S, W]`, padded with -1; W may be 0.
        max_lens: int32 `[S]`, cap on prompt and output tokens together.
        seq_lens: int32 `[S]`, advanced in place.
        last_tokens: int32 `[S]`, set in place.
        active: bool `[S]`, cleared in place for rows that end.

    Returns:
        `CommitResult`.
    """
    batch, width = tokens.shape
    result = CommitResult(
        num_committed=torch.empty((batch,), dtype=torch.int32, device=tokens.device),
        finish=torch.empty((batch,), dtype=torch.int32, device=tokens.device),
        record=torch.empty((batch, width + 4), dtype=torch.int32, device=tokens.device),
    )
    if batch == 0:
        return result
    _commit_kernel[(batch,)](
        slot_ids,
        tokens.contiguous(),
        num_sampled,
        ok.view(torch.uint8),
        num_draft_tokens,
        stop_ids,
        max_lens,
        seq_lens,
        last_tokens,
        active.view(torch.uint8),
        *result,
        width,
        stop_ids.shape[1],
        stop_ids.stride(0),
        WIDTH_PAD=triton.next_power_of_2(width),
        STOPS_PAD=triton.next_power_of_2(max(1, stop_ids.shape[1])),
        num_warps=1,
        **overlap_options(tokens),
    )
    return result


def commit_drafts(
    slot_ids: Tensor,
    tokens: Tensor,
    ok: Tensor,
    seq_lens: Tensor,
    active: Tensor,
    draft_limits: Tensor,
    position_limit: int | None,
    draft_tokens: Tensor,
    num_draft_tokens: Tensor,
) -> None:
    """Write what was drafted for each row to its persistent row.

    A row has as many drafts as came before the first whose logits were unusable, at most its own
    limit; none if it has ended. No slot may occur twice.

    Args:
        slot_ids: int32 `[B]`; -1 for a padding row, which writes nothing.
        tokens: int32 `[k, B]`; k = 0: the rows have no drafts.
        ok: bool `[k, B]`.
        seq_lens: int32 `[S]`, n of each row.
        active: bool `[S]`.
        draft_limits: int32 `[S]`, the most drafts that a row wants.
        position_limit: pairs at positions from this one on draft nothing; None: there is no end.
        draft_tokens: int32 `[S, k_max]`, written in place up to column k; 0 where there is none.
        num_draft_tokens: int32 `[S]`, set in place.
    """
    k, batch = tokens.shape
    if batch == 0:
        return
    _commit_drafts_kernel[(batch,)](
        slot_ids,
        tokens.contiguous(),
        ok.contiguous().view(torch.uint8),
        seq_lens,
        active.view(torch.uint8),
        draft_limits,
        draft_tokens,
        num_draft_tokens,
        batch,
        0 if position_limit is None else position_limit,
        draft_tokens.stride(0),
        K=k,
        K_PAD=triton.next_power_of_2(max(k, 1)),
        HAS_POSITION_LIMIT=position_limit is not None,
        num_warps=1,
        **overlap_options(tokens),
    )

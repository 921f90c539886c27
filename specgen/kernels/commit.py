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
    width,
    num_stops,
    stop_stride,
    WIDTH_PAD: tl.constexpr,
    STOPS_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ids_ptr + row).to(tl.int64)
    live = slot >= 0
    slot = tl.maximum(slot, 0)
    live = live & (tl.load(active_ptr + slot) != 0) & (tl.load(num_draft_tokens_ptr + row) >= 0)
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
    )
    return result

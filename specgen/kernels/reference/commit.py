"""The end of a step on the device, in plain torch: cut at stops and lengths, advance the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.kernels.batch_types import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    RUNNING,
    CommitResult,
)


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
    width = tokens.shape[1]
    slots = slot_ids.clamp(min=0).long()
    live = (slot_ids >= 0) & active[slots] & (num_draft_tokens >= 0)
    failed = live & ~ok
    live = live & ok & (num_sampled > 0)

    room = (max_lens[slots] - seq_lens[slots]).clamp(min=0)
    count = torch.minimum(num_sampled, room)  # before stops
    i = torch.arange(width, device=tokens.device, dtype=torch.int32)
    # Padding equals padding, but only behind the sampled tokens, where no stop counts.
    is_stop = (tokens[:, :, None] == stop_ids[slots][:, None, :]).any(-1)
    stop_at = torch.where(is_stop, i, width).amin(1)  # index of the first stop; width if none
    stopped = live & (stop_at < count)
    count = torch.where(live, torch.where(stopped, stop_at + 1, count), 0)

    finish = torch.where(live & (count >= room), FINISH_LENGTH, RUNNING)
    finish = torch.where(stopped, FINISH_STOP, finish)
    finish = torch.where(failed, FINISH_ERROR, finish).int()

    # Padding rows point at slot 0, which may also be a real row of this batch: additions of zero
    # leave it alone whatever the order, where plain writes would race.
    last = tokens.gather(1, (count - 1).clamp(min=0)[:, None].long())[:, 0]
    change = torch.where(count > 0, last - last_tokens[slots], 0)
    last_tokens.index_add_(0, slots, change)
    seq_lens.index_add_(0, slots, count)
    ended = torch.zeros_like(seq_lens).index_add_(0, slots, (finish != RUNNING).int())
    active.logical_and_(ended == 0)
    columns = torch.stack((num_sampled, num_draft_tokens, count, finish), dim=1)
    return CommitResult(count, finish, record=torch.cat((tokens, columns), dim=1))


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
    k = tokens.shape[0]
    slots = slot_ids.clamp(min=0).long()
    used = slot_ids >= 0
    count = ok.int().cumprod(0).sum(0).int()  # drafts before the first that broke
    count = torch.minimum(count, draft_limits[slots])
    if position_limit is not None:  # draft j comes from the pair at position n - 2 + j
        count = torch.minimum(count, (position_limit + 2 - seq_lens[slots]).clamp(min=0))
    count = torch.where(active[slots], count, 0)
    drafts = torch.where(ok, tokens, 0).T
    # Padding rows point at slot 0, which may also be a real row of this batch: additions of zero
    # leave it alone whatever the order, where plain writes would race.
    change = torch.where(used[:, None], drafts - draft_tokens[slots, :k], 0)
    draft_tokens[:, :k].index_add_(0, slots, change)
    change = torch.where(used, count - num_draft_tokens[slots], 0)
    num_draft_tokens.index_add_(0, slots, change)

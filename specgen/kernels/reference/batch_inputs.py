"""The inputs of the passes of a decode step, made from the persistent rows, in plain torch.

n = `seq_lens[slot]` is the number of committed tokens, prompt included. The target's cache holds
n-1 of them: the last one is run by the next step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.kernels.batch_types import DecodeInputs, DraftInputs, ExtendInputs, SamplingRows


def _token_slots(
    block_tables: Tensor, slots: Tensor, positions: Tensor, wanted: Tensor, block_size: int
) -> Tensor:
    """Cache slots int64 of positions `[B, N]`; -1 where not wanted or past the block table."""
    num_columns = block_tables.shape[1]
    column = positions.long() // block_size
    wanted = wanted & (column >= 0) & (column < num_columns)
    block = block_tables[slots].gather(1, column.clamp(0, num_columns - 1)).long()
    token_slot = block * block_size + positions % block_size
    return torch.where(wanted & (block >= 0), token_slot, -1)


def decode_inputs(
    slot_ids: Tensor,
    last_tokens: Tensor,
    draft_tokens: Tensor,
    num_draft_tokens: Tensor,
    seq_lens: Tensor,
    active: Tensor,
    block_tables: Tensor,
    k: int,
    block_size: int,
) -> DecodeInputs:
    """Inputs of the target's pass over the last token and the drafts of each row.

    Args:
        slot_ids: int32 `[B]`; -1 for a padding row. Below that a row is inert, too, and runs over
            the tokens -1-slot, -slot, ...: with those of many rows a step takes the time of a
            real one.
        last_tokens: int32 `[S]`, the last committed token of each slot.
        draft_tokens: int32 `[S, k_max]`.
        num_draft_tokens: int32 `[S]`; the first `min(num_draft_tokens, k)` drafts of a slot are
            judged.
        seq_lens: int32 `[S]`.
        active: bool `[S]`; a row whose slot is not active is inert.
        block_tables: int32 `[S, MB]`.
        k: draft tokens a row of this step.
        block_size: tokens in a cache block.

    Returns:
        `DecodeInputs`.
    """
    slots = slot_ids.clamp(min=0).long()
    live = (slot_ids >= 0) & active[slots]
    limit = min(k, draft_tokens.shape[1])
    num_drafts = num_draft_tokens[slots].clamp(0, limit)
    first = torch.where(live, seq_lens[slots] - 1, 0)
    i = torch.arange(k + 1, device=slot_ids.device, dtype=torch.int32)
    used = live[:, None] & (i <= num_drafts[:, None])  # [B, k+1]
    drafts = slot_ids.new_zeros((slot_ids.numel(), k))
    drafts[:, :limit] = torch.where(used[:, 1 : limit + 1], draft_tokens[slots, :limit], 0)
    idle = torch.where(slot_ids[:, None] < -1, i - 1 - slot_ids[:, None], 0)
    input_ids = torch.cat((last_tokens[slots][:, None], drafts), dim=1)
    positions = torch.where(live[:, None], first[:, None] + i, 0)
    return DecodeInputs(
        input_ids=torch.where(live[:, None], input_ids, idle),
        positions=positions,
        slot_mapping=_token_slots(block_tables, slots, positions, used, block_size),
        first_positions=first,
        context_lens=torch.where(live, first + 1 + num_drafts, 0),
        draft_tokens=drafts,
        num_draft_tokens=torch.where(live, num_drafts, -1),
    )


def extend_inputs(
    slot_ids: Tensor,
    tokens: Tensor,
    num_committed: Tensor,
    first_positions: Tensor,
    active: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> ExtendInputs:
    """Inputs of the draft's pass over the pairs (target feature, next token) that a step committed.

    Pair i of a row is at position `first_positions + i` and holds the row's i-th committed token.

    Args:
        slot_ids: int32 `[B]`; -1 for a padding row.
        tokens: int32 `[B, k+1]`, the tokens of the step.
        num_committed: int32 `[B]`; 0 for an inert row.
        first_positions: int32 `[B]`, the positions of the target pass that made the features.
        active: bool `[S]`, after the commit: a row that just finished drafts no more and is inert.
        block_tables: int32 `[S, MB]`.
        block_size: tokens in a cache block.

    Returns:
        `ExtendInputs`.
    """
    batch, width = tokens.shape
    slots = slot_ids.clamp(min=0).long()
    live = (slot_ids >= 0) & active[slots]
    count = torch.where(live, num_committed, 0)
    i = torch.arange(width, device=slot_ids.device, dtype=torch.int32)
    used = i < count[:, None]  # [B, k+1]
    row_starts = torch.arange(batch, device=slot_ids.device) * width
    positions = first_positions[:, None] + i
    return ExtendInputs(
        input_ids=torch.where(used, tokens, 0),
        slot_mapping=_token_slots(block_tables, slots, positions, used, block_size),
        context_lens=torch.where(count > 0, first_positions + count, 0),
        last_idx=row_starts + (count - 1).clamp(min=0),
        last_positions=torch.where(count > 0, first_positions + count - 1, 0),
        next_positions=torch.where(count > 0, first_positions + 1 + count, -1),
    )


def draft_inputs(
    slot_ids: Tensor,
    seq_lens: Tensor,
    active: Tensor,
    block_tables: Tensor,
    step: int,
    block_size: int,
) -> DraftInputs:
    """Inputs of the draft's single-token pass number `step` after the extend pass.

    Args:
        slot_ids: int32 `[B]`; -1 for a padding row.
        seq_lens: int32 `[S]`, after the commit.
        active: bool `[S]`, after the commit.
        block_tables: int32 `[S, MB]`.
        step: 1 for the first pass after the extend pass; 0: the row's last true pair.
        block_size: tokens in a cache block.

    Returns:
        `DraftInputs`.
    """
    slots = slot_ids.clamp(min=0).long()
    live = (slot_ids >= 0) & active[slots]
    positions = torch.where(live, seq_lens[slots] - 2 + step, 0)
    slot_mapping = _token_slots(block_tables, slots, positions[:, None], live[:, None], block_size)
    return DraftInputs(
        positions=positions,
        slot_mapping=slot_mapping[:, 0],
        context_lens=torch.where(live, positions + 1, 0),
        next_positions=torch.where(live, positions + 2, -1),
    )


def sampling_rows(
    slot_ids: Tensor, temperature: Tensor, seeds: Tensor, sample_index: Tensor, seq_lens: Tensor
) -> SamplingRows:
    """Gather what sampling needs to know of each row of a batch.

    Args:
        slot_ids: int32 `[B]`; -1 for a padding row.
        temperature: float32 `[S]`.
        seeds: int64 `[S]`.
        sample_index: int32 `[S]`.
        seq_lens: int32 `[S]`.

    Returns:
        `SamplingRows`.
    """
    slots = slot_ids.clamp(min=0).long()
    sources = (temperature, seeds, sample_index, seq_lens)
    return SamplingRows(*(torch.where(slot_ids >= 0, source[slots], 0) for source in sources))

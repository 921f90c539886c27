"""The inputs of the passes of a decode step, made from the persistent rows, one program a row.

n = `seq_lens[slot]` is the number of committed tokens, prompt included. The target's cache holds
n-1 of them: the last one is run by the next step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.batch_types import DecodeInputs, DraftInputs, ExtendInputs, SamplingRows
from specgen.kernels.overlap import enter, overlap_options
from specgen.kernels.rows import row_slot, token_slots


@triton.jit
def _decode_inputs_kernel(
    slot_ids_ptr,
    last_tokens_ptr,
    draft_tokens_ptr,
    num_draft_tokens_ptr,
    seq_lens_ptr,
    active_ptr,
    block_tables_ptr,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    first_positions_ptr,
    context_lens_ptr,
    batch_draft_tokens_ptr,
    batch_num_draft_tokens_ptr,
    max_drafts,
    draft_stride,
    num_columns,
    table_stride,
    K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    enter(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    slot, live = row_slot(slot_ids_ptr, active_ptr, row)
    num_drafts = tl.load(num_draft_tokens_ptr + slot)
    num_drafts = tl.maximum(tl.minimum(tl.minimum(num_drafts, K), max_drafts), 0)
    first = tl.where(live, tl.load(seq_lens_ptr + slot) - 1, 0)

    i = tl.arange(0, WIDTH_PAD)
    inside = i < K + 1
    used = (i <= num_drafts) & live
    is_draft = used & (i > 0)
    drafts = tl.load(draft_tokens_ptr + slot * draft_stride + i - 1, mask=is_draft, other=0)
    last = tl.load(last_tokens_ptr + slot)
    token = -1 - tl.minimum(tl.load(slot_ids_ptr + row), -1)  # that an inert row begins with
    idle = tl.where(token > 0, token + i, 0)
    input_ids = tl.where(live, tl.where(i == 0, last, drafts), idle)
    positions = tl.where(live, first + i, 0)
    table_ptr = block_tables_ptr + slot * table_stride
    slots = token_slots(table_ptr, positions, used, num_columns, BLOCK_SIZE)

    out = row * (K + 1) + i
    tl.store(input_ids_ptr + out, input_ids, mask=inside)
    tl.store(positions_ptr + out, positions, mask=inside)
    tl.store(slot_mapping_ptr + out, slots, mask=inside)
    tl.store(batch_draft_tokens_ptr + row * K + i - 1, drafts, mask=inside & (i > 0))
    tl.store(first_positions_ptr + row, first)
    tl.store(context_lens_ptr + row, tl.where(live, first + 1 + num_drafts, 0))
    tl.store(batch_num_draft_tokens_ptr + row, tl.where(live, num_drafts, -1))


@triton.jit
def _extend_inputs_kernel(
    slot_ids_ptr,
    tokens_ptr,
    num_committed_ptr,
    first_positions_ptr,
    active_ptr,
    block_tables_ptr,
    input_ids_ptr,
    slot_mapping_ptr,
    context_lens_ptr,
    last_idx_ptr,
    last_positions_ptr,
    next_positions_ptr,
    num_columns,
    table_stride,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    enter(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    slot, live = row_slot(slot_ids_ptr, active_ptr, row)
    count = tl.where(live, tl.load(num_committed_ptr + row), 0)
    first = tl.load(first_positions_ptr + row)

    i = tl.arange(0, WIDTH_PAD)
    inside = i < WIDTH
    used = inside & (i < count)
    out = row * WIDTH + i
    tokens = tl.load(tokens_ptr + out, mask=used, other=0)
    table_ptr = block_tables_ptr + slot * table_stride
    slots = token_slots(table_ptr, first + i, used, num_columns, BLOCK_SIZE)
    tl.store(input_ids_ptr + out, tokens, mask=inside)
    tl.store(slot_mapping_ptr + out, slots, mask=inside)
    tl.store(context_lens_ptr + row, tl.where(count > 0, first + count, 0))
    tl.store(last_idx_ptr + row, row * WIDTH + tl.maximum(count - 1, 0))
    tl.store(last_positions_ptr + row, tl.where(count > 0, first + count - 1, 0))
    tl.store(next_positions_ptr + row, tl.where(count > 0, first + 1 + count, -1))


@triton.jit
def _draft_inputs_kernel(
    slot_ids_ptr,
    seq_lens_ptr,
    active_ptr,
    block_tables_ptr,
    positions_ptr,
    slot_mapping_ptr,
    context_lens_ptr,
    next_positions_ptr,
    num_columns,
    table_stride,
    STEP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    enter(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    slot, live = row_slot(slot_ids_ptr, active_ptr, row)
    position = tl.where(live, tl.load(seq_lens_ptr + slot) - 2 + STEP, 0)
    table_ptr = block_tables_ptr + slot * table_stride
    tl.store(positions_ptr + row, position)
    token_slot = token_slots(table_ptr, position, live, num_columns, BLOCK_SIZE)
    tl.store(slot_mapping_ptr + row, token_slot)
    tl.store(context_lens_ptr + row, tl.where(live, position + 1, 0))
    tl.store(next_positions_ptr + row, tl.where(live, position + 2, -1))


@triton.jit
def _sampling_rows_kernel(
    slot_ids_ptr,
    temperature_ptr,
    seeds_ptr,
    sample_index_ptr,
    seq_lens_ptr,
    out_temperature_ptr,
    out_seeds_ptr,
    out_sample_index_ptr,
    out_seq_lens_ptr,
    num_rows,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    enter(OVERLAP)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(slot_ids_ptr + row, mask=inside, other=-1)
    used = slot >= 0
    temperature = tl.load(temperature_ptr + slot, mask=used, other=0.0)
    tl.store(out_temperature_ptr + row, temperature, mask=inside)
    tl.store(out_seeds_ptr + row, tl.load(seeds_ptr + slot, mask=used, other=0), mask=inside)
    sample_index = tl.load(sample_index_ptr + slot, mask=used, other=0)
    tl.store(out_sample_index_ptr + row, sample_index, mask=inside)
    seq_len = tl.load(seq_lens_ptr + slot, mask=used, other=0)
    tl.store(out_seq_lens_ptr + row, seq_len, mask=inside)


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
        slot_ids: int32 `[B]`; -1 for a padding row.
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
    batch = slot_ids.numel()
    device = slot_ids.device
    result = DecodeInputs(
        input_ids=torch.empty((batch, k + 1), dtype=torch.int32, device=device),
        positions=torch.empty((batch, k + 1), dtype=torch.int32, device=device),
        slot_mapping=torch.empty((batch, k + 1), dtype=torch.int64, device=device),
        first_positions=torch.empty((batch,), dtype=torch.int32, device=device),
        context_lens=torch.empty((batch,), dtype=torch.int32, device=device),
        draft_tokens=torch.empty((batch, k), dtype=torch.int32, device=device),
        num_draft_tokens=torch.empty((batch,), dtype=torch.int32, device=device),
    )
    if batch == 0:
        return result
    _decode_inputs_kernel[(batch,)](
        slot_ids,
        last_tokens,
        draft_tokens,
        num_draft_tokens,
        seq_lens,
        active.view(torch.uint8),
        block_tables,
        *result,
        draft_tokens.shape[1],
        draft_tokens.stride(0),
        block_tables.shape[1],
        block_tables.stride(0),
        K=k,
        BLOCK_SIZE=block_size,
        WIDTH_PAD=triton.next_power_of_2(k + 1),
        num_warps=1,
        **overlap_options(slot_ids),
    )
    return result


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
    device = slot_ids.device
    result = ExtendInputs(
        input_ids=torch.empty((batch, width), dtype=torch.int32, device=device),
        slot_mapping=torch.empty((batch, width), dtype=torch.int64, device=device),
        context_lens=torch.empty((batch,), dtype=torch.int32, device=device),
        last_idx=torch.empty((batch,), dtype=torch.int64, device=device),
        last_positions=torch.empty((batch,), dtype=torch.int32, device=device),
        next_positions=torch.empty((batch,), dtype=torch.int32, device=device),
    )
    if batch == 0:
        return result
    _extend_inputs_kernel[(batch,)](
        slot_ids,
        tokens.contiguous(),
        num_committed,
        first_positions,
        active.view(torch.uint8),
        block_tables,
        *result,
        block_tables.shape[1],
        block_tables.stride(0),
        WIDTH=width,
        BLOCK_SIZE=block_size,
        WIDTH_PAD=triton.next_power_of_2(width),
        num_warps=1,
        **overlap_options(slot_ids),
    )
    return result


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
    batch = slot_ids.numel()
    device = slot_ids.device
    result = DraftInputs(
        positions=torch.empty((batch,), dtype=torch.int32, device=device),
        slot_mapping=torch.empty((batch,), dtype=torch.int64, device=device),
        context_lens=torch.empty((batch,), dtype=torch.int32, device=device),
        next_positions=torch.empty((batch,), dtype=torch.int32, device=device),
    )
    if batch == 0:
        return result
    _draft_inputs_kernel[(batch,)](
        slot_ids,
        seq_lens,
        active.view(torch.uint8),
        block_tables,
        *result,
        block_tables.shape[1],
        block_tables.stride(0),
        STEP=step,
        BLOCK_SIZE=block_size,
        num_warps=1,
        **overlap_options(slot_ids),
    )
    return result


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
    batch = slot_ids.numel()
    sources = (temperature, seeds, sample_index, seq_lens)
    result = SamplingRows(*(source.new_empty(batch) for source in sources))
    if batch == 0:
        return result
    block = min(128, triton.next_power_of_2(batch))
    _sampling_rows_kernel[(triton.cdiv(batch, block),)](
        slot_ids,
        *sources,
        *result,
        batch,
        BLOCK=block,
        num_warps=1,
        **overlap_options(slot_ids),
    )
    return result

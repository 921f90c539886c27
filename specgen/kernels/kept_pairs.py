"""Pairs (target feature, next token) of steps without drafts: kept by row, and taken by the batch.

The draft's cache is written for several steps at once, since its products cost nearly the same for
one pair a row and for eight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.batch_types import KeptPairs, TakenPairs
from specgen.kernels.overlap import enter, overlap_options
from specgen.kernels.rows import row_slot, token_slots

_BLOCK = 2048


@triton.jit
def _keep_pairs_kernel(
    slot_ids_ptr,
    tokens_ptr,
    positions_ptr,
    active_ptr,
    features_ptr,
    kept_features_ptr,
    kept_tokens_ptr,
    kept_positions_ptr,
    size,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    enter(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot, live = row_slot(slot_ids_ptr, active_ptr, row)
    if live:
        position = tl.load(positions_ptr + row)
        place = slot * N + position % N
        columns = part * BLOCK + tl.arange(0, BLOCK)
        mask = columns < size
        x = tl.load(features_ptr + row * size + columns, mask=mask)
        tl.store(kept_features_ptr + place * size + columns, x, mask=mask)
        if part == 0:
            tl.store(kept_tokens_ptr + place, tl.load(tokens_ptr + row))
            tl.store(kept_positions_ptr + place, position)


@triton.jit
def _take_pairs_kernel(
    slot_ids_ptr,
    active_ptr,
    block_tables_ptr,
    kept_features_ptr,
    kept_tokens_ptr,
    kept_positions_ptr,
    features_ptr,
    tokens_ptr,
    positions_ptr,
    slot_mapping_ptr,
    size,
    num_columns,
    table_stride,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    enter(OVERLAP)
    out = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot, live = row_slot(slot_ids_ptr, active_ptr, out // N)
    place = slot * N + out % N
    position = tl.load(kept_positions_ptr + place)
    live = live & (position >= 0) & (position // BLOCK_SIZE < num_columns)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    x = tl.load(kept_features_ptr + place * size + columns, mask=mask & live, other=0.0)
    tl.store(features_ptr + out * size + columns, x, mask=mask)
    if part == 0:
        token = tl.load(kept_tokens_ptr + place)
        table_ptr = block_tables_ptr + slot * table_stride
        token_slot = token_slots(table_ptr, position, live, num_columns, BLOCK_SIZE)
        tl.store(tokens_ptr + out, tl.where(live, token, 0))
        tl.store(positions_ptr + out, tl.where(live, position, 0))
        tl.store(slot_mapping_ptr + out, token_slot)


def keep_pairs(
    slot_ids: Tensor,
    tokens: Tensor,
    positions: Tensor,
    active: Tensor,
    features: Tensor,
    kept: KeptPairs,
) -> None:
    """Keep the pair that a step without drafts gave each row, at ``position % N`` of its slot.

    Args:
        slot_ids: int32 `[B]`; a negative one keeps nothing.
        tokens: int32 `[B]`, which the step emitted.
        positions: int32 `[B]`, of the features.
        active: bool `[S]`, after the commit: a row that just ended keeps nothing.
        features: `[B, F]`.
        kept: `[S, N, ...]`, written to.
    """
    batch, size = features.shape
    if batch == 0:
        return
    _keep_pairs_kernel[(batch, triton.cdiv(size, _BLOCK))](
        slot_ids,
        tokens.contiguous(),
        positions.contiguous(),
        active.view(torch.uint8),
        features.contiguous(),
        *kept,
        size,
        N=kept.tokens.shape[1],
        BLOCK=_BLOCK,
        **overlap_options(features),
    )


def take_pairs(
    slot_ids: Tensor, active: Tensor, block_tables: Tensor, kept: KeptPairs, block_size: int
) -> TakenPairs:
    """The pairs that rows have kept, and where in the cache they belong.

    Args:
        slot_ids: int32 `[B]`; a negative one has none.
        active: bool `[S]`; a row that has ended has none.
        block_tables: int32 `[S, MB]`.
        kept: `[S, N, ...]`.
        block_size: tokens in a cache block.

    Returns:
        `TakenPairs` of `B * N`; what is no pair has the cache slot -1.
    """
    num_places, size = kept.features.shape[1:]
    num_pairs, device = slot_ids.shape[0] * num_places, slot_ids.device
    taken = TakenPairs(
        features=torch.empty((num_pairs, size), dtype=kept.features.dtype, device=device),
        tokens=torch.empty((num_pairs,), dtype=torch.int32, device=device),
        positions=torch.empty((num_pairs,), dtype=torch.int32, device=device),
        slot_mapping=torch.empty((num_pairs,), dtype=torch.int64, device=device),
    )
    if num_pairs == 0:
        return taken
    _take_pairs_kernel[(num_pairs, triton.cdiv(size, _BLOCK))](
        slot_ids,
        active.view(torch.uint8),
        block_tables,
        *kept,
        *taken,
        size,
        block_tables.shape[1],
        block_tables.stride(0),
        N=num_places,
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
        **overlap_options(kept.features),
    )
    return taken

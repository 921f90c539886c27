"""Where the kernels of a step find a row's state, and the places of its tokens in a cache."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def token_slots(table_ptr, positions, wanted, num_columns, BLOCK_SIZE: tl.constexpr):
    """Cache slots (int64) of positions of one row; -1 where not wanted or past the block table."""
    columns = positions // BLOCK_SIZE
    wanted = wanted & (positions >= 0) & (columns < num_columns)
    blocks = tl.load(table_ptr + columns, mask=wanted, other=-1).to(tl.int64)
    slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    return tl.where(wanted & (blocks >= 0), slots, -1)


@triton.jit
def row_slot(slot_ids_ptr, active_ptr, row):
    """The row's slot (int64, 0 for padding) and whether the row takes part."""
    slot = tl.load(slot_ids_ptr + row).to(tl.int64)
    live = slot >= 0
    slot = tl.maximum(slot, 0)
    live = live & (tl.load(active_ptr + slot) != 0)
    return slot, live

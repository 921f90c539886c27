"""Statistics of rows of logits: of every block of the vocabulary its maximum and sum of
exponentials, and what they say of a row when they are combined.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_ID = tl.constexpr((1 << 31) - 1)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _block_max(
    x,
    start,
    first_ptr,
    lane_max_ptr,
    at,
    has_lanes,
    HAS_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
):
    """Return the maximum of a block, and store what a row needs to find its token."""
    GROUPS: tl.constexpr = x.shape[0] // GROUP
    group_max = tl.max(tl.reshape(x, [GROUPS, GROUP]), axis=1)
    lane_max = tl.max(tl.reshape(group_max, [GROUPS // LANES, LANES]), axis=0)
    block_max = tl.max(lane_max, axis=0)
    if HAS_ROW:
        if has_lanes:
            out = lane_max_ptr + at * LANES + tl.arange(0, LANES)
            tl.store(out, lane_max.to(lane_max_ptr.dtype.element_ty))
        else:
            firsts = start + tl.arange(0, GROUPS) * GROUP
            first = tl.min(tl.where(group_max == block_max, firsts, NO_ID), axis=0)
            tl.store(first_ptr + at, first)
    return block_max


@triton.jit
def store_block(
    row_ptr,
    start,
    V,
    temperature,
    threshold,
    needs_sum,
    has_lanes,
    max_ptr,
    sum_ptr,
    first_ptr,
    lane_max_ptr,
    at,
    HAS_THRESHOLDS: tl.constexpr,
    HAS_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the statistics ``at`` of the block of a row's logits that begins at ``start``.

    The maximum (+inf where the block holds NaN or +inf); if needed the sum of ``exp((logit -
    maximum) / T)`` of the kept tokens; and with HAS_ROW either the maximum of every lane, in the
    type of the logits, or the first id of the first GROUP that has the block's.
    """
    # Every instruction for each logit counts here.
    offs = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + offs, mask=offs < V, other=float("-inf")).to(tl.float32)
    if needs_sum:
        block_max = _block_max(
            x, start, first_ptr, lane_max_ptr, at, has_lanes, HAS_ROW, GROUP, LANES
        )
        is_number = (block_max > float("-inf")) & (block_max < float("inf"))
        base = tl.where(is_number, block_max, 0.0)
        scale = _LOG2E / temperature
        offset = base * scale
        weights = tl.exp2(tl.fma(x, scale, -offset))  # 0 at -inf
        if HAS_THRESHOLDS:
            weights = tl.where(x < threshold, 0.0, weights)
        total = tl.sum(weights, axis=0)
        # A maximum may pass over NaN, a sum does not.
        tl.store(max_ptr + at, tl.where(total == total, block_max, float("inf")))
        # exp2(...) gives back what the offset lost in rounding.
        tl.store(sum_ptr + at, total * tl.exp2(-tl.fma(base, scale, -offset)))
    else:
        x = tl.where(x < float("inf"), x, float("inf"))
        block_max = _block_max(
            x, start, first_ptr, lane_max_ptr, at, has_lanes, HAS_ROW, GROUP, LANES
        )
        tl.store(max_ptr + at, block_max)


@triton.jit
def load_blocks(
    max_ptr, sum_ptr, first_row, rows, mask, sum_mask, num_blocks, BLOCKS: tl.constexpr
):
    """Return maxima and sums of the blocks of every row, ``[rows, BLOCKS]``.

    The statistics of row r begin at block ``(first_row + r) * num_blocks``. Maxima outside ``mask``
    are -inf; sums outside ``sum_mask`` are 0.
    """
    blocks = tl.arange(0, BLOCKS)
    at = (first_row + rows).to(tl.int64)[:, None] * num_blocks + blocks[None, :]
    in_row = (blocks < num_blocks)[None, :]
    block_max = tl.load(max_ptr + at, mask=mask[:, None] & in_row, other=float("-inf"))
    return block_max, tl.load(sum_ptr + at, mask=sum_mask[:, None] & in_row, other=0.0)


@triton.jit
def combine_blocks(block_max, block_sum, temperature):
    """Return maximum and sum of exponentials of every row."""
    row_max = tl.max(block_max, axis=1)
    base = tl.where((row_max > float("-inf")) & (row_max < float("inf")), row_max, 0.0)
    scale = tl.exp(tl.minimum(block_max - base[:, None], 0.0) / temperature)
    return row_max, tl.sum(tl.where(block_sum > 0.0, block_sum * scale, 0.0), axis=1)


@triton.jit
def find_argmax(
    logits_ptr,
    stride,
    rows,
    mask,
    V,
    first_ptr,
    first_row,
    num_blocks,
    block_max,
    row_max,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return the lowest id of every row that has the row's maximum; ``block_max`` as combined."""
    blocks = tl.arange(0, BLOCKS)
    at = (first_row + rows).to(tl.int64)[:, None] * num_blocks + blocks[None, :]
    has_maximum = mask[:, None] & (blocks < num_blocks)[None, :] & (block_max == row_max[:, None])
    first = tl.min(tl.load(first_ptr + at, mask=has_maximum, other=NO_ID), axis=1)
    ids = tl.where(mask, first, 0)[:, None] + tl.arange(0, GROUP)[None, :]
    values = logits_ptr + rows.to(tl.int64)[:, None] * stride + ids
    x = tl.load(values, mask=mask[:, None] & (ids < V), other=float("-inf")).to(tl.float32)
    return tl.min(tl.where(x == row_max[:, None], ids, NO_ID), axis=1)

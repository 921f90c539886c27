"""Statistics of rows of logits: of every block of the vocabulary its maximum and sum of
exponentials, and what they say of a row when they are combined.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_ID = tl.constexpr((1 << 31) - 1)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _block_max(x, start, first_ptr, at, HAS_FIRST: tl.constexpr, GROUP: tl.constexpr):
    """Return the maximum of a block; with HAS_FIRST store the first id of its first GROUP."""
    BLOCK: tl.constexpr = x.shape[0]
    group_max = tl.max(tl.reshape(x, [BLOCK // GROUP, GROUP]), axis=1)
    block_max = tl.max(group_max, axis=0)
    if HAS_FIRST:
        firsts = start + tl.arange(0, BLOCK // GROUP) * GROUP
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
    max_ptr,
    sum_ptr,
    first_ptr,
    at,
    HAS_THRESHOLDS: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write the statistics ``at`` of the block of a row's logits that begins at ``start``.

    The maximum (+inf where the block holds NaN or +inf); with HAS_FIRST the first id of the first
    GROUP that has it; and if needed the sum of ``exp((logit - maximum) / T)`` of the kept tokens.
    """
    # Every instruction for each logit counts here.
    offs = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + offs, mask=offs < V, other=float("-inf")).to(tl.float32)
    if needs_sum:
        block_max = _block_max(x, start, first_ptr, at, HAS_FIRST, GROUP)
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
        tl.store(max_ptr + at, _block_max(x, start, first_ptr, at, HAS_FIRST, GROUP))


@triton.jit
def combine_blocks(
    max_ptr, sum_ptr, first_row, rows, mask, sum_mask, num_blocks, temperature, BLOCKS: tl.constexpr
):
    """Return of every row its block maxima ``[rows, BLOCKS]``, maximum and sum of exponentials.

    The statistics of row r begin at block ``(first_row + r) * num_blocks``. Rows outside ``mask``
    are all -inf; sums outside ``sum_mask`` are 0.
    """
    blocks = tl.arange(0, BLOCKS)
    at = (first_row + rows).to(tl.int64)[:, None] * num_blocks + blocks[None, :]
    in_row = (blocks < num_blocks)[None, :]
    block_max = tl.load(max_ptr + at, mask=mask[:, None] & in_row, other=float("-inf"))
    block_sum = tl.load(sum_ptr + at, mask=sum_mask[:, None] & in_row, other=0.0)
    row_max = tl.max(block_max, axis=1)
    base = tl.where((row_max > float("-inf")) & (row_max < float("inf")), row_max, 0.0)
    scale = tl.exp(tl.minimum(block_max - base[:, None], 0.0) / temperature)
    total = tl.sum(tl.where(block_sum > 0.0, block_sum * scale, 0.0), axis=1)
    return block_max, row_max, total


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


@triton.jit
def find_runner_up(
    row_ptr,
    V,
    max_ptr,
    first_ptr,
    at,
    token,
    num_blocks,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    STATS_BLOCK: tl.constexpr,
):
    """Return the largest logit of a row's blocks but that of ``token``, and the lowest id that has
    it there. The row's statistics begin ``at``. Without such blocks the logit is -inf.
    """
    blocks = tl.arange(0, BLOCKS)
    others = (blocks < num_blocks) & (blocks != token // STATS_BLOCK)
    maxima = tl.load(max_ptr + at + blocks, mask=others, other=float("-inf"))
    largest = tl.max(maxima, axis=0)
    has_it = (maxima == largest) & (maxima > float("-inf"))
    first = tl.min(tl.load(first_ptr + at + blocks, mask=has_it, other=NO_ID), axis=0)
    ids = tl.where(first < V, first, 0) + tl.arange(0, GROUP)
    x = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    return largest, tl.min(tl.where(x == largest, ids, NO_ID), axis=0)

"""What the statistics of its blocks (:mod:`specgen.kernels.block_statistics`) say of a row."""

from __future__ import annotations

import triton
import triton.language as tl

NO_ID = tl.constexpr((1 << 31) - 1)


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

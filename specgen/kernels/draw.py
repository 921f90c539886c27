"""A draw from a row of logits that makes noise only where a token could win.

The token drawn is the one of the best score, ``(logit - row max) / T + noise``. Noise has a largest
value and an upper bound that costs a fifth of it, so next to a score already reached most tokens,
and blocks of the vocabulary, are out: every test below drops what is *strictly* worse than the best
so far, and what remains is scored exactly, one token at a time. The result is that of scoring all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specgen.kernels.rng import LARGEST_GUMBEL, id_gumbel, range_gumbel_bound

NO_ID = tl.constexpr((1 << 31) - 1)
_LOG2E = tl.constexpr(1.4426950408889634)
# Divisions and fused operations round scaled logits (all <= 0) by less than this share of them.
_ROUND_UP = tl.constexpr(1.0 - 2.0**-20)
# About the largest noise of a few thousand tokens.
_LIKELY_GUMBEL = tl.constexpr(8.0)
# Below this score a probability might have been so small that its logarithm says nothing.
_LOWEST_SCORE = tl.constexpr(-50.0)


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
    offs = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + offs, mask=offs < V, other=float("-inf")).to(tl.float32)
    # Every instruction counts here: NaN becomes +inf, whose block ends the row, whatever its sum.
    x = tl.where(x < float("inf"), x, float("inf"))
    group_max = tl.max(tl.reshape(x, [BLOCK // GROUP, GROUP]), axis=1)
    block_max = tl.max(group_max, axis=0)
    tl.store(max_ptr + at, block_max)
    if HAS_FIRST:
        firsts = start + tl.arange(0, BLOCK // GROUP) * GROUP
        first = tl.min(tl.where(group_max == block_max, firsts, NO_ID), axis=0)
        tl.store(first_ptr + at, first)
    if needs_sum:
        is_number = (block_max > float("-inf")) & (block_max < float("inf"))
        base = tl.where(is_number, block_max, 0.0)
        weights = tl.exp2((x - base) * (_LOG2E / temperature))  # 0 at -inf
        if HAS_THRESHOLDS:
            weights = tl.where(x >= threshold, weights, 0.0)
        tl.store(sum_ptr + at, tl.sum(weights, axis=0))


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
def log_residual(
    scaled,
    total,
    ids,
    V,
    draft_ptr,
    draft_ids_ptr,
    Vd,
    draft_max,
    draft_total,
    temperature,
    HAS_DRAFT_IDS: tl.constexpr,
):
    """Return ``log(p - q)``, -inf where it is not positive, of ids with scaled logits."""
    p = tl.exp(scaled) / total
    draft_ids = ids
    inside = ids < V
    if HAS_DRAFT_IDS:
        draft_ids = tl.load(draft_ids_ptr + ids, mask=inside, other=-1)
    inside = inside & (draft_ids >= 0) & (draft_ids < Vd)
    x = tl.load(draft_ptr + draft_ids, mask=inside, other=float("-inf")).to(tl.float32)
    q = tl.exp((x - draft_max) / temperature) / draft_total
    weight = p - tl.where(inside, q, 0.0)
    positive = weight > 0.0
    return tl.where(positive, tl.log(tl.where(positive, weight, 1.0)), float("-inf"))


@triton.jit
def draw_token(
    row_ptr,
    V,
    block_max_ptr,
    row_max,
    temperature,
    threshold,
    seed,
    position,
    c2,
    sample,
    banned,
    use_residual,
    total,
    draft_ptr,
    draft_ids_ptr,
    Vd,
    draft_max,
    draft_total,
    best,
    token,
    first,
    step,
    HAS_THRESHOLDS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_DRAFT_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    STATS_BLOCK: tl.constexpr,
):
    """Return the best score and its token: ``best, token``, or of the blocks ``first + n * step``.

    ``banned`` is a token that is not drawn, or -1. With ``use_residual`` scores are those of the
    residual, ``log(p - q) + noise``, which are at most ``scaled logit - log(total) + noise``.
    """
    # A token wins only with scaled logit + noise >= best + log_total.
    log_total = 0.0
    if HAS_RESIDUAL:
        log_total = tl.where(use_residual, tl.log(total), 0.0)
    groups = tl.arange(0, BLOCK // 4) * 4
    lanes = tl.arange(0, 4)
    cold = _ROUND_UP / temperature
    for block in range(first, tl.cdiv(V, BLOCK), step):
        start = block * BLOCK
        bar = tl.where(best > _LOWEST_SCORE, best + log_total, float("-inf"))
        block_max = tl.load(block_max_ptr + start // STATS_BLOCK)
        possible = block_max > float("-inf")
        if HAS_THRESHOLDS:
            possible = possible & (block_max >= threshold)
        limit = (block_max - row_max) * cold
        if possible & (limit + LARGEST_GUMBEL >= bar):
            ids = (start + groups)[:, None] + lanes[None, :]
            # Read while noise is made where the block's largest noise is likely to be enough, else
            # once that is certain.
            end = tl.where(limit + _LIKELY_GUMBEL >= bar, V, 0)
            x = tl.load(row_ptr + ids, mask=ids < end, other=float("-inf")).to(tl.float32)
            noise = range_gumbel_bound(seed, start, position, c2, sample, BLOCK)
            if end == 0:
                end = tl.where(limit + tl.max(noise) >= bar, V, 0)
                x = tl.load(row_ptr + ids, mask=ids < end, other=float("-inf")).to(tl.float32)
            if end > 0:
                kept = ids != banned
                if HAS_THRESHOLDS:
                    kept = kept & (x >= threshold)
                x = tl.where(kept, x, float("-inf"))
                bounds = (x - row_max) * cold + noise
                top = tl.max(bounds)
                top = tl.where(top >= bar, top, float("-inf"))
                if HAS_RESIDUAL:  # noqa: SIM102 (compiled only where it holds)
                    if use_residual & (top > float("-inf")):
                        y = log_residual(
                            (x - row_max) / temperature,
                            total,
                            ids,
                            V,
                            draft_ptr,
                            draft_ids_ptr,
                            Vd,
                            draft_max,
                            draft_total,
                            temperature,
                            HAS_DRAFT_IDS,
                        )
                        bounds = y * _ROUND_UP + noise
                        top = tl.max(bounds)
                while (top > float("-inf")) & (top >= best):
                    i = tl.min(tl.where(bounds == top, ids, NO_ID))
                    y = (tl.load(row_ptr + i).to(tl.float32) - row_max) / temperature
                    if HAS_RESIDUAL:  # noqa: SIM102
                        if use_residual:
                            y = log_residual(
                                y,
                                total,
                                i,
                                V,
                                draft_ptr,
                                draft_ids_ptr,
                                Vd,
                                draft_max,
                                draft_total,
                                temperature,
                                HAS_DRAFT_IDS,
                            )
                    score = y + id_gumbel(seed, i, position, c2, sample)
                    better = (score > best) | ((score == best) & (i < token))
                    best = tl.where(better, score, best)
                    token = tl.where(better, i, token)
                    bounds = tl.where(ids == i, float("-inf"), bounds)
                    top = tl.max(bounds)
    return best, token

"""Statistics of a block of logits: its maximum, its sum of exponentials, and where its row may find
its token in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specgen.kernels.row_statistics import NO_ID

_LOG2E = tl.constexpr(1.4426950408889634)
# A lane's sum is right in float32 if its largest weight lies between these powers of two: 64 times
# the one do not overflow, and what is smaller than the other by 2**62 does not count.
_HIGHEST = tl.constexpr(120.0)
_LOWEST = tl.constexpr(-64.0)


@triton.jit
def _finite(x):
    return tl.where((x > float("-inf")) & (x < float("inf")), x, 0.0)


@triton.jit
def _load_once(row_ptr, ids, V):
    # Logits pass through: the cache is for what is written here and read by the judge.
    return tl.load(row_ptr + ids, mask=ids < V, other=float("-inf"), eviction_policy="evict_first")


@triton.jit
def _append(parts, part):
    return parts + (part,)  # noqa: RUF005 (Triton unpacks no tuple)


@triton.jit
def _weights(x, scale, offset, threshold, HAS_THRESHOLDS: tl.constexpr):
    """Return ``2**(x * scale - offset)`` of the kept tokens; 0 at -inf."""
    weights = tl.exp2(tl.fma(x, scale, -offset))
    if HAS_THRESHOLDS:
        weights = tl.where(x < threshold, 0.0, weights)
    return weights


@triton.jit
def _sum_block(
    row_ptr,
    start,
    V,
    scale,
    base,
    threshold,
    HAS_THRESHOLDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the sum of ``2**((x - base) * scale)`` of a block's kept tokens."""
    x = _load_once(row_ptr, start + tl.arange(0, BLOCK), V).to(tl.float32)
    offset = base * scale
    total = tl.sum(_weights(x, scale, offset, threshold, HAS_THRESHOLDS), axis=0)
    return total * tl.exp2(-tl.fma(base, scale, -offset))  # what the offset lost in rounding


@triton.jit
def _sum_lanes(
    row_ptr,
    start,
    V,
    scale,
    threshold,
    HAS_THRESHOLDS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
):
    """Return of every lane its maximum and the sum of ``2**((x - maximum) * scale)``.

    The sum is +inf where it is not known. A thread makes the weights of what it has read while it
    waits for the rest, against the maximum of the lane's first group (0 where this is -inf), and
    keeps logits in their own type till then.
    """
    STRIDE: tl.constexpr = LANES * GROUP
    ids = start + tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    parts = _append((), _load_once(row_ptr, ids, V))
    for i in tl.static_range(1, BLOCK // STRIDE):
        parts = _append(parts, _load_once(row_ptr, ids + i * STRIDE, V))
    largest = parts[0].to(tl.float32)
    base = _finite(tl.max(largest, axis=1))
    offset = base * scale
    weights = _weights(largest, scale, offset[:, None], threshold, HAS_THRESHOLDS)
    for i in tl.static_range(1, BLOCK // STRIDE):
        x = parts[i].to(tl.float32)
        largest = tl.maximum(largest, x)
        weights += _weights(x, scale, offset[:, None], threshold, HAS_THRESHOLDS)
    lane_max = tl.max(largest, axis=1)
    # Differences first: a product would be rounded in one place and fused in another.
    highest = (_finite(lane_max) - base) * scale
    is_known = (highest < _HIGHEST) & (highest > _LOWEST)
    total = tl.sum(weights, axis=1) * tl.exp2(-highest - tl.fma(base, scale, -offset))
    return lane_max, tl.where(is_known, total, float("inf"))


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
    # Every instruction for each logit counts here, and every byte that is written.
    GROUPS: tl.constexpr = BLOCK // GROUP
    scale = _LOG2E / temperature
    total = float("inf")  # not known yet
    if needs_sum & has_lanes:
        lane_max, lane_sum = _sum_lanes(
            row_ptr, start, V, scale, threshold, HAS_THRESHOLDS, BLOCK, GROUP, LANES
        )
        block_max = tl.max(lane_max, axis=0)
        share = tl.exp2(tl.minimum(lane_max - _finite(block_max), 0.0) * scale)
        # What is not known stays so, also where its share is 0.
        lane_sum = tl.where(lane_sum == float("inf"), lane_sum, lane_sum * share)
        total = tl.sum(lane_sum, axis=0)
    else:
        x = _load_once(row_ptr, start + tl.arange(0, BLOCK), V).to(tl.float32)
        x = tl.where(x < float("inf"), x, float("inf"))
        group_max = tl.max(tl.reshape(x, [GROUPS, GROUP]), axis=1)
        lane_max = tl.max(tl.reshape(group_max, [GROUPS // LANES, LANES]), axis=0)
        block_max = tl.max(lane_max, axis=0)
        if HAS_ROW:  # noqa: SIM102 (compiled only where it holds)
            if has_lanes == 0:
                firsts = start + tl.arange(0, GROUPS) * GROUP
                first = tl.min(tl.where(group_max == block_max, firsts, NO_ID), axis=0)
                tl.store(first_ptr + at, first)
    if HAS_ROW:  # noqa: SIM102
        if has_lanes:
            out = lane_max_ptr + at * LANES + tl.arange(0, LANES)
            tl.store(out, lane_max.to(lane_max_ptr.dtype.element_ty))
    if needs_sum:
        if total == float("inf"):
            base = _finite(block_max)
            total = _sum_block(row_ptr, start, V, scale, base, threshold, HAS_THRESHOLDS, BLOCK)
        tl.store(sum_ptr + at, total)
        # A maximum may pass over NaN, a sum does not.
        block_max = tl.where(total == total, block_max, float("inf"))
    tl.store(max_ptr + at, block_max)

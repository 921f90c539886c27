"""What the attention kernels share: one step of a softmax over keys that come a tile at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from specgen.kernels.products import dot


@triton.jit
def load_block_ids(table_ptr, key_positions, valid, num_columns, BLOCK_SIZE: tl.constexpr):
    """Cache blocks (int64) of the key positions of one row; 0 where not valid."""
    columns = key_positions // BLOCK_SIZE
    return tl.load(table_ptr + columns, mask=valid & (columns < num_columns), other=0).to(tl.int64)


@triton.jit
def soft_cap(scores, cap_log2):
    """cap * tanh(scores / cap), everything in units of log2(e)."""
    # tanh(x) = 1 - 2 / (1 + exp(2x)): right at both ends, where the exponential is 0 or infinite.
    ratio = scores / cap_log2
    return cap_log2 * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * ratio)))


@triton.jit
def softmax_step(scores, values, running_max, running_sum, acc, WIDEN: tl.constexpr):
    """One step of the online softmax, base 2. Rows that saw nothing keep a maximum of -inf."""
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    # exp2(-inf - -inf) is NaN: rows without a visible key use 0 as their reference.
    reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - reference[:, None])
    decay = tl.exp2(running_max - reference)
    running_sum = running_sum * decay + tl.sum(weights, axis=1)
    acc = acc * decay[:, None]
    acc = dot(weights.to(values.dtype), values, acc, WIDEN)
    return new_max, running_sum, acc

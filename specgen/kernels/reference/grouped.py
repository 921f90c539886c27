"""Linear layers of experts over grouped rows, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

_GATHER_BYTES = 1 << 24  # of weights copied at once


def grouped_linear(
    x: Tensor, weights: Tensor, pair_ids: Tensor, block_experts: Tensor, pairs_per_row: int
) -> Tensor:
    """Multiply each row with the weights of the experts it is sent to.

    A pair is a row sent to one of its experts; pair p belongs to row p // pairs_per_row. The pairs
    come in blocks, all pairs of a block for one expert.

    Args:
        x: `[R, H]`.
        weights: `[E, N, H]`, contiguous.
        pair_ids: int32 `[num_blocks * size]`, every pair once, -1 for padding.
        block_experts: int32 `[num_blocks]`, the expert of each block, -1 for an empty one.
        pairs_per_row: experts of a row.

    Returns:
        `[R * pairs_per_row, N]` in the dtype of x, summed in float32.
    """
    num_experts, width, _ = weights.shape
    num_blocks = block_experts.shape[0]
    num_pairs = x.shape[0] * pairs_per_row
    if num_pairs == 0:
        return x.new_empty((0, width))
    # One row more than there are pairs: the padding ends up there.
    out = x.new_empty((num_pairs + 1, width))
    pairs = pair_ids.view(num_blocks, -1).long()
    targets = torch.where(pairs < 0, num_pairs, pairs)
    rows = pairs.clamp(min=0) // pairs_per_row
    experts = block_experts.clamp(0, num_experts - 1).long()
    step = max(1, _GATHER_BYTES // (weights[0].numel() * weights.element_size()))
    for begin in range(0, num_blocks, step):
        part = slice(begin, begin + step)
        product = torch.bmm(x[rows[part]], weights[experts[part]].mT)  # [blocks, size, N]
        out.index_copy_(0, targets[part].flatten(), product.flatten(0, 1).to(out.dtype))
    return out[:num_pairs]

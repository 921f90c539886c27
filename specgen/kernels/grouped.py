"""Linear layers of experts over grouped rows: a tile of one block's pairs a program.

The grid follows from the bound on blocks; blocks that stayed empty end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.products import dot


@triton.jit
def _grouped_linear_kernel(
    x_ptr,
    weights_ptr,
    pair_ids_ptr,
    block_experts_ptr,
    out_ptr,
    hidden_size,
    width,
    x_stride,
    expert_stride,
    num_tiles,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    block = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    if expert >= 0:
        m = tl.arange(0, BLOCK_M)
        pairs = tl.load(pair_ids_ptr + block * SIZE + m, mask=m < SIZE, other=-1)
        used = pairs >= 0
        rows = (tl.maximum(pairs, 0) // PAIRS_PER_ROW).to(tl.int64)
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        x_rows = x_ptr + rows[:, None] * x_stride
        w_rows = weights_ptr + expert * expert_stride + n[:, None].to(tl.int64) * hidden_size
        for start in range(0, hidden_size, BLOCK_K):
            inner = (start + k)[None, :]
            a = tl.load(x_rows + inner, mask=used[:, None] & (inner < hidden_size), other=0.0)
            w_mask = (n < width)[:, None] & (inner < hidden_size)
            w = tl.load(w_rows + inner, mask=w_mask, other=0.0)
            acc = dot(a, tl.trans(w), acc, WIDEN)
        target = out_ptr + tl.maximum(pairs, 0).to(tl.int64)[:, None] * width + n[None, :]
        mask = used[:, None] & (n < width)[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=mask)


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
    x = x if x.stride(-1) == 1 else x.contiguous()
    width, hidden_size = weights.shape[1:]
    num_blocks = block_experts.shape[0]
    out = torch.empty((x.shape[0] * pairs_per_row, width), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    size = pair_ids.shape[0] // num_blocks
    block_n = min(128, max(16, triton.next_power_of_2(width)))
    block_k = min(64 if x.element_size() <= 2 else 32, max(16, triton.next_power_of_2(hidden_size)))
    num_tiles = triton.cdiv(width, block_n)
    _grouped_linear_kernel[(num_blocks * num_tiles,)](
        x,
        weights,
        pair_ids,
        block_experts,
        out,
        hidden_size,
        width,
        x.stride(0),
        weights.stride(0),
        num_tiles,
        PAIRS_PER_ROW=pairs_per_row,
        BLOCK_M=max(16, triton.next_power_of_2(size)),
        SIZE=size,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        WIDEN=not x.is_cuda,
        num_warps=4 if size <= 32 else 8,
        num_stages=3,
    )
    return out

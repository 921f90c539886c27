"""What an EAGLE-3 layer reads: embedding and hidden state of each pair, normed, side by side.

One program a pair, in place of a gather, two norms and a copy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.overlap import enter, overlap_options


@triton.jit
def _normed(x, weight_ptr, columns, mask, eps, size, dtype: tl.constexpr):
    """One row with the roundings of `rms_norm`."""
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    normed = (x * scale).to(dtype).to(tl.float32)
    return (normed * tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)).to(dtype)


@triton.jit
def _norm_pairs_kernel(
    ids_ptr,
    embed_ptr,
    embed_norm_ptr,
    hidden_ptr,
    hidden_norm_ptr,
    out_ptr,
    eps,
    size,
    embed_stride,
    hidden_stride,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    enter(OVERLAP)
    dtype = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    target = out_ptr + row * (2 * size) + columns
    token = tl.maximum(tl.load(ids_ptr + row), 0).to(tl.int64)
    x = tl.load(embed_ptr + token * embed_stride + columns, mask=mask, other=0.0).to(tl.float32)
    h = tl.load(hidden_ptr + row * hidden_stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, _normed(x, embed_norm_ptr, columns, mask, eps, size, dtype), mask=mask)
    tl.store(target + size, _normed(h, hidden_norm_ptr, columns, mask, eps, size, dtype), mask=mask)


def norm_pairs(
    input_ids: Tensor,
    embed_weight: Tensor,
    embed_norm_weight: Tensor,
    hidden: Tensor,
    hidden_norm_weight: Tensor,
    eps: float,
) -> Tensor:
    """Look tokens up, norm them and their hidden states as `rms_norm` does, and join the two.

    Args:
        input_ids: int32 `[T]`; a negative one, of a row that drafts nothing, counts as 0.
        embed_weight: `[V, H]`.
        embed_norm_weight: `[H]`.
        hidden: `[T, H]`.
        hidden_norm_weight: `[H]`.
        eps: added to the mean squares.

    Returns:
        `[T, 2H]` in the dtype of hidden.
    """
    num_rows, size = hidden.shape
    out = torch.empty((num_rows, 2 * size), dtype=hidden.dtype, device=hidden.device)
    if num_rows == 0:
        return out
    hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
    block = triton.next_power_of_2(size)
    _norm_pairs_kernel[(num_rows,)](
        input_ids.contiguous(),
        embed_weight,
        embed_norm_weight,
        hidden,
        hidden_norm_weight,
        out,
        eps,
        size,
        embed_weight.stride(0),
        hidden.stride(0),
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **overlap_options(hidden),
    )
    return out

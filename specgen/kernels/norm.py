"""Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467), one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.overlap import enter, overlap_options


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    eps,
    hidden_size,
    x_stride,
    residual_stride,
    part_stride,
    NUM_PARTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    enter(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden_size
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if NUM_PARTS > 1:
        for part in tl.static_range(1, NUM_PARTS):
            target = x_ptr + part * part_stride + row * x_stride + columns
            x += tl.load(target, mask=mask, other=0.0)
        x = x.to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0)
        total = (x + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + row * hidden_size + columns, total, mask=mask)
        x = total.to(tl.float32)  # the norm sees the rounded sum, as the next layer's residual does
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / hidden_size + eps)
    normed = (x * scale).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * hidden_size + columns, (normed * weight).to(dtype), mask=mask)


def _rows(x: Tensor) -> Tensor:
    """View as `[T, H]` with adjacent columns."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    hidden_size = x.shape[-1]
    like = x if residual is None else residual
    num_parts = 1
    if x.ndim > like.ndim:
        num_parts = x.shape[0]
        x = x.contiguous()
    rows = _rows(x)
    num_rows = rows.shape[0] // num_parts
    residual_rows = rows if residual is None else _rows(residual)
    out = torch.empty(like.shape, dtype=like.dtype, device=x.device)
    total = out
    if residual is not None:
        total = torch.empty(like.shape, dtype=like.dtype, device=x.device)
    if num_rows == 0:
        return out, total
    block = triton.next_power_of_2(hidden_size)
    _rms_norm_kernel[(num_rows,)](
        rows,
        residual_rows,
        weight,
        out,
        total,
        eps,
        hidden_size,
        rows.stride(0),
        residual_rows.stride(0),
        num_rows * rows.stride(0),
        NUM_PARTS=num_parts,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **overlap_options(x),
    )
    return out, total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of x to unit root mean square, then by the weight.

    The mean is taken in float32 and the row is rounded to the dtype of x before the weight is
    applied, in the order in which Llama checkpoints were trained.

    Args:
        x: `[..., H]`.
        weight: `[H]`.
        eps: added to the mean square.

    Returns:
        `[..., H]` in the dtype of x.
    """
    return _launch(x, None, weight, eps)[0]


def rms_norm_residual(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add the residual stream, then normalise the sum.

    Args:
        x: `[..., H]`, what the last sub-layer put out, or float32 `[P, ..., H]`, parts that add up
            to it and are rounded once.
        residual: `[..., H]`, the stream before it.
        weight: `[H]`.
        eps: added to the mean square.

    Returns:
        The normalised sum and the sum itself, both `[..., H]` in the dtype of the residual. The sum
        is rounded to that dtype first.
    """
    return _launch(x, residual, weight, eps)

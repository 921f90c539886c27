"""Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467), in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


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
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return ((x32 * scale).to(x.dtype) * weight).to(x.dtype)


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
    if x.ndim > residual.ndim:
        x = x.sum(0).to(residual.dtype)
    total = x + residual
    return rms_norm(total, weight, eps), total

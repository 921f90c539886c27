"""Products with weight matrices, in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from specgen.kernels.reference.activation import silu_mul


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows with a weight matrix: x W^T + b.

    Args:
        x: `[T, K]`.
        weight: `[N, K]`, in the dtype of x.
        bias: `[N]`.

    Returns:
        `[T, N]` in the dtype of x, summed in float32 and rounded once.
    """
    return functional.linear(x, weight, bias)


def linear_parts(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, perhaps not summed up yet, for `rms_norm_residual`, which takes either.

    Returns:
        `[T, N]` in the dtype of x, or float32 `[P, T, N]`, P parts that add up to it.
    """
    return linear(x, weight, bias)


def linear_silu_mul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows with a gate and another matrix, then `silu_mul` of the two.

    Args:
        x: `[T, K]`.
        weight: `[2*I, K]`: the rows of the gate, then those of the other projection.
        bias: `[2*I]`.

    Returns:
        `[T, I]`; both products are rounded to the dtype of x before the silu.
    """
    return silu_mul(linear(x, weight, bias))

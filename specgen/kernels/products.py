"""The matrix product that the Triton kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, WIDEN: tl.constexpr):
    """Matrix product plus acc, exact for float32 operands.

    WIDEN is for Triton's interpreter, which multiplies the bit patterns of bfloat16 as integers.
    """
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")

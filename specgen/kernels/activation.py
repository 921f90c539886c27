"""The gated activation of the feed-forward layers, one program a piece of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.overlap import enter, overlap_options


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr, out_ptr, width, stride, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    enter(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(gate_up_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + width + columns, mask=mask, other=0.0)
    dtype = out_ptr.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * width + columns, (silu * up.to(tl.float32)).to(dtype), mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's product (Shazeer, arXiv 2002.05202): silu(gate) * up.

    Args:
        gate_up: `[T, 2*I]`, the gate in the first I columns, the other projection in the rest.

    Returns:
        `[T, I]` in the dtype of the input. The silu is computed in float32 and rounded before the
        product.
    """
    gate_up = gate_up if gate_up.stride(-1) == 1 else gate_up.contiguous()
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    block = min(1024, triton.next_power_of_2(width))
    grid = (num_tokens, triton.cdiv(width, block))
    options = overlap_options(gate_up)
    _silu_mul_kernel[grid](
        gate_up, out, width, gate_up.stride(0), BLOCK=block, num_warps=4, **options
    )
    return out

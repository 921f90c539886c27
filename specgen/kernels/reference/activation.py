"""The gated activation of the feed-forward layers, in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's product (Shazeer, arXiv 2002.05202): silu(gate) * up.

    Args:
        gate_up: `[T, 2*I]`, the gate in the first I columns, the other projection in the rest.

    Returns:
        `[T, I]` in the dtype of the input. The silu is computed in float32 and rounded before the
        product.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate.float()).to(gate_up.dtype) * up

"""What an EAGLE-3 layer reads: embedding and hidden state of each pair, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from specgen.kernels.reference.norm import rms_norm


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
    embedded = functional.embedding(input_ids.clamp(min=0), embed_weight).to(hidden.dtype)
    normed = (
        rms_norm(embedded, embed_norm_weight, eps),
        rms_norm(hidden, hidden_norm_weight, eps),
    )
    return torch.cat(normed, dim=-1)

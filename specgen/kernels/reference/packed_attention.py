"""Attention of whole prompts that lie packed one after the other, in plain torch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def applies(x: Tensor, head_dim: int, max_query_len: int) -> bool:
    """Whether the path is to be taken for activations like ``x``: never here.

    Without a GPU every prefill goes through the cache, so that a prompt's numbers do not depend on
    how much of it was cached.
    """
    return False


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Causal attention of every row's tokens over the row's own tokens.

    Args:
        q: `[T, Hq, D]`; row r is the tokens `query_start_loc[r]` to `query_start_loc[r+1]`.
        k: `[T, Hkv, D]`, adjacent along D; Hq a multiple of Hkv.
        v: as `k`.
        query_start_loc: int32 `[R+1]`, ascending from 0 to T.
        max_query_len: host bound on the tokens of a row.
        scale: factor on the scores.
        window: keys a token sees at most, its own included; 0 (or less): all.

    Returns:
        `[T, Hq, D]` in the dtype of q.
    """
    out = torch.empty_like(q)
    bounds = query_start_loc.tolist()
    for begin, end in pairwise(bounds):
        positions = torch.arange(end - begin, device=q.device)
        distance = positions[:, None] - positions
        mask = distance >= 0
        if window > 0:
            mask &= distance < window
        row_q, row_k, row_v = (
            x[begin:end].transpose(0, 1)[None] for x in (q, k, v)
        )  # [1, H, L, D]
        attended = scaled_dot_product_attention(
            row_q, row_k, row_v, attn_mask=mask, scale=scale, enable_gqa=True
        )
        out[begin:end] = attended[0].transpose(0, 1)
    return out

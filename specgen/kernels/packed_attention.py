"""Attention of whole prompts that lie packed one after the other, by torch's flash attention.

It knows nothing of cached blocks: rows that begin behind a cached prefix take the paged kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST_HEAD = 256
_SHORTEST = 512  # rows of 256 tokens take as long through the cache, rows of 2,048 a fifth longer


def applies(x: Tensor, head_dim: int, max_query_len: int) -> bool:
    """Whether the path is to be taken for activations like ``x``, heads of this size and rows of up
    to ``max_query_len`` tokens.
    """
    return (
        x.is_cuda
        and max_query_len >= _SHORTEST
        and x.dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= _LARGEST_HEAD
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(x.device)[0] >= 8
    )


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
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        query_start_loc,
        query_start_loc,
        max_query_len,
        max_query_len,
        0.0,  # dropout
        True,  # causal
        False,  # no mask for debugging
        scale=scale,
        window_size_left=window - 1 if window > 0 else None,
        window_size_right=0 if window > 0 else None,
    )[0]
    return out

"""Rotary embedding (Su et al., arXiv 2104.09864) joined with the cache write, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.kernels.reference.norm import rms_norm


def rotary_write_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Norm and rotate queries and keys, and write keys and values into the cache in place.

    Dimension i is paired with i + D/2. The rotation is computed in float32 and rounded once.

    The very last token slot of the caches belongs to no request: this version writes the keys and
    values of tokens without a slot there, because skipping them would need the host. The Triton
    kernel skips them.

    Args:
        qkv: `[T, (num_heads + 2*num_kv_heads) * D]`: queries, keys, values.
        positions: int32 `[T]`; clamped to the table.
        cos_sin: float32 `[max_pos, D]`: D/2 cosines, then D/2 sines.
        slot_mapping: int64 `[T]`: block * block_size + offset; -1 writes nothing.
        k_cache: `[num_blocks, block_size, num_kv_heads, D]`, contiguous.
        v_cache: as `k_cache`.
        num_heads: query heads; 0 where only keys and values are given.
        num_kv_heads: key and value heads.
        q_norm: `[D]`, weight of a root mean square norm of every query head before the rotation;
            None: there is none. Roundings are those of `rms_norm`.
        k_norm: `[D]`, the same of the keys, given together with `q_norm`.
        eps: added to the mean square.

    Returns:
        The rotated queries, `[T, num_heads, D]`, in the dtype of qkv.
    """
    num_tokens, head_dim = qkv.shape[0], k_cache.shape[-1]
    num_rotated = num_heads + num_kv_heads
    heads = qkv.view(num_tokens, num_rotated + num_kv_heads, head_dim)
    to_rotate = heads[:, :num_rotated]
    if q_norm is not None:
        assert k_norm is not None, "queries and keys are normed together"
        normed_q = rms_norm(heads[:, :num_heads], q_norm, eps)
        to_rotate = torch.cat((normed_q, rms_norm(heads[:, num_heads:num_rotated], k_norm, eps)), 1)
    row = cos_sin[positions.long().clamp(0, cos_sin.shape[0] - 1)]  # [T, D]
    cos, sin = row[:, None].chunk(2, dim=-1)  # [T, 1, D/2]
    first, second = to_rotate.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    rotated = rotated.to(qkv.dtype)
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    slots = torch.where(slot_mapping < 0, num_slots - 1, slot_mapping)
    flat = (num_slots, num_kv_heads, head_dim)
    k_cache.view(flat).index_copy_(0, slots, rotated[:, num_heads:].to(k_cache.dtype))
    v_cache.view(flat).index_copy_(0, slots, heads[:, num_rotated:].to(v_cache.dtype))
    return rotated[:, :num_heads].contiguous()

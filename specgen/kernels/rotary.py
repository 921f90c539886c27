"""Norms of heads, rotary embedding (Su et al., arXiv 2104.09864) and the cache write, one program a
token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.overlap import overlap_options, release, wait


@triton.jit
def _rotary_write_cache_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    slot_mapping_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    max_pos,
    qkv_stride,
    k_block_stride,
    k_token_stride,
    k_head_stride,
    v_block_stride,
    v_token_stride,
    v_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # The kernel behind may read, before it waits, what those before this one have written.
    wait(OVERLAP)
    release(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PAD)[:, None]  # queries, then keys, then values
    i = tl.arange(0, HALF_PAD)[None, :]
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (i < HALF)

    position = tl.load(positions_ptr + token)
    position = tl.minimum(tl.maximum(position, 0), max_pos - 1).to(tl.int64)
    table = cos_sin_ptr + position * (2 * HALF)
    cos = tl.load(table + i, mask=i < HALF, other=0.0)
    sin = tl.load(table + HALF + i, mask=i < HALF, other=0.0)

    source = qkv_ptr + token * qkv_stride + head * (2 * HALF) + i
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + HALF, mask=mask, other=0.0)
    x = first.to(tl.float32)
    y = second.to(tl.float32)
    dtype = q_out_ptr.dtype.element_ty
    if HAS_NORM:
        squares = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)  # masked lanes are zeros
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        is_key_norm = (head >= NUM_HEADS) & (i < HALF)
        is_query_norm = (head < NUM_HEADS) & (i < HALF)
        weight = tl.load(q_norm_ptr + i, mask=is_query_norm, other=0.0).to(tl.float32)
        weight += tl.load(k_norm_ptr + i, mask=is_key_norm, other=0.0).to(tl.float32)
        x = ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
        weight = tl.load(q_norm_ptr + HALF + i, mask=is_query_norm, other=0.0).to(tl.float32)
        weight += tl.load(k_norm_ptr + HALF + i, mask=is_key_norm, other=0.0).to(tl.float32)
        y = ((y * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    rotated_first = (x * cos - y * sin).to(dtype)
    rotated_second = (y * cos + x * sin).to(dtype)

    is_query = mask & (head < NUM_HEADS)
    target = q_out_ptr + (token * NUM_HEADS + head) * (2 * HALF) + i
    tl.store(target, rotated_first, mask=is_query)
    tl.store(target + HALF, rotated_second, mask=is_query)

    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    k_head = head - NUM_HEADS
    is_key = mask & (k_head >= 0) & (k_head < NUM_KV_HEADS) & (slot >= 0)
    cache_dtype = k_cache_ptr.dtype.element_ty
    target = k_cache_ptr + block * k_block_stride + offset * k_token_stride
    target = target + k_head * k_head_stride + i
    tl.store(target, rotated_first.to(cache_dtype), mask=is_key)
    tl.store(target + HALF, rotated_second.to(cache_dtype), mask=is_key)

    v_head = k_head - NUM_KV_HEADS
    is_value = mask & (v_head >= 0) & (slot >= 0)
    target = v_cache_ptr + block * v_block_stride + offset * v_token_stride
    target = target + v_head * v_head_stride + i
    tl.store(target, first.to(cache_dtype), mask=is_value)
    tl.store(target + HALF, second.to(cache_dtype), mask=is_value)


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

    Args:
        qkv: `[T, (num_heads + 2*num_kv_heads) * D]`: queries, keys, values.
        positions: int32 `[T]`; clamped to the table.
        cos_sin: float32 `[max_pos, D]`, contiguous: D/2 cosines, then D/2 sines.
        slot_mapping: int64 `[T]`: block * block_size + offset; -1 writes nothing.
        k_cache: `[num_blocks, block_size, num_kv_heads, D]`.
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
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return q
    qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
    heads_pad = triton.next_power_of_2(num_heads + 2 * num_kv_heads)
    half_pad = triton.next_power_of_2(head_dim // 2)
    _rotary_write_cache_kernel[(num_tokens,)](
        qkv,
        positions,
        cos_sin,
        slot_mapping,
        q,
        k_cache,
        v_cache,
        q_norm,
        k_norm,
        eps,
        cos_sin.shape[0],
        qkv.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_SIZE=k_cache.shape[1],
        HEADS_PAD=heads_pad,
        HALF_PAD=half_pad,
        HAS_NORM=q_norm is not None,
        num_warps=8 if heads_pad * half_pad >= 4096 else 4,
        **overlap_options(qkv),
    )
    return q

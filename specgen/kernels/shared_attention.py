"""Attention of many rows to blocks of the cache that they share, which are read once for all.

A program takes a tile of queries of different rows and a piece of the shared keys. What it finds
joins the parts of each row's own context by their log-sum-exps (compare Juravsky et al.,
"Hydragen", arXiv 2402.05099). Every shared key stands before every query, so nothing is masked but
rows that do not belong.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.batch_types import SharedPrefix
from specgen.kernels.online_softmax import load_block_ids, soft_cap, softmax_step
from specgen.kernels.overlap import enter, overlap_options
from specgen.kernels.products import dot

_LARGEST_TILE = 128
_PROGRAMS = 132  # one for each multiprocessor of a large GPU
_MAX_SPLITS = 16


@triton.jit
def _shared_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ids_ptr,
    context_lens_ptr,
    block_ids_ptr,
    length_ptr,
    members_ptr,
    part_acc_ptr,
    part_max_ptr,
    part_sum_ptr,
    scale_log2,
    cap_log2,
    num_rows,
    num_columns,
    k_block_stride,
    k_token_stride,
    k_head_stride,
    v_block_stride,
    v_token_stride,
    v_head_stride,
    NUM_QUERIES: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FIRST_PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    enter(OVERLAP)
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    NUM_SPLITS: tl.constexpr = NUM_PARTS - FIRST_PART

    # Line m of the tile: head m % GROUP of query m // GROUP, queries row by row.
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = (m // GROUP).to(tl.int64)
    row = query // NUM_QUERIES
    used = row < num_rows
    slot = tl.load(slot_ids_ptr + row, mask=used, other=-1)
    member = used & (slot >= 0)
    member = member & (tl.load(context_lens_ptr + row, mask=member, other=0) > 0)
    member = member & (tl.load(members_ptr + tl.maximum(slot, 0), mask=member, other=0) != 0)
    d = tl.arange(0, BLOCK_D)
    d_mask = d < HEAD_DIM
    q_rows = query * NUM_HEADS + kv_head * GROUP + m % GROUP
    q_mask = member[:, None] & d_mask[None, :]
    q = tl.load(q_ptr + q_rows[:, None] * HEAD_DIM + d[None, :], mask=q_mask, other=0.0)

    num_members = tl.sum(member.to(tl.int32), axis=0)
    length = tl.where(num_members > 0, tl.load(length_ptr), 0)
    num_steps = (length + BLOCK_N - 1) // BLOCK_N
    chunk = ((num_steps + NUM_SPLITS - 1) // NUM_SPLITS) * BLOCK_N
    begin_key = split * chunk
    end = tl.minimum(begin_key + chunk, length)
    running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    k_base = k_cache_ptr + kv_head * k_head_stride
    v_base = v_cache_ptr + kv_head * v_head_stride
    for start in range(begin_key, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        valid = keys < end
        blocks = load_block_ids(block_ids_ptr, keys, valid, num_columns, BLOCK_SIZE)
        offsets = keys % BLOCK_SIZE
        kv_mask = valid[:, None] & d_mask[None, :]
        k_offsets = blocks * k_block_stride + offsets * k_token_stride
        k = tl.load(k_base + k_offsets[:, None] + d[None, :], mask=kv_mask, other=0.0)
        scores = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        scores = dot(q, tl.trans(k), scores, WIDEN) * scale_log2
        if HAS_SOFTCAP:
            scores = soft_cap(scores, cap_log2)
        scores = tl.where(valid[None, :] & member[:, None], scores, float("-inf"))
        v_offsets = blocks * v_block_stride + offsets * v_token_stride
        v = tl.load(v_base + v_offsets[:, None] + d[None, :], mask=kv_mask, other=0.0)
        running_max, running_sum, acc = softmax_step(
            scores, v, running_max, running_sum, acc, WIDEN
        )

    part_rows = q_rows * NUM_PARTS + FIRST_PART + split
    tl.store(part_max_ptr + part_rows, running_max, mask=used)
    tl.store(part_sum_ptr + part_rows, running_sum, mask=used)
    # Nothing more of what has no weight: the join does not read it.
    part_mask = q_mask & (running_sum != 0)[:, None]
    tl.store(part_acc_ptr + part_rows[:, None] * HEAD_DIM + d[None, :], acc, mask=part_mask)


def num_shared_splits(num_lines: int, num_kv_heads: int) -> int:
    """Pieces that the shared keys are cut into for ``num_lines`` query heads of a K/V head."""
    tiles = -(-num_lines // _LARGEST_TILE) * num_kv_heads
    return max(1, min(_MAX_SPLITS, -(-_PROGRAMS // tiles)))


def attend_to_shared(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_ids: Tensor,
    context_lens: Tensor,
    shared: SharedPrefix,
    part_acc: Tensor,
    part_max: Tensor,
    part_sum: Tensor,
    scale_log2: float,
    cap_log2: float,
    first_part: int,
    num_splits: int,
) -> None:
    """Write the parts ``first_part`` to ``first_part + num_splits`` of every query head.

    Args:
        q: `[B, Q, Hq, D]`, contiguous.
        k_cache: `[num_blocks, block_size, Hkv, D]`.
        v_cache: as `k_cache`.
        slot_ids: int32 `[B]`, -1 for an inert row.
        context_lens: int32 `[B]`, 0 for an inert row.
        shared: the shared blocks and whose they are.
        part_acc: float32 `[B * Q * Hq, parts, D]`, sums of values; unwritten where nothing is seen.
        part_max: float32 `[B * Q * Hq, parts]`, largest scores in units of log 2.
        part_sum: float32 `[B * Q * Hq, parts]`, sums of weights.
        scale_log2: factor on the scores, times log2(e).
        cap_log2: bound on the scores, times log2(e); 0: none.
        first_part: parts before these, of the rows' own contexts.
        num_splits: pieces that the shared keys are cut into.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    num_lines = batch * num_queries * (num_heads // num_kv_heads)
    block_d = max(16, triton.next_power_of_2(head_dim))
    head_bytes = block_d * q.element_size()
    small = head_bytes <= 256
    # Tiles of wide heads are smaller, so that they fit the fast memory.
    largest = _LARGEST_TILE if small else _LARGEST_TILE // 2 if head_bytes <= 512 else 16
    block_m = min(largest, max(16, triton.next_power_of_2(num_lines)))
    _shared_kernel[(num_kv_heads, triton.cdiv(num_lines, block_m), num_splits)](
        q,
        k_cache,
        v_cache,
        slot_ids,
        context_lens,
        shared.block_ids,
        shared.length,
        shared.members.view(torch.uint8),
        part_acc,
        part_max,
        part_sum,
        scale_log2,
        cap_log2,
        batch,
        shared.block_ids.shape[0],
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        NUM_QUERIES=num_queries,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        FIRST_PART=first_part,
        NUM_PARTS=first_part + num_splits,
        HAS_SOFTCAP=cap_log2 > 0,
        BLOCK_M=block_m,
        BLOCK_N=64 if small else 32,
        BLOCK_D=block_d,
        WIDEN=not q.is_cuda,
        num_warps=8 if block_m * block_d >= 8192 else 4,
        num_stages=3 if head_bytes <= 512 else 2,
        **overlap_options(q),
    )

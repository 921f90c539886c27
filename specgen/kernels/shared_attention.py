"""Attention of many rows to blocks of the cache that they share, which are read once for all.

A program takes a tile of queries of different rows and a piece of the shared keys. What it finds
joins the parts of each row's own context by their log-sum-exps (compare Juravsky et al.,
"Hydragen", arXiv 2402.05099). Every shared key stands before every query, so no score is masked:
rows that do not belong are computed along and left out at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.attention_parts import Parts
from specgen.kernels.batch_types import SharedPrefix
from specgen.kernels.online_softmax import soft_cap, softmax_step
from specgen.kernels.overlap import enter, overlap_options, register_options
from specgen.kernels.products import dot

_PROGRAMS = 132  # one for each multiprocessor of a large GPU
_MANY_TILES = 64  # from here on two programs a multiprocessor are faster, with fewer registers each
_MAX_SPLITS = 16


class SharedCut(NamedTuple):
    """How it is cut: pieces of the keys, query heads and keys a step, warps, and stages of loads.

    `max_registers` bounds the registers of a thread, so that more programs fit; None: no bound.
    """

    splits: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


@triton.jit
def _attend(
    q,
    k_base,
    v_base,
    block_ids_ptr,
    start,
    end,
    d,
    scale_log2,
    cap_log2,
    k_block_stride,
    k_token_stride,
    v_block_stride,
    v_token_stride,
    running_max,
    running_sum,
    acc,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One step over the keys from start on; where the step is not whole, to before end."""
    keys = start + tl.arange(0, BLOCK_N)
    if not IS_WHOLE:
        keys = tl.minimum(keys, end - 1)  # again the last key, which is no other row's
    blocks = tl.load(block_ids_ptr + keys // BLOCK_SIZE).to(tl.int64)
    offsets = keys % BLOCK_SIZE
    k_ptrs = k_base + (blocks * k_block_stride + offsets * k_token_stride)[:, None] + d[None, :]
    v_ptrs = v_base + (blocks * v_block_stride + offsets * v_token_stride)[:, None] + d[None, :]
    if HEAD_DIM == BLOCK_D:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs)
    else:
        k = tl.load(k_ptrs, mask=(d < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(v_ptrs, mask=(d < HEAD_DIM)[None, :], other=0.0)
    scores = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    scores = dot(q, tl.trans(k), scores, WIDEN) * scale_log2
    if HAS_SOFTCAP:
        scores = soft_cap(scores, cap_log2)
    if not IS_WHOLE:
        seen = start + tl.arange(0, BLOCK_N) < end
        scores = tl.where(seen[None, :], scores, float("-inf"))
    return softmax_step(scores, v, running_max, running_sum, acc, WIDEN)


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
    first_part,
    num_parts,
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
    num_splits = tl.num_programs(2)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS

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
    q_mask = used[:, None] & d_mask[None, :]
    q = tl.load(q_ptr + q_rows[:, None] * HEAD_DIM + d[None, :], mask=q_mask, other=0.0)

    num_members = tl.sum(member.to(tl.int32), axis=0)
    length = tl.where(num_members > 0, tl.load(length_ptr), 0)
    num_steps = tl.cdiv(length, BLOCK_N)
    chunk = tl.cdiv(num_steps, num_splits) * BLOCK_N
    begin = tl.minimum(split * chunk, length)
    end = tl.minimum(begin + chunk, length)
    whole_end = begin + (end - begin) // BLOCK_N * BLOCK_N
    running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    k_base = k_cache_ptr + kv_head * k_head_stride
    v_base = v_cache_ptr + kv_head * v_head_stride
    for start in range(begin, whole_end, BLOCK_N):
        running_max, running_sum, acc = _attend(
            q,
            k_base,
            v_base,
            block_ids_ptr,
            start,
            end,
            d,
            scale_log2,
            cap_log2,
            k_block_stride,
            k_token_stride,
            v_block_stride,
            v_token_stride,
            running_max,
            running_sum,
            acc,
            HEAD_DIM,
            BLOCK_SIZE,
            HAS_SOFTCAP,
            True,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            WIDEN,
        )
    if whole_end < end:
        running_max, running_sum, acc = _attend(
            q,
            k_base,
            v_base,
            block_ids_ptr,
            whole_end,
            end,
            d,
            scale_log2,
            cap_log2,
            k_block_stride,
            k_token_stride,
            v_block_stride,
            v_token_stride,
            running_max,
            running_sum,
            acc,
            HEAD_DIM,
            BLOCK_SIZE,
            HAS_SOFTCAP,
            False,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            WIDEN,
        )

    # Parts are written whole, so that readers need not look whether there is something.
    running_max = tl.where(member, running_max, float("-inf"))
    running_sum = tl.where(member, running_sum, 0.0)
    acc = tl.where(member[:, None], acc, 0.0)
    part_rows = q_rows * num_parts + first_part + split
    tl.store(part_max_ptr + part_rows, running_max, mask=used)
    tl.store(part_sum_ptr + part_rows, running_sum, mask=used)
    tl.store(part_acc_ptr + part_rows[:, None] * HEAD_DIM + d[None, :], acc, mask=q_mask)


def cut_shared(num_lines: int, num_kv_heads: int, head_dim: int, element_size: int) -> SharedCut:
    """How to cut shared keys for ``num_lines`` query heads of each K/V head."""
    block_d = max(16, triton.next_power_of_2(head_dim))
    head_bytes = block_d * element_size
    is_small = head_bytes <= 256
    # Tiles of wide heads are smaller, so that they fit the fast memory.
    largest = 128 if is_small else 64 if head_bytes <= 512 else 16
    block_m = min(largest, max(16, triton.next_power_of_2(num_lines)))
    tiles = -(-num_lines // block_m) * num_kv_heads
    in_pairs = is_small and block_m == 128 and tiles >= _MANY_TILES
    # All programs of a cut run at once: with one more they would take twice the time.
    programs = 2 * _PROGRAMS if in_pairs else _PROGRAMS
    return SharedCut(
        splits=max(1, min(_MAX_SPLITS, programs // tiles)),
        block_m=block_m,
        block_n=64 if is_small else 32,
        num_warps=8 if block_m * block_d >= 8192 else 4,
        num_stages=3 if head_bytes <= 512 else 2,
        max_registers=128 if in_pairs else None,
    )


def attend_to_shared(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_ids: Tensor,
    context_lens: Tensor,
    shared: SharedPrefix,
    scale_log2: float,
    cap_log2: float,
    parts: Parts,
    first_part: int,
    cut: SharedCut,
) -> None:
    """Write the parts ``first_part`` to ``first_part + cut.splits`` of every query head, whole.

    Args:
        q: `[B, Q, Hq, D]`, contiguous.
        k_cache: `[num_blocks, block_size, Hkv, D]`.
        v_cache: as `k_cache`.
        slot_ids: int32 `[B]`, -1 for an inert row.
        context_lens: int32 `[B]`, 0 for an inert row.
        shared: the shared blocks and whose they are.
        scale_log2: factor on the scores, times log2(e).
        cap_log2: bound on the scores, times log2(e); 0: none.
        parts: of every query head; zeros and -inf where nothing is seen.
        first_part: parts before these, of the rows' own contexts.
        cut: how the work is cut.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    num_lines = batch * num_queries * (num_heads // num_kv_heads)
    _shared_kernel[(num_kv_heads, triton.cdiv(num_lines, cut.block_m), cut.splits)](
        q,
        k_cache,
        v_cache,
        slot_ids,
        context_lens,
        shared.block_ids,
        shared.length,
        shared.members.view(torch.uint8),
        parts.acc,
        parts.largest,
        parts.total,
        scale_log2,
        cap_log2,
        batch,
        first_part,
        parts.acc.shape[1],
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
        HAS_SOFTCAP=cap_log2 > 0,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        WIDEN=not q.is_cuda,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **register_options(cut.max_registers),
        **overlap_options(q),
    )

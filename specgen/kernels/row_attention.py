"""Attention of a few queries of each row to blocks of the row's own.

The query heads that share a K/V head and the row's few query positions are the rows of one matrix
product, so K and V are read once. A context may be split over several programs, whose parts another
kernel joins; a program that has it whole adds what was found in shared blocks and is done.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.attention_parts import Parts, load_parts
from specgen.kernels.batch_types import SharedPrefix
from specgen.kernels.online_softmax import load_block_ids, soft_cap, softmax_step
from specgen.kernels.overlap import fetch_ahead, overlap_options, release, wait
from specgen.kernels.products import dot

_PROGRAMS = 528  # four for each multiprocessor of a large GPU
_MIN_SPLIT = 64  # keys of the host bound a split is worth
_MAX_SPLITS = 64
_FETCHED = 64  # keys whose way from memory begins before queries are there


class DecodeCut(NamedTuple):
    """How decode is cut: programs a row and head, keys a step, warps, and stages of loads."""

    splits: int
    block_n: int
    num_warps: int
    num_stages: int


@triton.jit
def _decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    slot_ids_ptr,
    first_positions_ptr,
    context_lens_ptr,
    shared_length_ptr,
    shared_members_ptr,
    out_ptr,
    part_acc_ptr,
    part_max_ptr,
    part_sum_ptr,
    scale_log2,
    cap_log2,
    num_columns,
    table_stride,
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
    IS_SPLIT: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
    FETCHED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    release(OVERLAP)
    # The heads of a row run side by side: what they read of a token is one piece of memory.
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS

    slot = tl.load(slot_ids_ptr + row)
    context = tl.load(context_lens_ptr + row)
    context = tl.where(slot >= 0, context, 0)
    slot = tl.maximum(slot, 0).to(tl.int64)
    first = tl.load(first_positions_ptr + row)

    # The row's real context is shared out, whatever the host bound was. No query sees past its own
    # position, so keys above the last query's are left out.
    context = tl.minimum(context, first + NUM_QUERIES)
    oldest = 0
    if WINDOW > 0:  # nothing before the first query's window is read
        oldest = (tl.maximum(first - WINDOW + 1, 0) // BLOCK_N) * BLOCK_N
    if NUM_SHARED > 0:  # another kernel attends to what the row shares
        member = tl.load(shared_members_ptr + slot) != 0
        oldest = tl.where(member, tl.load(shared_length_ptr), 0)
    begin, end = oldest, context
    if IS_SPLIT:
        num_blocks = tl.cdiv(tl.maximum(context - oldest, 0), BLOCK_N)
        chunk = tl.cdiv(num_blocks, num_splits) * BLOCK_N
        begin = oldest + split * chunk
        end = tl.minimum(begin + chunk, context)

    table_ptr = block_tables_ptr + slot * table_stride
    k_base = k_cache_ptr + kv_head * k_head_stride
    v_base = v_cache_ptr + kv_head * v_head_stride
    if OVERLAP:
        # All but the row's last keys stand since earlier steps: their way from memory begins while
        # those are still written.
        ahead = begin + tl.arange(0, FETCHED)
        places = load_block_ids(table_ptr, ahead, ahead < end, num_columns, BLOCK_SIZE)
        within = ahead % BLOCK_SIZE
        fetch_ahead(k_base + places * k_block_stride + within * k_token_stride, HEAD_DIM)
        fetch_ahead(v_base + places * v_block_stride + within * v_token_stride, HEAD_DIM)
    wait(OVERLAP)

    # Row m of the tile: query m // GROUP, head m % GROUP of the group.
    m = tl.arange(0, BLOCK_M)
    query = m // GROUP
    head = kv_head * GROUP + m % GROUP
    m_mask = m < NUM_QUERIES * GROUP
    d = tl.arange(0, BLOCK_D)
    d_mask = d < HEAD_DIM
    q_rows = (row * NUM_QUERIES + query) * NUM_HEADS + head
    q_offsets = q_rows[:, None] * HEAD_DIM + d[None, :]
    q_mask = m_mask[:, None] & d_mask[None, :]
    q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)
    if not IS_SPLIT and NUM_SHARED > 0:  # go on from what was found in the shared blocks
        running_max, running_sum, acc = load_parts(
            part_acc_ptr, part_max_ptr, part_sum_ptr, q_rows, m_mask, d, NUM_SHARED, HEAD_DIM
        )
    else:
        running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)

    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        valid = keys < end
        blocks = load_block_ids(table_ptr, keys, valid, num_columns, BLOCK_SIZE)
        offsets = keys % BLOCK_SIZE
        kv_mask = valid[:, None] & d_mask[None, :]
        k_offsets = blocks * k_block_stride + offsets * k_token_stride
        k = tl.load(k_base + k_offsets[:, None] + d[None, :], mask=kv_mask, other=0.0)
        scores = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        scores = dot(q, tl.trans(k), scores, WIDEN) * scale_log2
        if HAS_SOFTCAP:
            scores = soft_cap(scores, cap_log2)
        visible = valid[None, :] & (keys[None, :] <= first + query[:, None])
        if WINDOW > 0:
            visible = visible & (keys[None, :] > first + query[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        v_offsets = blocks * v_block_stride + offsets * v_token_stride
        v = tl.load(v_base + v_offsets[:, None] + d[None, :], mask=kv_mask, other=0.0)
        running_max, running_sum, acc = softmax_step(
            scores, v, running_max, running_sum, acc, WIDEN
        )

    if not IS_SPLIT:
        divisor = tl.where(running_sum != 0, running_sum, 1.0)
        result = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + q_offsets, result, mask=q_mask)
    else:
        part_rows = q_rows * (num_splits + NUM_SHARED) + split
        tl.store(part_max_ptr + part_rows, running_max, mask=m_mask)
        tl.store(part_sum_ptr + part_rows, running_sum, mask=m_mask)
        # An empty split stores nothing more: the join does not read what has no weight.
        part_mask = q_mask & (running_sum != 0)[:, None]
        tl.store(part_acc_ptr + part_rows[:, None] * HEAD_DIM + d[None, :], acc, mask=part_mask)


def cut_decode(q: Tensor, num_kv_heads: int, max_keys: int) -> DecodeCut:
    """How to cut attention of q `[B, Q, Hq, D]` to ``max_keys`` keys a row at most."""
    batch, num_queries, num_heads, head_dim = q.shape
    block_m = max(16, triton.next_power_of_2(num_queries * (num_heads // num_kv_heads)))
    block_d = max(16, triton.next_power_of_2(head_dim))
    # Small steps with many loads in flight read fastest where they fit the fast memory.
    is_small = block_d * q.element_size() <= 256
    splits = min(_PROGRAMS // (batch * num_kv_heads), max_keys // _MIN_SPLIT, _MAX_SPLITS)
    return DecodeCut(
        splits=max(1, splits),
        block_n=32,
        num_warps=8 if block_m * block_d >= 8192 else 4,
        num_stages=6 if is_small else 3,
    )


def attend_to_own(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slot_ids: Tensor,
    first_positions: Tensor,
    context_lens: Tensor,
    shared: SharedPrefix | None,
    scale_log2: float,
    cap_log2: float,
    window: int,
    out: Tensor,
    parts: Parts | None,
    cut: DecodeCut,
) -> None:
    """Attention to what each row does not share.

    With one split, write `out`, in which all `parts` are those of the shared keys. With more, write
    the first parts and leave `out`.

    Args:
        q: `[B, Q, Hq, D]`, contiguous.
        k_cache: `[num_blocks, block_size, Hkv, D]`.
        v_cache: as `k_cache`.
        block_tables: int32 `[S, MB]`.
        slot_ids: int32 `[B]`, -1 for an inert row.
        first_positions: int32 `[B]`.
        context_lens: int32 `[B]`, 0 for an inert row.
        shared: blocks that are left out for members; None: nothing is left out.
        scale_log2: factor on the scores, times log2(e).
        cap_log2: bound on the scores, times log2(e); 0: none.
        window: keys a query sees at most; 0: all.
        out: like q; zeros where a query has nothing to see.
        parts: of every query head; None where there is one split and nothing is shared.
        cut: how the work is cut.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    num_shared = 0
    if shared is not None and parts is not None:
        num_shared = parts.acc.shape[1] - (cut.splits if cut.splits > 1 else 0)
    _decode_kernel[(num_kv_heads, batch, cut.splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        slot_ids,
        first_positions,
        context_lens,
        None if shared is None else shared.length,
        None if shared is None else shared.members.view(torch.uint8),
        out,
        None if parts is None else parts.acc,
        None if parts is None else parts.largest,
        None if parts is None else parts.total,
        scale_log2,
        cap_log2,
        block_tables.shape[1],
        block_tables.stride(0),
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
        IS_SPLIT=cut.splits > 1,
        NUM_SHARED=num_shared,
        WINDOW=window,
        HAS_SOFTCAP=cap_log2 > 0,
        BLOCK_M=max(16, triton.next_power_of_2(num_queries * (num_heads // num_kv_heads))),
        BLOCK_N=cut.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        WIDEN=not q.is_cuda,
        FETCHED=_FETCHED,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **overlap_options(q),
    )

"""Attention of packed chunks of prompts over the paged K/V cache.

An online softmax (Dao, arXiv 2307.08691). As in decode, the query heads that share a K/V head stand
in one tile: a chunk of a few tokens still fills it, and K and V are read once for all of them. Keys
that all queries of a tile see are not masked.

The tiles of all rows are numbered through, so that the grid follows from the number of tokens and
rows alone: a few long rows among many short ones leave no programs idle, and a pass of padded size
can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.online_softmax import load_block_ids, soft_cap, softmax_step
from specgen.kernels.overlap import enter, overlap_options, register_options
from specgen.kernels.products import dot

_LOG2E = 1.4426950408889634


class PrefillCut(NamedTuple):
    """How prefill is cut: query heads and keys a step, warps, and stages of loads.

    `max_registers` bounds the registers of a thread, so that more programs fit; None: no bound.
    """

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
    table_ptr,
    start,
    end,
    positions,
    d,
    scale_log2,
    cap_log2,
    num_columns,
    k_block_stride,
    k_token_stride,
    v_block_stride,
    v_token_stride,
    running_max,
    running_sum,
    acc,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One step over the keys from start on; unless masked, every query sees all of them."""
    keys = start + tl.arange(0, BLOCK_N)
    valid = keys < end
    if MASKED:
        blocks = load_block_ids(table_ptr, keys, valid, num_columns, BLOCK_SIZE)
    else:
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE).to(tl.int64)
    offsets = keys % BLOCK_SIZE
    k_ptrs = k_base + (blocks * k_block_stride + offsets * k_token_stride)[:, None] + d[None, :]
    v_ptrs = v_base + (blocks * v_block_stride + offsets * v_token_stride)[:, None] + d[None, :]
    if MASKED:
        kv_mask = valid[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(k_ptrs, mask=kv_mask, other=0.0)
        v = tl.load(v_ptrs, mask=kv_mask, other=0.0)
    elif HEAD_DIM == BLOCK_D:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs)
    else:
        k = tl.load(k_ptrs, mask=(d < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(v_ptrs, mask=(d < HEAD_DIM)[None, :], other=0.0)
    scores = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    scores = dot(q, tl.trans(k), scores, WIDEN) * scale_log2
    if HAS_SOFTCAP:
        scores = soft_cap(scores, cap_log2)
    if MASKED:
        visible = valid[None, :] & (keys[None, :] <= positions[:, None])
        if WINDOW > 0:
            visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    return softmax_step(scores, v, running_max, running_sum, acc, WIDEN)


@triton.jit
def _row_of_tile(tile, query_start_loc_ptr, num_rows, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The row that a tile belongs to, ``num_rows`` for padding tokens; its first query and the
    tile's number in it.

    Row r begins with tile ``lines before it // BLOCK_M + r``, which leaves it one tile more than it
    can need where it does not end with a whole one.
    """
    row = num_rows * 0  # the last one that has begun, by bisection
    last = num_rows
    while row < last:
        middle = (row + last + 1) // 2
        has_begun = tl.load(query_start_loc_ptr + middle) * GROUP // BLOCK_M + middle <= tile
        row = tl.where(has_begun, middle, row)
        last = tl.where(has_begun, last, middle - 1)
    query_begin = tl.load(query_start_loc_ptr + row)
    return row, query_begin, tile - (query_begin * GROUP // BLOCK_M + row)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])  # they change from pass to pass
def _prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    slot_ids_ptr,
    query_start_loc_ptr,
    first_positions_ptr,
    context_lens_ptr,
    out_ptr,
    scale_log2,
    cap_log2,
    num_tokens,
    num_rows,
    num_columns,
    table_stride,
    k_block_stride,
    k_token_stride,
    k_head_stride,
    v_block_stride,
    v_token_stride,
    v_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    enter(OVERLAP)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    # A row's last tiles see most keys: they come first, so that no long one is left to the end.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // NUM_KV_HEADS
    row, query_begin, tile = _row_of_tile(tile, query_start_loc_ptr, num_rows, GROUP, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    d_mask = d < HEAD_DIM

    # Line m of a row: head m % GROUP of query m // GROUP.
    lines = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if row == num_rows:  # padding tokens
        num_lines = (num_tokens - query_begin) * GROUP
        tokens = (query_begin + lines // GROUP).to(tl.int64)
        heads = tokens * NUM_HEADS + kv_head * GROUP + lines % GROUP
        mask = (lines < num_lines)[:, None] & d_mask[None, :]
        nothing = tl.zeros([BLOCK_M, BLOCK_D], dtype=out_ptr.dtype.element_ty)
        tl.store(out_ptr + heads[:, None] * HEAD_DIM + d[None, :], nothing, mask=mask)
    else:
        num_lines = (tl.load(query_start_loc_ptr + row + 1) - query_begin) * GROUP
        if tile * BLOCK_M < num_lines:
            slot = tl.load(slot_ids_ptr + row)
            context = tl.load(context_lens_ptr + row)
            context = tl.where(slot >= 0, context, 0)
            slot = tl.maximum(slot, 0).to(tl.int64)
            first = tl.load(first_positions_ptr + row)

            tokens = (query_begin + lines // GROUP).to(tl.int64)
            heads = tokens * NUM_HEADS + kv_head * GROUP + lines % GROUP
            q_offsets = heads[:, None] * HEAD_DIM + d[None, :]
            q_mask = (lines < num_lines)[:, None] & d_mask[None, :]
            q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)
            positions = first + lines // GROUP

            # Nothing in this tile sees past its last query, and all see what its first one sees.
            oldest = first + (tile * BLOCK_M) // GROUP
            newest = first + (tl.minimum((tile + 1) * BLOCK_M, num_lines) - 1) // GROUP
            end = tl.minimum(context, newest + 1)
            begin = 0
            whole_end = tl.minimum(oldest + 1, end) // BLOCK_N * BLOCK_N
            if WINDOW > 0:  # nothing before the window of its first query; and windows end anywhere
                begin = (tl.maximum(oldest - WINDOW + 1, 0) // BLOCK_N) * BLOCK_N
                whole_end = begin
            running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
            running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
            table_ptr = block_tables_ptr + slot * table_stride
            k_base = k_cache_ptr + kv_head * k_head_stride
            v_base = v_cache_ptr + kv_head * v_head_stride
            for start in range(begin, whole_end, BLOCK_N):
                running_max, running_sum, acc = _attend(
                    q,
                    k_base,
                    v_base,
                    table_ptr,
                    start,
                    end,
                    positions,
                    d,
                    scale_log2,
                    cap_log2,
                    num_columns,
                    k_block_stride,
                    k_token_stride,
                    v_block_stride,
                    v_token_stride,
                    running_max,
                    running_sum,
                    acc,
                    HEAD_DIM,
                    BLOCK_SIZE,
                    WINDOW,
                    HAS_SOFTCAP,
                    False,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_D,
                    WIDEN,
                )
            for start in range(whole_end, end, BLOCK_N):
                running_max, running_sum, acc = _attend(
                    q,
                    k_base,
                    v_base,
                    table_ptr,
                    start,
                    end,
                    positions,
                    d,
                    scale_log2,
                    cap_log2,
                    num_columns,
                    k_block_stride,
                    k_token_stride,
                    v_block_stride,
                    v_token_stride,
                    running_max,
                    running_sum,
                    acc,
                    HEAD_DIM,
                    BLOCK_SIZE,
                    WINDOW,
                    HAS_SOFTCAP,
                    True,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_D,
                    WIDEN,
                )
            divisor = tl.where(running_sum != 0, running_sum, 1.0)
            result = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + q_offsets, result, mask=q_mask)


def cut_prefill(max_num_lines: int, head_dim: int, element_size: int) -> PrefillCut:
    """How to cut rows of at most ``max_num_lines`` query heads a K/V head."""
    block_d = max(16, triton.next_power_of_2(head_dim))
    is_small = block_d * element_size <= 256
    block_m = min(128 if is_small else 64, max(16, triton.next_power_of_2(max_num_lines)))
    return PrefillCut(
        block_m=block_m,
        # Fewer keys a step where the tiles of K and V would not fit the fast memory.
        block_n=64 if is_small else 32,
        num_warps=8 if block_m * block_d >= 8192 else 4,
        num_stages=3,
        max_registers=128 if is_small and block_m == 128 else None,
    )


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slot_ids: Tensor,
    query_start_loc: Tensor,
    first_positions: Tensor,
    context_lens: Tensor,
    scale: float,
    max_query_len: int,
    max_context_len: int,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of packed chunks of queries, of any length a row, over each row's cached context.

    The rule of visibility, the caches and the tables are those of `decode_attention`.

    Args:
        q: `[T, Hq, D]`; the queries of row r are `query_start_loc[r]` to `query_start_loc[r+1]`, at
            positions from `first_positions[r]` on. T may exceed `query_start_loc[R]`.
        k_cache: `[num_blocks, block_size, Hkv, D]`.
        v_cache: as `k_cache`.
        block_tables: int32 `[S, MB]`.
        slot_ids: int32 `[R]`; -1 for an inert row.
        query_start_loc: int32 `[R+1]`, ascending from 0.
        first_positions: int32 `[R]`.
        context_lens: int32 `[R]`.
        scale: factor on the scores.
        max_query_len: host bound on the queries of a row.
        max_context_len: host bound on `context_lens`.
        window: keys a query sees at most; 0 (or less): all.
        softcap: scores s become softcap * tanh(s / softcap); 0: they stay.

    Returns:
        `[T, Hq, D]` in the dtype of q; zeros past `query_start_loc[R]` and where nothing is
        visible.
    """

    num_tokens, num_heads, head_dim = q.shape
    num_rows = slot_ids.numel()
    if num_tokens == 0 or num_rows == 0 or max_query_len <= 0 or max_context_len <= 0:
        return torch.zeros_like(q)
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    q = q.contiguous()
    out = torch.empty_like(q)
    max_num_lines = max_query_len * (num_heads // num_kv_heads)
    cut = cut_prefill(max_num_lines, head_dim, q.element_size())
    # A tile more than whole ones for every row, and for the padding tokens, which are cleared.
    num_tiles = num_tokens * (num_heads // num_kv_heads) // cut.block_m + num_rows + 1
    _prefill_kernel[(num_tiles * num_kv_heads,)](
        q,
        k_cache,
        v_cache,
        block_tables,
        slot_ids,
        query_start_loc,
        first_positions,
        context_lens,
        out,
        scale * _LOG2E,
        softcap * _LOG2E,
        num_tokens,
        num_rows,
        block_tables.shape[1],
        block_tables.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=max(window, 0),
        HAS_SOFTCAP=softcap > 0,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        WIDEN=not q.is_cuda,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **register_options(cut.max_registers),
        **overlap_options(q),
    )
    return out

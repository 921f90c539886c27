"""Attention over the paged K/V cache.

Decode reads what rows share once for all (`shared_attention.py`), then what each row has of its own
(`row_attention.py`), with few rows in several programs whose parts are joined
(`attention_parts.py`). Prefill is an online softmax (Dao, arXiv 2307.08691) over packed chunks of
queries.

Grids follow from shapes and host bounds alone; how far a program really reads is decided on the
device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.attention_parts import join_parts, new_parts
from specgen.kernels.batch_types import SharedPrefix
from specgen.kernels.online_softmax import load_block_ids, soft_cap, softmax_step
from specgen.kernels.overlap import enter, overlap_options
from specgen.kernels.products import dot
from specgen.kernels.row_attention import attend_to_own, cut_decode
from specgen.kernels.shared_attention import attend_to_shared, cut_shared

_LOG2E = 1.4426950408889634


@triton.jit
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
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    d = tl.arange(0, BLOCK_D)
    d_mask = d < HEAD_DIM
    query_begin = tl.load(query_start_loc_ptr + row)

    if row == num_rows:
        # The programs behind the last row clear the padding tokens, however many there are.
        nothing = tl.zeros([BLOCK_M, BLOCK_D], dtype=out_ptr.dtype.element_ty)
        step = tl.num_programs(0) * BLOCK_M
        for start in range(query_begin + tile * BLOCK_M, num_tokens, step):
            tokens = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
            targets = (tokens * NUM_HEADS + head)[:, None] * HEAD_DIM + d[None, :]
            mask = (tokens < num_tokens)[:, None] & d_mask[None, :]
            tl.store(out_ptr + targets, nothing, mask=mask)
    else:
        num_queries = tl.load(query_start_loc_ptr + row + 1) - query_begin
        if tile * BLOCK_M < num_queries:
            slot = tl.load(slot_ids_ptr + row)
            context = tl.load(context_lens_ptr + row)
            context = tl.where(slot >= 0, context, 0)
            slot = tl.maximum(slot, 0).to(tl.int64)
            first = tl.load(first_positions_ptr + row)

            m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            tokens = (query_begin + m).to(tl.int64)
            q_offsets = (tokens * NUM_HEADS + head)[:, None] * HEAD_DIM + d[None, :]
            q_mask = (m < num_queries)[:, None] & d_mask[None, :]
            q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)

            # Nothing in this tile sees past its last query.
            last = first + tl.minimum((tile + 1) * BLOCK_M, num_queries)
            end = tl.minimum(context, last)
            begin = 0
            if WINDOW > 0:  # nor before the window of its first query
                begin = (tl.maximum(first + tile * BLOCK_M - WINDOW + 1, 0) // BLOCK_N) * BLOCK_N
            running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
            running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
            table_ptr = block_tables_ptr + slot * table_stride
            k_base = k_cache_ptr + kv_head * k_head_stride
            v_base = v_cache_ptr + kv_head * v_head_stride
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
                visible = valid[None, :] & (keys[None, :] <= first + m[:, None])
                if WINDOW > 0:
                    visible = visible & (keys[None, :] > first + m[:, None] - WINDOW)
                scores = tl.where(visible, scores, float("-inf"))
                v_offsets = blocks * v_block_stride + offsets * v_token_stride
                v = tl.load(v_base + v_offsets[:, None] + d[None, :], mask=kv_mask, other=0.0)
                running_max, running_sum, acc = softmax_step(
                    scores, v, running_max, running_sum, acc, WIDEN
                )
            divisor = tl.where(running_sum != 0, running_sum, 1.0)
            result = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + q_offsets, result, mask=q_mask)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slot_ids: Tensor,
    first_positions: Tensor,
    context_lens: Tensor,
    scale: float,
    max_context_len: int,
    window: int = 0,
    softcap: float = 0.0,
    shared: SharedPrefix | None = None,
) -> Tensor:
    """Attention of a few consecutive queries a row over the row's cached context.

    A query at position p sees the keys at positions <= p that are below the row's context length.
    The keys of the queries themselves are already in the cache. With a window w (Beltagy et al.,
    arXiv 2004.05150) it sees the last w of them only, its own included.

    Args:
        q: `[B, Q, Hq, D]`; query i of row b is at position `first_positions[b] + i`.
        k_cache: `[num_blocks, block_size, Hkv, D]`, Hq a multiple of Hkv.
        v_cache: as `k_cache`.
        block_tables: int32 `[S, MB]`, the blocks of each slot in order.
        slot_ids: int32 `[B]`, the row's line of `block_tables`; -1 for an inert row.
        first_positions: int32 `[B]`.
        context_lens: int32 `[B]`, keys of each row; 0 for an inert row.
        scale: factor on the scores.
        max_context_len: host bound on `context_lens`.
        window: keys a query sees at most; 0 (or less): all.
        softcap: scores s become softcap * tanh(s / softcap); 0: they stay.
        shared: blocks that members read in place of the first ones of their tables, before their
            first query's position; only without a window.

    Returns:
        `[B, Q, Hq, D]` in the dtype of q; zeros where a query has nothing to see.
    """
    q = q.contiguous()
    out = torch.empty_like(q)
    if out.numel() == 0:
        return out
    num_kv_heads = k_cache.shape[2]
    reach = min(max_context_len, window + q.shape[1]) if window > 0 else max_context_len
    cut = cut_decode(q, num_kv_heads, reach)
    num_own, num_shared = cut.splits if cut.splits > 1 else 0, 0
    if shared is not None:
        num_lines = q.numel() // (q.shape[-1] * num_kv_heads)
        shared_cut = cut_shared(num_lines, num_kv_heads, q.shape[-1], q.element_size())
        num_shared = shared_cut.splits
    parts = None
    if num_own + num_shared > 0:
        parts = new_parts(q.numel() // q.shape[-1], num_own + num_shared, q.shape[-1], q.device)
    caches, scales = (k_cache, v_cache), (scale * _LOG2E, softcap * _LOG2E)
    if shared is not None and parts is not None:
        attend_to_shared(
            q, *caches, slot_ids, context_lens, shared, *scales, parts, num_own, shared_cut
        )
    attend_to_own(
        q,
        *caches,
        block_tables,
        slot_ids,
        first_positions,
        context_lens,
        shared,
        *scales,
        max(window, 0),
        out,
        parts,
        cut,
    )
    if parts is not None and num_own > 0:
        join_parts(parts, out)
    return out


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
    block_d = max(16, triton.next_power_of_2(head_dim))
    largest = 128 if block_d * q.element_size() <= 256 else 64
    block_m = min(largest, max(16, triton.next_power_of_2(max_query_len)))
    # One row more than there are: its programs clear the padding tokens.
    grid = (triton.cdiv(max_query_len, block_m), num_heads, num_rows + 1)
    _prefill_kernel[grid](
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
        BLOCK_M=block_m,
        # Fewer keys a step where the tiles of K and V would not fit the fast memory.
        BLOCK_N=64 if block_d * q.element_size() <= 256 else 32,
        BLOCK_D=block_d,
        WIDEN=not q.is_cuda,
        num_warps=8 if block_m * block_d >= 8192 else 4,
        num_stages=3,
        **overlap_options(q),
    )
    return out

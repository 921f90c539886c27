"""Attention over the paged K/V cache.

Decode splits each row's context over several programs, which a second kernel joins by their
log-sum-exps (Dao et al., "Flash-Decoding", 2023); the query heads that share a K/V head and the
row's few query positions are the rows of one matrix product, so K and V are read once. Prefill is
an online softmax (Dao, arXiv 2307.08691) over packed chunks of queries.

Grids follow from shapes and host bounds alone; how far a program really reads is decided on the
device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.products import dot

_LOG2E = 1.4426950408889634
_DECODE_PROGRAMS = 1024  # enough to fill a large GPU several times over, so that long rows balance
_MIN_SPLIT = 256  # keys of the host bound a split is worth
_MAX_SPLITS = 64


@triton.jit
def _load_block_ids(table_ptr, key_positions, valid, num_columns, BLOCK_SIZE: tl.constexpr):
    """Cache blocks (int64) of the key positions of one row; 0 where not valid."""
    columns = key_positions // BLOCK_SIZE
    return tl.load(table_ptr + columns, mask=valid & (columns < num_columns), other=0).to(tl.int64)


@triton.jit
def _soft_cap(scores, cap_log2):
    """cap * tanh(scores / cap), everything in units of log2(e)."""
    # tanh(x) = 1 - 2 / (1 + exp(2x)): right at both ends, where the exponential is 0 or infinite.
    ratio = scores / cap_log2
    return cap_log2 * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * ratio)))


@triton.jit
def _softmax_step(scores, values, running_max, running_sum, acc, WIDEN: tl.constexpr):
    """One step of the online softmax, base 2. Rows that saw nothing keep a maximum of -inf."""
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    # exp2(-inf - -inf) is NaN: rows without a visible key use 0 as their reference.
    reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - reference[:, None])
    decay = tl.exp2(running_max - reference)
    running_sum = running_sum * decay + tl.sum(weights, axis=1)
    acc = acc * decay[:, None]
    acc = dot(weights.to(values.dtype), values, acc, WIDEN)
    return new_max, running_sum, acc


@triton.jit
def _decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    slot_ids_ptr,
    first_positions_ptr,
    context_lens_ptr,
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
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS

    slot = tl.load(slot_ids_ptr + row)
    context = tl.load(context_lens_ptr + row)
    context = tl.where(slot >= 0, context, 0)
    slot = tl.maximum(slot, 0).to(tl.int64)
    first = tl.load(first_positions_ptr + row)

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

    # The row's real context is shared out, whatever the host bound was. No query sees past its own
    # position, so keys above the last query's are left out.
    context = tl.minimum(context, first + NUM_QUERIES)
    oldest = 0
    if WINDOW > 0:  # nothing before the first query's window is read
        oldest = (tl.maximum(first - WINDOW + 1, 0) // BLOCK_N) * BLOCK_N
    num_blocks = (tl.maximum(context - oldest, 0) + BLOCK_N - 1) // BLOCK_N
    chunk = ((num_blocks + NUM_SPLITS - 1) // NUM_SPLITS) * BLOCK_N
    begin = oldest + split * chunk
    end = tl.minimum(begin + chunk, context)

    running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    table_ptr = block_tables_ptr + slot * table_stride
    k_base = k_cache_ptr + kv_head * k_head_stride
    v_base = v_cache_ptr + kv_head * v_head_stride
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        valid = keys < end
        blocks = _load_block_ids(table_ptr, keys, valid, num_columns, BLOCK_SIZE)
        offsets = keys % BLOCK_SIZE
        kv_mask = valid[:, None] & d_mask[None, :]
        k_offsets = blocks * k_block_stride + offsets * k_token_stride
        k = tl.load(k_base + k_offsets[:, None] + d[None, :], mask=kv_mask, other=0.0)
        scores = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        scores = dot(q, tl.trans(k), scores, WIDEN) * scale_log2
        if HAS_SOFTCAP:
            scores = _soft_cap(scores, cap_log2)
        visible = valid[None, :] & (keys[None, :] <= first + query[:, None])
        if WINDOW > 0:
            visible = visible & (keys[None, :] > first + query[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        v_offsets = blocks * v_block_stride + offsets * v_token_stride
        v = tl.load(v_base + v_offsets[:, None] + d[None, :], mask=kv_mask, other=0.0)
        running_max, running_sum, acc = _softmax_step(
            scores, v, running_max, running_sum, acc, WIDEN
        )

    if NUM_SPLITS == 1:
        divisor = tl.where(running_sum != 0, running_sum, 1.0)
        result = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + q_offsets, result, mask=q_mask)
    else:
        part_rows = q_rows * NUM_SPLITS + split
        tl.store(part_max_ptr + part_rows, running_max, mask=m_mask)
        tl.store(part_sum_ptr + part_rows, running_sum, mask=m_mask)
        # An empty split stores nothing more: the join does not read what has no weight.
        part_mask = q_mask & (running_sum != 0)[:, None]
        tl.store(part_acc_ptr + part_rows[:, None] * HEAD_DIM + d[None, :], acc, mask=part_mask)


@triton.jit
def _join_kernel(
    part_acc_ptr,
    part_max_ptr,
    part_sum_ptr,
    out_ptr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # of [B * Q * Hq]
    split = tl.arange(0, SPLITS_PAD)
    d = tl.arange(0, BLOCK_D)
    mask = split < NUM_SPLITS
    part_rows = row * NUM_SPLITS + split
    part_sum = tl.load(part_sum_ptr + part_rows, mask=mask, other=0.0)
    part_max = tl.load(part_max_ptr + part_rows, mask=mask, other=float("-inf"))
    used = part_sum != 0  # NaN counts: a broken row must not look like an empty one
    part_max = tl.where(used, part_max, float("-inf"))
    top = tl.max(part_max, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.where(used, tl.exp2(part_max - top), 0.0)
    acc_mask = used[:, None] & (d < HEAD_DIM)[None, :]
    offsets = part_rows[:, None] * HEAD_DIM + d[None, :]
    acc = tl.load(part_acc_ptr + offsets, mask=acc_mask, other=0.0)
    total = tl.sum(part_sum * weight, axis=0)
    result = tl.sum(acc * weight[:, None], axis=0) / tl.where(total != 0, total, 1.0)
    target = out_ptr + row * HEAD_DIM + d
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


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
):
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
                blocks = _load_block_ids(table_ptr, keys, valid, num_columns, BLOCK_SIZE)
                offsets = keys % BLOCK_SIZE
                kv_mask = valid[:, None] & d_mask[None, :]
                k_offsets = blocks * k_block_stride + offsets * k_token_stride
                k = tl.load(k_base + k_offsets[:, None] + d[None, :], mask=kv_mask, other=0.0)
                scores = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
                scores = dot(q, tl.trans(k), scores, WIDEN) * scale_log2
                if HAS_SOFTCAP:
                    scores = _soft_cap(scores, cap_log2)
                visible = valid[None, :] & (keys[None, :] <= first + m[:, None])
                if WINDOW > 0:
                    visible = visible & (keys[None, :] > first + m[:, None] - WINDOW)
                scores = tl.where(visible, scores, float("-inf"))
                v_offsets = blocks * v_block_stride + offsets * v_token_stride
                v = tl.load(v_base + v_offsets[:, None] + d[None, :], mask=kv_mask, other=0.0)
                running_max, running_sum, acc = _softmax_step(
                    scores, v, running_max, running_sum, acc, WIDEN
                )
            divisor = tl.where(running_sum != 0, running_sum, 1.0)
            result = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + q_offsets, result, mask=q_mask)


def _block_n(head_dim: int, element_size: int) -> int:
    """Keys a step: fewer where the tiles of K and V would not fit the fast memory."""
    return 64 if head_dim * element_size <= 256 else 32


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

    Returns:
        `[B, Q, Hq, D]` in the dtype of q; zeros where a query has nothing to see.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    q = q.contiguous()
    out = torch.empty_like(q)
    if out.numel() == 0:
        return out
    splits = triton.cdiv(_DECODE_PROGRAMS, batch * num_kv_heads)
    reach = min(max_context_len, window + num_queries) if window > 0 else max_context_len
    splits = max(1, min(splits, reach // _MIN_SPLIT, _MAX_SPLITS))
    rows = batch * num_queries * num_heads
    part_acc = part_max = part_sum = out
    if splits > 1:
        part_acc = torch.empty((rows, splits, head_dim), dtype=torch.float32, device=q.device)
        part_max = torch.empty((rows, splits), dtype=torch.float32, device=q.device)
        part_sum = torch.empty((rows, splits), dtype=torch.float32, device=q.device)
    block_m = max(16, triton.next_power_of_2(num_queries * (num_heads // num_kv_heads)))
    block_d = max(16, triton.next_power_of_2(head_dim))
    _decode_kernel[(batch, num_kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        slot_ids,
        first_positions,
        context_lens,
        out,
        part_acc,
        part_max,
        part_sum,
        scale * _LOG2E,
        softcap * _LOG2E,
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
        NUM_SPLITS=splits,
        WINDOW=max(window, 0),
        HAS_SOFTCAP=softcap > 0,
        BLOCK_M=block_m,
        BLOCK_N=_block_n(block_d, q.element_size()),
        BLOCK_D=block_d,
        WIDEN=not q.is_cuda,
        num_warps=8 if block_m * block_d >= 8192 else 4,
        num_stages=3,
    )
    if splits > 1:
        _join_kernel[(rows,)](
            part_acc,
            part_max,
            part_sum,
            out,
            HEAD_DIM=head_dim,
            NUM_SPLITS=splits,
            SPLITS_PAD=triton.next_power_of_2(splits),
            BLOCK_D=block_d,
            num_warps=4 if splits > 8 else 1,
        )
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
        BLOCK_N=_block_n(block_d, q.element_size()),
        BLOCK_D=block_d,
        WIDEN=not q.is_cuda,
        num_warps=8 if block_m * block_d >= 8192 else 4,
        num_stages=3,
    )
    return out

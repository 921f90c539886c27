"""Attention over the paged K/V cache, in plain torch.

The rows' keys and values are gathered through the block tables up to a host-known bound and handed
to `scaled_dot_product_attention` with a visibility mask. The query heads that share a K/V head are
laid out as extra query rows, so K and V are never repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specgen.kernels.batch_types import SharedPrefix

_QUERY_BLOCK = 128  # queries a row handled at once in prefill: bounds the size of the mask
# Bytes of gathered K handled at once. Small pieces stay in the cache of the processor, and above
# all their memory is reused: a large temporary is handed back to the system and faulted in again on
# every call, which costs several times the arithmetic.
_GATHER_BYTES = 1 << 20


def _rows_at_once(k_cache: Tensor, block_tables: Tensor, max_context_len: int) -> int:
    """How many rows to gather together."""
    bound = min(max_context_len, block_tables.shape[1] * k_cache.shape[1])
    row_bytes = bound * k_cache.shape[2] * k_cache.shape[3] * k_cache.element_size()
    return max(1, _GATHER_BYTES // max(1, row_bytes))


def _gather_context(
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slot_ids: Tensor,
    context_lens: Tensor,
    max_context_len: int,
) -> tuple[Tensor, Tensor]:
    """K and V of every row as `[R, Hkv, C, D]`, C = the bound. Unused entries repeat the row's key
    0.

    Repeating a key of the row itself, instead of reading whatever a foreign or unused block holds,
    keeps a NaN that another request left behind out of this row: a weight of zero times NaN is NaN.
    """
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    rows = slot_ids.numel()
    bound = min(max_context_len, block_tables.shape[1] * block_size)
    tables = block_tables[slot_ids.clamp(min=0).long()]  # [R, MB]
    positions = torch.arange(bound, device=k_cache.device)
    positions = torch.where(positions < context_lens[:, None], positions, 0)  # [R, C]
    blocks = tables.gather(1, positions // block_size).long().clamp(0, num_blocks - 1)
    index = (blocks * block_size + positions % block_size).view(-1)
    shape = (rows, bound, num_kv_heads, head_dim)
    k = k_cache.view(num_blocks * block_size, -1).index_select(0, index).view(shape)
    v = v_cache.view(num_blocks * block_size, -1).index_select(0, index).view(shape)
    return k.transpose(1, 2), v.transpose(1, 2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_positions: Tensor,
    num_keys: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Attention of q `[R, Q, Hq, D]` over k, v `[R, Hkv, C, D]`; zeros where nothing is visible."""
    rows, num_queries, num_heads, head_dim = q.shape
    num_kv_heads, context = k.shape[1], k.shape[2]
    group = num_heads // num_kv_heads
    # [R, Q]: each query sees the keys from its first to before its last.
    last = torch.minimum(query_positions + 1, num_keys[:, None])
    first = (query_positions + 1 - window).clamp(min=0) if window > 0 else torch.zeros_like(last)
    keys = torch.arange(context, device=q.device)
    mask = (keys >= first[:, :, None]) & (keys < last[:, :, None])  # [R, Q, C]
    mask = mask[:, :, None].expand(-1, -1, group, -1).reshape(rows, 1, num_queries * group, context)
    q = q.view(rows, num_queries, num_kv_heads, group, head_dim).transpose(1, 2)
    q = q.reshape(rows, num_kv_heads, num_queries * group, head_dim)
    if softcap > 0:
        out = _capped_attention(q, k, v, mask, scale, softcap)
    else:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    out = out.view(rows, num_kv_heads, num_queries, group, head_dim).transpose(1, 2)
    out = out.reshape(rows, num_queries, num_heads, head_dim)
    # An empty softmax may come out as NaN.
    return torch.where((last > first)[:, :, None, None], out, 0.0)


def _capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float
) -> Tensor:
    """Attention whose scores pass a tanh, which `scaled_dot_product_attention` has no place for."""
    scores = torch.matmul(q.float(), k.float().mT) * scale
    scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.matmul(weights, v.float()).to(q.dtype)


def _with_shared_blocks(block_tables: Tensor, shared: SharedPrefix, block_size: int) -> Tensor:
    """Block tables whose members begin with the shared blocks."""
    columns = torch.arange(block_tables.shape[1], device=block_tables.device)
    is_shared = (columns < shared.length // block_size) & shared.members[:, None]
    return torch.where(is_shared, shared.block_ids[: block_tables.shape[1]], block_tables)


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
        k_cache: `[num_blocks, block_size, Hkv, D]`, contiguous, Hq a multiple of Hkv.
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
    if max_context_len <= 0:
        return torch.zeros_like(q)
    num_keys = torch.where(slot_ids >= 0, context_lens, 0)
    if shared is not None:
        block_tables = _with_shared_blocks(block_tables, shared, k_cache.shape[1])
    query_positions = first_positions[:, None] + torch.arange(q.shape[1], device=q.device)
    out = torch.empty_like(q)
    step = _rows_at_once(k_cache, block_tables, max_context_len)
    for begin in range(0, q.shape[0], step):
        part = slice(begin, begin + step)
        k, v = _gather_context(
            k_cache, v_cache, block_tables, slot_ids[part], num_keys[part], max_context_len
        )
        out[part] = _attend(
            q[part], k, v, query_positions[part], num_keys[part], scale, window, softcap
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
        k_cache: `[num_blocks, block_size, Hkv, D]`, contiguous.
        v_cache: as `k_cache`.
        block_tables: int32 `[S, MB]`.
        slot_ids: int32 `[R]`; -1 for an inert row.
        query_start_loc: int32 `[R+1]`, ascending.
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
    num_tokens, num_rows = q.shape[0], slot_ids.numel()
    if num_tokens == 0 or num_rows == 0 or max_query_len <= 0 or max_context_len <= 0:
        return torch.zeros_like(q)
    num_keys = torch.where(slot_ids >= 0, context_lens, 0)
    starts = query_start_loc[:-1].long()
    padded = q.new_empty((num_rows, max_query_len, *q.shape[1:]))
    step = _rows_at_once(k_cache, block_tables, max_context_len)
    for begin in range(0, num_rows, step):
        part = slice(begin, begin + step)
        k, v = _gather_context(
            k_cache, v_cache, block_tables, slot_ids[part], num_keys[part], max_context_len
        )
        for first in range(0, max_query_len, _QUERY_BLOCK):
            block = slice(first, min(first + _QUERY_BLOCK, max_query_len))
            offsets = torch.arange(block.start, block.stop, device=q.device)
            index = (starts[part, None] + offsets).clamp(max=num_tokens - 1)  # [rows, block]
            positions = first_positions[part, None] + offsets
            padded[part, block] = _attend(
                q[index], k, v, positions, num_keys[part], scale, window, softcap
            )
    tokens = torch.arange(num_tokens, device=q.device)
    # The row of a token: the last one that starts at or before it. Empty rows share a start, the
    # last wins.
    rows = torch.searchsorted(query_start_loc.long(), tokens, right=True) - 1
    used = rows < num_rows
    rows = rows.clamp(0, num_rows - 1)
    offsets = (tokens - starts[rows]).clamp(0, max_query_len - 1)
    return torch.where(used[:, None, None], padded[rows, offsets], 0.0)

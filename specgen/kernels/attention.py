"""Attention over the paged K/V cache.

Decode reads what rows share once for all (`shared_attention.py`), then what each row has of its own
(`row_attention.py`), with few rows in several programs whose parts are joined
(`attention_parts.py`). Prefill is a kernel of its own (`prefill_attention.py`).

Grids follow from shapes and host bounds alone; how far a program really reads is decided on the
device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.kernels.attention_parts import join_parts, new_parts
from specgen.kernels.batch_types import SharedPrefix
from specgen.kernels.prefill_attention import prefill_attention
from specgen.kernels.row_attention import attend_to_own, cut_decode
from specgen.kernels.shared_attention import attend_to_shared, cut_shared

__all__ = ["decode_attention", "prefill_attention"]

_LOG2E = 1.4426950408889634


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

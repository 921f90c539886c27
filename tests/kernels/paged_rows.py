"""Rows in a paged cache whose every other entry is NaN, and dense attention to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 3e-2}


@dataclass
class Paged:
    """Unpaged keys and values of some rows, and the same data in a paged cache full of NaN."""

    keys: list[torch.Tensor]  # row: [context, Hkv, D]
    values: list[torch.Tensor]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    slot_ids: torch.Tensor
    context_lens: torch.Tensor


def make_paged(
    contexts: list[int],
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    inert: tuple[int, ...] = (),
    seed: int = 0,
) -> Paged:
    """Rows in shuffled slots and blocks; every cache entry that belongs to no row is NaN."""
    g = torch.Generator().manual_seed(seed)
    rows, columns = len(contexts), max(1, -(-max(contexts, default=0) // block_size)) + 1
    num_slots, num_blocks = rows + 2, rows * columns + 3
    order = torch.randperm(num_blocks - 1, generator=g)
    slots = torch.randperm(num_slots, generator=g)[:rows]
    # Columns past a row's end hold an id outside the cache: reading it would fail or fault.
    tables = torch.full((num_slots, columns), 2**30, dtype=torch.int32)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_cache = torch.full(shape, float("nan"), dtype=dtype)
    v_cache = torch.full(shape, float("nan"), dtype=dtype)
    keys, values, used = [], [], 0
    for row, context in enumerate(contexts):
        key = torch.randn(context, num_kv_heads, head_dim, generator=g).to(dtype)
        value = torch.randn(context, num_kv_heads, head_dim, generator=g).to(dtype)
        for position in range(context):
            column, offset = divmod(position, block_size)
            if offset == 0:
                tables[slots[row], column] = order[used]
                used += 1
            block = tables[slots[row], column]
            k_cache[block, offset], v_cache[block, offset] = key[position], value[position]
        keys.append(key)
        values.append(value)
    slot_ids = slots.int()
    slot_ids[list(inert)] = -1
    lens = torch.tensor(contexts, dtype=torch.int32)
    return Paged(keys, values, k_cache, v_cache, tables, slot_ids, lens)


def dense(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """One query [Hq, D] at a position over keys and values [context, Hkv, D], in float64."""
    first = max(0, position - window + 1) if window > 0 else 0
    seen = slice(first, max(0, min(position + 1, key.shape[0])))
    if seen.start >= seen.stop:
        return torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[0] // key.shape[1]
    k = key[seen].double().repeat_interleave(group, dim=1)
    v = value[seen].double().repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,chd->hc", q.double(), k) * scale
    if softcap > 0:
        scores = softcap * (scores / softcap).tanh()
    return torch.einsum("hc,chd->hd", scores.softmax(-1), v)

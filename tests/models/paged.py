"""Paged caches with shuffled block tables, and metadata built by hand for the model tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from specgen.models.attention import AttentionMetadata, KVCache

BLOCK_SIZE = 8


class Cached(Protocol):
    """What needs a cache: a target or a draft."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


def at_last_pairs(metadata: AttentionMetadata, last_idx: torch.Tensor) -> AttentionMetadata:
    """Of all pairs that are written, the last one of each row attends."""
    return metadata.of_last_tokens(last_idx, metadata.positions[last_idx])


class Paged:
    """Caches of one model for ``num_rows`` rows of at most ``max_len`` tokens.

    Blocks are handed out in random order and hold large garbage, so that an entry read before it
    was written shows.
    """

    def __init__(self, model: Cached, num_rows: int, max_len: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        per_row = -(-max_len // BLOCK_SIZE)
        # The last block is nobody's: entries without a slot may land there.
        num_blocks = num_rows * per_row + 1
        shape = (num_blocks, BLOCK_SIZE, model.num_kv_heads, model.head_dim)
        self.caches: list[KVCache] = [
            (
                torch.randn(shape, generator=generator) * 50,
                torch.randn(shape, generator=generator) * 50,
            )
            for _ in range(model.num_layers)
        ]
        order = torch.randperm(num_blocks - 1, generator=generator)
        self.block_tables = order.view(num_rows, per_row).to(torch.int32)

    def _slots(self, slot: int, positions: range) -> list[int]:
        table = self.block_tables[slot]
        return [int(table[p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]

    def prefill(
        self, chunks: Sequence[tuple[int, int, int]], padding: int = 0
    ) -> AttentionMetadata:
        """Metadata of packed chunks (slot, first position, number of tokens), then padding."""
        positions: list[int] = []
        mapping: list[int] = []
        starts = [0]
        for slot, first, count in chunks:
            positions += range(first, first + count)
            mapping += self._slots(slot, range(first, first + count))
            starts.append(len(positions))
        return AttentionMetadata(
            positions=torch.tensor(positions + [0] * padding, dtype=torch.int32),
            slot_mapping=torch.tensor(mapping + [-1] * padding),
            block_tables=self.block_tables,
            slot_ids=torch.tensor([c[0] for c in chunks], dtype=torch.int32),
            first_positions=torch.tensor([c[1] for c in chunks], dtype=torch.int32),
            context_lens=torch.tensor([c[1] + c[2] for c in chunks], dtype=torch.int32),
            query_len=0,
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            max_query_len=max(c[2] for c in chunks),
            max_context_len=max(c[1] + c[2] for c in chunks),
        )

    def decode(self, rows: Sequence[tuple[int, int, int]], query_len: int) -> AttentionMetadata:
        """Metadata of ``query_len`` tokens a row (slot, first position, number of real tokens)."""
        positions: list[int] = []
        mapping: list[int] = []
        for slot, first, count in rows:
            positions += range(first, first + query_len)
            real = self._slots(slot, range(first, first + count))
            mapping += real + [-1] * (query_len - count)
        return AttentionMetadata(
            positions=torch.tensor(positions, dtype=torch.int32),
            slot_mapping=torch.tensor(mapping),
            block_tables=self.block_tables,
            slot_ids=torch.tensor([r[0] for r in rows], dtype=torch.int32),
            first_positions=torch.tensor([r[1] for r in rows], dtype=torch.int32),
            context_lens=torch.tensor([r[1] + r[2] for r in rows], dtype=torch.int32),
            query_len=query_len,
            max_query_len=query_len,
            max_context_len=max(r[1] + query_len for r in rows),
        )

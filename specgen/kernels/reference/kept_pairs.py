"""Pairs (target feature, next token) of steps without drafts: kept by row, and taken by the batch,
in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.kernels.batch_types import KeptPairs, TakenPairs


def keep_pairs(
    slot_ids: Tensor,
    tokens: Tensor,
    positions: Tensor,
    active: Tensor,
    features: Tensor,
    kept: KeptPairs,
) -> None:
    """Keep the pair that a step without drafts gave each row, at ``position % N`` of its slot.

    Args:
        slot_ids: int32 `[B]`; a negative one keeps nothing.
        tokens: int32 `[B]`, which the step emitted.
        positions: int32 `[B]`, of the features.
        active: bool `[S]`, after the commit: a row that just ended keeps nothing.
        features: `[B, F]`.
        kept: `[S, N, ...]`, written to.
    """
    live = (slot_ids >= 0) & active[slot_ids.clamp(min=0).long()]
    place = slot_ids[live].long(), (positions[live] % kept.tokens.shape[1]).long()
    kept.features[place] = features[live]
    kept.tokens[place] = tokens[live]
    kept.positions[place] = positions[live]


def take_pairs(
    slot_ids: Tensor, active: Tensor, block_tables: Tensor, kept: KeptPairs, block_size: int
) -> TakenPairs:
    """The pairs that rows have kept, and where in the cache they belong.

    Args:
        slot_ids: int32 `[B]`; a negative one has none.
        active: bool `[S]`; a row that has ended has none.
        block_tables: int32 `[S, MB]`.
        kept: `[S, N, ...]`.
        block_size: tokens in a cache block.

    Returns:
        `TakenPairs` of `B * N`; what is no pair has the cache slot -1.
    """
    slots = slot_ids.clamp(min=0).long()
    positions = kept.positions[slots]
    columns = positions // block_size
    live = ((slot_ids >= 0) & active[slots])[:, None] & (positions >= 0)
    live &= columns < block_tables.shape[1]
    blocks = block_tables[slots].gather(1, torch.where(live, columns, 0).long()).long()
    mapping = blocks * block_size + positions % block_size
    return TakenPairs(
        features=torch.where(live[..., None], kept.features[slots], 0).flatten(0, 1),
        tokens=torch.where(live, kept.tokens[slots], 0).flatten(),
        positions=torch.where(live, positions, 0).flatten(),
        slot_mapping=torch.where(live & (blocks >= 0), mapping, -1).flatten(),
    )

"""Cache entries of a layer without anything else of it.

The keys and values of a one-layer head depend on its inputs alone. Where nobody asks for its
output, its cache can be kept true for a small part of a pass.
"""

from __future__ import annotations

import torch

from specgen.models.attention import Attention, AttentionMetadata, KVCache

__all__ = ["write_entries"]


def write_entries(
    attention: Attention,
    x: torch.Tensor,
    cos_sin: torch.Tensor,
    metadata: AttentionMetadata,
    kv_cache: KVCache,
) -> None:
    """Write the entries that ``attention`` would write for its input ``[T, ...]``."""
    attention.write_entries(x, cos_sin, metadata, kv_cache)

"""Attention over a paged cache, and the metadata that a forward pass runs under."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specgen.kernels.batch_types import SharedPrefix
from specgen.models.config import BlockConfig
from specgen.models.layers import Linear, RMSNorm

if TYPE_CHECKING:
    from specgen.kernels import Kernels

__all__ = ["Attention", "AttentionMetadata", "KVCache", "attend"]

KVCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each ``[num_blocks, block_size, num_kv_heads, head_dim]``."""


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """Where the T tokens of a pass stand, and what each of the R rows may see.

    Decode passes hold ``query_len`` tokens for every row, ``T = R * query_len``. Prefill passes
    have ``query_len == 0`` and rows packed one after the other, split by ``query_start_loc``. The
    tokens of either may be written to the cache by a pass in which only one of each row attends,
    ``query_idx``: it has ``query_len == 1``, and a result of R rows.
    """

    positions: torch.Tensor
    """int32 ``[T]``, absolute."""
    slot_mapping: torch.Tensor
    """int64 ``[T]``: ``block * block_size + offset`` of the token's entry, -1: write nothing."""
    block_tables: torch.Tensor
    """int32 ``[S, MB]``, row by slot."""
    slot_ids: torch.Tensor
    """int32 ``[R]``, -1: an inert row."""
    first_positions: torch.Tensor
    """int32 ``[R]``: position of the row's first query."""
    context_lens: torch.Tensor
    """int32 ``[R]``: keys that exist, the queries' own included."""
    query_len: int
    max_query_len: int
    max_context_len: int
    query_start_loc: torch.Tensor | None = None
    """int32 ``[R + 1]`` for prefill."""
    query_idx: torch.Tensor | None = None
    """int64 ``[R]``: the tokens that attend; None: all of them."""
    shared_prefix: SharedPrefix | None = None
    """Blocks of the cache that decode reads once for all rows that begin with them."""

    def at_queries(self, x: torch.Tensor) -> torch.Tensor:
        """What x ``[T, ...]`` holds of the tokens that attend."""
        return x if self.query_idx is None else x.index_select(0, self.query_idx)

    def of_last_tokens(self, query_idx: torch.Tensor, positions: torch.Tensor) -> AttentionMetadata:
        """A pass over the same tokens and rows in which the last token of each row attends.

        Args:
            query_idx: int64 ``[R]``, of these tokens.
            positions: int32 ``[R]``, of these tokens.
        """
        return replace(
            self,
            first_positions=positions,
            query_len=1,
            max_query_len=1,
            query_start_loc=None,
            query_idx=query_idx,
        )


def attend(
    kernels: Any,
    q: torch.Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attend over the cache in the form of the pass, decode or prefill.

    Args:
        kernels: the attention module of a :class:`specgen.kernels.Kernels`.
        q: ``[T, Hq, D]``, contiguous.
        kv_cache: one layer's, which holds the tokens' own entries already.
        metadata: rows and positions of the pass.
        scale: factor on the scores.
        window: keys a token sees at most, its own included; 0: all.
        softcap: bound on the scores, through a tanh; 0: none.

    Returns:
        As many numbers as q, token by token.
    """
    k_cache, v_cache = kv_cache
    attended: torch.Tensor
    if metadata.query_len:
        attended = kernels.decode_attention(
            q.view(-1, metadata.query_len, *q.shape[1:]),
            k_cache,
            v_cache,
            metadata.block_tables,
            metadata.slot_ids,
            metadata.first_positions,
            metadata.context_lens,
            scale,
            metadata.max_context_len,
            window,
            softcap,
            metadata.shared_prefix if window <= 0 else None,
        )
    else:
        attended = kernels.prefill_attention(
            q,
            k_cache,
            v_cache,
            metadata.block_tables,
            metadata.slot_ids,
            metadata.query_start_loc,
            metadata.first_positions,
            metadata.context_lens,
            scale,
            metadata.max_query_len,
            metadata.max_context_len,
            window,
            softcap,
        )
    return attended


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; query, key and value from one product."""

    def __init__(
        self,
        config: BlockConfig,
        kernels: Kernels,
        *,
        input_size: int | None = None,
        window: int = 0,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        """Allocate uninitialised parameters.

        Args:
            config: sizes and options.
            kernels: the operations to run on.
            input_size: width of the normed input where it is not the hidden size.
            window: keys a token sees at most, its own included; 0: all.
            device: where parameters live.
            dtype: of parameters and activations.
        """
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.window = window
        query_size = config.num_heads * config.head_dim
        key_size = config.num_kv_heads * config.head_dim
        self.qkv = Linear(
            input_size or config.hidden_size,
            (query_size, key_size, key_size),
            config.qkv_bias,
            kernels,
            device=device,
            dtype=dtype,
        )
        self.out = Linear(
            query_size, (config.hidden_size,), config.o_bias, kernels, device=device, dtype=dtype
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            size, eps = config.head_dim, config.rms_norm_eps
            self.q_norm = RMSNorm(size, eps, kernels, device=device, dtype=dtype)
            self.k_norm = RMSNorm(size, eps, kernels, device=device, dtype=dtype)
        self._norm_eps = config.rms_norm_eps
        self._rotary = kernels.rotary
        self._attention = kernels.attention

    def forward(
        self,
        x: torch.Tensor,
        cos_sin: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: KVCache,
    ) -> torch.Tensor:
        """Write the tokens' keys and values to the cache, then attend.

        Args:
            x: ``[T, input_size]``.
            cos_sin: float32 ``[positions, head_dim]``, see :mod:`specgen.models.rotary`.
            metadata: rows and positions of the pass.
            kv_cache: this layer's cache, written in place.

        Returns:
            ``[T, hidden_size]``, or parts of it for :meth:`RMSNorm.add`; of the tokens that attend.
        """
        qkv: torch.Tensor = self.qkv(x)
        rotated = self._rotate(qkv, cos_sin, metadata, kv_cache, self.num_heads)
        q = metadata.at_queries(rotated)
        attended = attend(
            self._attention, q, kv_cache, metadata, scale=self.scale, window=self.window
        )
        return self.out.parts(attended.reshape(q.shape[0], -1))

    def write_entries(
        self,
        x: torch.Tensor,
        cos_sin: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: KVCache,
    ) -> None:
        """Write the cache entries that :meth:`forward` would write, and attend to nothing."""
        keys_and_values = self.qkv.outputs_from(self.num_heads * self.head_dim, x)
        self._rotate(keys_and_values, cos_sin, metadata, kv_cache, num_heads=0)

    def _rotate(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: KVCache,
        num_heads: int,
    ) -> torch.Tensor:
        """Norms, rotation and cache write; returns queries ``[T, num_heads, D]``."""
        k_cache, v_cache = kv_cache
        q: torch.Tensor = self._rotary.rotary_write_cache(
            qkv,
            metadata.positions,
            cos_sin,
            metadata.slot_mapping,
            k_cache,
            v_cache,
            num_heads,
            self.num_kv_heads,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self._norm_eps,
        )
        return q

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Destinations of ``{prefix}.{q,k,v,o}_proj`` and, where they exist, the head norms."""
        slots = self.qkv.slots(*(f"{prefix}.{name}_proj" for name in "qkv"))
        slots |= self.out.slots(f"{prefix}.o_proj")
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                slots |= norm.slots(f"{prefix}.{name}")
        return slots

"""What distinguishes one decoder family from another, as data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Family"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of Llama-shaped decoders.

    The decoder itself is the same for all of them; a family only says which optional pieces it has
    and what an absent key of its ``config.json`` means. A bias given as a string is the name of the
    boolean configuration key that decides (absent: no bias).
    """

    model_type: str
    architecture: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    """RMSNorm over each query and key head before the rotation."""
    default_head_dim: int | None = None
    """Head size when ``head_dim`` is absent; None: ``hidden_size // num_attention_heads``."""
    default_num_kv_heads_is_heads: bool = False
    """Whether an absent ``num_key_value_heads`` means plain multi-head attention."""
    default_max_position_embeddings: int = 2048
    has_sliding_window: bool = False
    default_sliding_window: int | None = None
    """The window when ``sliding_window`` is absent (null always means none)."""
    sliding_window_switch: str | None = None
    """Boolean key without which ``sliding_window`` is ignored."""

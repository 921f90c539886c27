"""Qwen3 (dense): normed query and key heads, head size apart from the hidden size."""

from __future__ import annotations

from specgen.models.family import Family

__all__ = ["QWEN3"]

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    default_head_dim=128,
    default_max_position_embeddings=32768,
    has_sliding_window=True,
    default_sliding_window=4096,
    sliding_window_switch="use_sliding_window",
    default_max_window_layers=28,
)

"""Qwen2 and Qwen2.5: biases on the query, key and value projections."""

from __future__ import annotations

from specgen.models.family import Family

__all__ = ["QWEN2"]

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    qkv_bias=True,
    default_max_position_embeddings=32768,
    has_sliding_window=True,
    default_sliding_window=4096,
    sliding_window_switch="use_sliding_window",
    default_max_window_layers=28,
)

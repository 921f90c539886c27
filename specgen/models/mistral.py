"""Mistral: Llama's blocks; the early ones limit attention to a window of recent tokens."""

from __future__ import annotations

from specgen.models.family import Family

__all__ = ["MISTRAL"]

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    default_bos_token_id=1,
    default_eos_token_id=2,
    default_max_position_embeddings=4096 * 32,
    has_sliding_window=True,
    default_sliding_window=4096,
)

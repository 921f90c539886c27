"""Llama 2, 3, 3.1, 3.2, 3.3 and everything else published as ``LlamaForCausalLM``."""

from __future__ import annotations

from specgen.models.family import Family

__all__ = ["LLAMA"]

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    default_bos_token_id=1,
    default_eos_token_id=2,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    default_num_kv_heads_is_heads=True,
)

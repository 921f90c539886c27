"""Qwen3 mixtures of experts (Qwen3-30B-A3B and its like): Qwen3's attention, routed MLPs."""

from __future__ import annotations

from specgen.models.family import ExpertRules, Family

__all__ = ["QWEN3_MOE"]

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    default_max_position_embeddings=32768,
    has_sliding_window=True,
    default_sliding_window=4096,
    sliding_window_switch="use_sliding_window",
    experts=ExpertRules(
        count_keys=("num_experts", "num_local_experts"),
        default_count=128,
        size_key="moe_intermediate_size",
        default_num_chosen=8,
        normed="norm_topk_prob",
        block="mlp",
        projections=("gate_proj", "up_proj", "down_proj"),
        has_dense_layers=True,
    ),
)

"""Mixtral: Mistral's attention without a window by default, routed MLPs."""

from __future__ import annotations

from specgen.models.family import ExpertRules, Family

__all__ = ["MIXTRAL"]

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    default_bos_token_id=1,
    default_eos_token_id=2,
    default_max_position_embeddings=4096 * 32,
    has_sliding_window=True,
    default_rms_norm_eps=1e-5,
    default_rope_theta=1e6,
    experts=ExpertRules(
        count_keys=("num_local_experts", "num_experts"),
        default_count=8,
        size_key="intermediate_size",
        default_num_chosen=2,
        normed=True,
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    ),
)

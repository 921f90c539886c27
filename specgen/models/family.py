"""What distinguishes one decoder family from another, as data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ExpertRules", "Family"]


@dataclass(frozen=True, kw_only=True)
class ExpertRules:
    """How a family of mixtures of experts names and routes its experts."""

    count_keys: tuple[str, ...]
    """Keys that may hold the number of experts; the first that is there counts."""
    default_count: int
    size_key: str
    """Key of an expert's inner size."""
    default_num_chosen: int
    """Experts a token goes to, when ``num_experts_per_tok`` is absent."""
    normed: bool | str
    """Whether the chosen experts' probabilities are scaled to sum to 1, or the key that says."""
    block: str
    """Name of the block in a layer: it holds ``gate`` and ``experts.{i}``."""
    projections: tuple[str, str, str]
    """Names of an expert's gate, up and down projections."""
    has_dense_layers: bool = False
    """Whether ``decoder_sparse_step`` and ``mlp_only_layers`` leave some layers without experts."""


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
    default_rms_norm_eps: float = 1e-6
    default_bos_token_id: int | None = None
    default_eos_token_id: int | None = None
    """The ids when the keys are absent (null always means none)."""
    has_sliding_window: bool = False
    default_sliding_window: int | None = None
    """The window when ``sliding_window`` is absent (null always means none)."""
    sliding_window_switch: str | None = None
    """Boolean key without which ``sliding_window`` is ignored."""
    default_max_window_layers: int | None = None
    """First layer with a window, when neither ``layer_types`` nor ``max_window_layers`` says; None:
    every layer has it."""
    default_rope_theta: float = 10000.0
    experts: ExpertRules | None = None

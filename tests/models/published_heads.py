"""Configurations of published heads and their targets: their own numbers, what matters of the keys.

``tensors`` name what the files hold beside the layer's projections and norms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["HEADS", "PublishedHead"]

LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def _target(architecture: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    )
    model_type = architecture.removesuffix("ForCausalLM").lower()
    numbers = dict(zip(names, sizes, strict=True))
    return {"architectures": [architecture], "model_type": model_type, **numbers, **more}


LLAMA31_8B = _target(
    "LlamaForCausalLM",
    (128256, 4096, 14336, 32, 32, 8, 131072),
    rope_theta=500000.0,
    rope_scaling=LLAMA3_ROPE,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    eos_token_id=[128001, 128008, 128009],
)
LLAMA33_70B = LLAMA31_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
VICUNA_7B = _target("LlamaForCausalLM", (32000, 4096, 11008, 32, 32, 32, 2048), rms_norm_eps=1e-6)
VICUNA_13B = _target("LlamaForCausalLM", (32000, 5120, 13824, 40, 40, 40, 2048), rms_norm_eps=1e-6)
QWEN2_7B = _target(
    "Qwen2ForCausalLM", (152064, 3584, 18944, 28, 28, 4, 32768), rope_theta=1e6, rms_norm_eps=1e-6
)


def _qwen3(hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = (151936, hidden, inner, layers, heads, 8, 40960)
    common = {"head_dim": 128, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
    return _target("Qwen3ForCausalLM", sizes, **common, **more)


QWEN3_1_7B = _qwen3(2048, 6144, 28, 16, tie_word_embeddings=True)
QWEN3_4B = _qwen3(2560, 9728, 36, 32, tie_word_embeddings=True)
QWEN3_8B = _qwen3(4096, 12288, 36, 32)
QWEN3_14B = _qwen3(5120, 17408, 40, 40)
QWEN3_32B = _qwen3(5120, 25600, 64, 64)


def _qwen3_moe(inner: int, hidden: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
    experts |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": inner}
    dense = _qwen3(hidden, 3 * hidden, layers, heads, **experts)
    names = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    return dense | names | {"num_key_value_heads": 4} | more


QWEN3_30B_A3B = _qwen3_moe(768, 2048, 48, 32)
QWEN3_235B_A22B_2507 = _qwen3_moe(
    1536, 4096, 94, 64, max_position_embeddings=262144, rope_theta=5e6, torch_dtype="bfloat16"
)

_LAYER_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
)


def _head(target: dict[str, Any], **more: Any) -> dict[str, Any]:
    config = {key: target[key] for key in _LAYER_KEYS}
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    config |= {"num_hidden_layers": 1, "torch_dtype": "float16", "tie_word_embeddings": False}
    return config | more


def _speculators(target: dict[str, Any], layer: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 32000,
        "eagle_aux_hidden_state_layer_ids": None,
        "has_no_defaults_at_init": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": target["architectures"], "name_or_path": "target"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0.dev42",
        "target_hidden_size": None,
        "torch_dtype": "float32",
        "transformer_layer_config": _head(target, **layer),
        **more,
    }


def _angelslim(target: dict[str, Any]) -> dict[str, Any]:
    return _head(
        target,
        architectures=["LlamaForCausalLMEagle3"],
        attention_bias=False,
        draft_vocab_size=32000,
        head_dim=128,
        max_position_embeddings=40960,
        max_window_layers=target["num_hidden_layers"],
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=None,
        use_sliding_window=False,
    )


@dataclass(frozen=True)
class PublishedHead:
    """A head, its target, and what is to be made of it.

    ``stored`` are the tensors beside the layer; ``aux`` the boundaries, ``theta`` the rope's base.
    """

    target: dict[str, Any]
    config: dict[str, Any]
    stored: tuple[str, ...]
    aux: tuple[int, ...] = ()
    theta: float = 10000.0
    prefix: str = "midlayer"
    facts: dict[str, Any] = field(default_factory=dict)


_EAGLE3 = ("fc", "norm", "lm_head", "d2t", "t2d")
HEADS: dict[str, PublishedHead] = {
    "yuhuili/EAGLE-Vicuna-7B-v1.3": PublishedHead(
        VICUNA_7B,
        _head(VICUNA_7B, max_position_embeddings=2048, bias=True),
        ("fc", "fc.bias", "embed_tokens"),
        prefix="layers.0",
        facts={"fc_bias": True, "features": "final"},
    ),
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B": PublishedHead(
        LLAMA31_8B,
        _head(LLAMA31_8B, max_position_embeddings=2048, bias=False, rope_theta=500000.0),
        ("fc", "fc.bias", "embed_tokens"),
        theta=5e5,
        prefix="layers.0",
        facts={"fc_bias": True, "num_kv_heads": 8},
    ),
    "yuhuili/EAGLE-Qwen2-7B-Instruct": PublishedHead(
        QWEN2_7B,
        _head(
            QWEN2_7B,
            architectures=["Qwen2ForCausalLM"],
            model_type="qwen2",
            max_position_embeddings=32768,
            bias=True,
            qkv_bias=True,
            rope_theta=1e6,
            sliding_window=131072,
            use_sliding_window=False,
        ),
        ("fc", "fc.bias", "embed_tokens", "qkv.bias"),
        theta=1e6,
        prefix="layers.0",
        facts={"qkv_bias": True, "sliding_window": 0},
    ),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": PublishedHead(
        LLAMA31_8B,
        _head(LLAMA31_8B, max_position_embeddings=2048, draft_vocab_size=32000),
        _EAGLE3,
        aux=(2, 16, 29),
        facts={"draft_vocab_size": 32000, "position_limit": None},
    ),
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": PublishedHead(
        LLAMA33_70B,
        _head(
            LLAMA33_70B,
            hidden_size=6144,
            intermediate_size=16384,
            num_attention_heads=48,
            max_position_embeddings=2048,
            target_hidden_size=8192,
            draft_vocab_size=32000,
        ),
        (*_EAGLE3, "embed_tokens"),
        aux=(2, 40, 77),
        facts={"hidden_size": 6144, "target_hidden_size": 8192},
    ),
    "yuhuili/EAGLE3-Vicuna1.3-13B": PublishedHead(
        VICUNA_13B,
        _head(VICUNA_13B, max_position_embeddings=2048, draft_vocab_size=32000),
        _EAGLE3,
        aux=(2, 20, 37),
        facts={"draft_vocab_size": 32000},
    ),
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": PublishedHead(
        LLAMA31_8B,
        _speculators(
            LLAMA31_8B,
            {
                "attention_bias": False,
                "head_dim": 128,
                "max_position_embeddings": 131072,
                "rope_theta": 500000.0,
                "rope_scaling": LLAMA3_ROPE,
            },
            norm_before_residual=False,
        ),
        (*_EAGLE3, "embed_tokens"),
        aux=(2, 16, 29),
        theta=5e5,
        prefix="layers.0",
        facts={"origin": "speculators", "norm_before_residual": False},
    ),
    "AngelSlim/Qwen3-1.7B_eagle3": PublishedHead(
        QWEN3_1_7B, _angelslim(QWEN3_1_7B), _EAGLE3, aux=(2, 14, 25), theta=1e6
    ),
    "AngelSlim/Qwen3-4B_eagle3": PublishedHead(
        QWEN3_4B, _angelslim(QWEN3_4B), _EAGLE3, aux=(2, 18, 33), theta=1e6
    ),
    "AngelSlim/Qwen3-8B_eagle3": PublishedHead(
        QWEN3_8B, _angelslim(QWEN3_8B), _EAGLE3, aux=(2, 18, 33), theta=1e6
    ),
    "AngelSlim/Qwen3-14B_eagle3": PublishedHead(
        QWEN3_14B, _angelslim(QWEN3_14B), _EAGLE3, aux=(2, 20, 37), theta=1e6
    ),
    "AngelSlim/Qwen3-32B_eagle3": PublishedHead(
        QWEN3_32B, _angelslim(QWEN3_32B), _EAGLE3, aux=(2, 32, 61), theta=1e6
    ),
    "lmsys/SGLang-EAGLE3-Qwen3-8B-SpecForge": PublishedHead(
        QWEN3_8B,
        _angelslim(QWEN3_8B)
        | {
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [1, 17, 33],
            }
        },
        (*_EAGLE3, "embed_tokens"),
        aux=(2, 18, 34),
        theta=1e6,
    ),
}
HEADS |= {
    # SpecForge's own configuration of EAGLE-3.1.
    "qwen3-30B-A3B-eagle3.1": PublishedHead(
        QWEN3_30B_A3B,
        _angelslim(QWEN3_30B_A3B)
        | {
            "fc_norm": True,
            "intermediate_size": 12288,
            "max_position_embeddings": 2048,
            "norm_output": True,
            "num_attention_heads": 32,
        },
        (*_EAGLE3, "fc_norm.0", "fc_norm.1", "fc_norm.2"),
        aux=(2, 24, 45),
        theta=1e6,
        facts={"norm_output": True, "fc_norms": ("fc_norm.0", "fc_norm.1", "fc_norm.2")},
    ),
    # As speculators 0.8 writes them: four layers, a norm before fc, normed feedback, a window.
    "a head of speculators 0.8": PublishedHead(
        QWEN3_235B_A22B_2507,
        _speculators(
            QWEN3_235B_A22B_2507,
            {
                "attention_bias": False,
                "head_dim": 128,
                "intermediate_size": 12288,
                "layer_types": ["sliding_attention"],
                "max_position_embeddings": 262144,
                "mlp_bias": False,
                "rope_scaling": None,
                "rope_theta": 5000000,
                "sliding_window": 2048,
                "use_sliding_window": True,
            },
            architectures=["Eagle3DraftModel"],
            auto_map={"": "config.Eagle3SpeculatorConfig"},
            eagle_aux_hidden_state_layer_ids=[2, 46, 91, 93],
            embed_requires_grad=False,
            fc_norm=False,
            norm_before_fc=True,
            norm_before_residual=True,
            norm_output=True,
            speculators_version="0.8.0.dev0",
            tie_word_embeddings=False,
        ),
        (*_EAGLE3, "embed_tokens", "input_norm"),
        aux=(2, 46, 91, 93),
        theta=5e6,
        prefix="layers.0",
        facts={"fc_norms": ("input_norm",), "norm_output": True, "sliding_window": 2048},
    ),
}
for _name, _size, _aux in (
    ("8B", QWEN3_8B, (2, 18, 33)),
    ("14B", QWEN3_14B, (2, 20, 37)),
    ("32B", QWEN3_32B, (2, 32, 61)),
):
    HEADS[f"RedHatAI/Qwen3-{_name}-speculator.eagle3"] = PublishedHead(
        _size,
        _speculators(
            _size,
            {
                "attention_bias": False,
                "head_dim": 128,
                "max_position_embeddings": 40960,
                "rope_theta": 1000000,
                "rope_scaling": None,
                "sliding_window": None,
                "use_sliding_window": False,
            },
            norm_before_residual=True,
        ),
        (*_EAGLE3, "embed_tokens"),
        aux=_aux,
        theta=1e6,
        prefix="layers.0",
        facts={"norm_before_residual": True, "origin": "speculators"},
    )

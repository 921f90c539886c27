"""Shapes of published models, for measurements without a checkpoint.

Each is the ``config.json`` of the model, as far as it decides what is computed. Heads are EAGLE-3
heads of the usual form: one layer of the target's own width, a draft vocabulary of 32,000 tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["PRESETS", "head_of", "write_preset"]


def _llama(**sizes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
        **sizes,
    }


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _head(target: dict[str, Any]) -> dict[str, Any]:
    same = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "hidden_act", "rms_norm_eps", "rope_theta", "max_position_embeddings",
        "vocab_size", "torch_dtype", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{key: target[key] for key in same},
        "num_hidden_layers": 1,
        "draft_vocab_size": 32000,
        "tie_word_embeddings": False,
    }


_TARGETS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _llama(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rope_scaling=_llama3_rope(8.0),
        tie_word_embeddings=False,
    ),
    "llama-3.2-1b": _llama(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        rope_scaling=_llama3_rope(32.0),
        tie_word_embeddings=True,
    ),
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    },
}

#: Targets by name, and the EAGLE-3 head of each under ``NAME-eagle3``.
PRESETS: dict[str, dict[str, Any]] = {
    **_TARGETS,
    **{f"{name}-eagle3": _head(config) for name, config in _TARGETS.items()},
}


def head_of(target: str) -> str | None:
    """The preset of the head that belongs to a target's preset."""
    return f"{target}-eagle3" if target in _TARGETS else None


def write_preset(name: str, parent: Path) -> Path:
    """Write the directory of a preset, a configuration without weights, under ``parent``."""
    directory = parent / name
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(PRESETS[name], indent=1), encoding="utf-8")
    return directory

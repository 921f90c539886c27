"""Official heads rewritten in the other layouts that heads are published in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from models.tiny import load_state, save_state

__all__ = ["to_bare_layers", "to_speculators", "to_speculators_eagle1", "to_wrapped"]

IDS = "eagle_aux_hidden_state_layer_ids"
_TOP = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    IDS,
)


def to_speculators(head: Path, **top: Any) -> Path:
    """Rewrite an EAGLE-3 head as the speculators library saves one; ``...`` leaves a key out."""
    config = _config(head)
    layer = {key: value for key, value in config.items() if key not in (*_TOP, "architectures")}
    state = load_state(head)
    if "midlayer.self_attn.q_norm.weight" in state:
        layer["model_type"] = "qwen3"
    wrapped = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "norm_before_residual": False,
        "target_hidden_size": None,
        "embed_requires_grad": False,
    }
    wrapped |= {key: config[key] for key in _TOP if key in config}
    _write(head, {k: v for k, v in (wrapped | top).items() if v is not ...})
    return _rename(head, {"midlayer.": "layers.0."})


def to_bare_layers(head: Path) -> Path:
    """Rename the layer of an EAGLE-3 head, as converted heads have it, and nothing else."""
    return _rename(head, {"midlayer.": "layers.0."})


def to_speculators_eagle1(head: Path, **top: Any) -> Path:
    """Rewrite an EAGLE-1 head as the retired speculators layout had it."""
    config = _config(head)
    wrapped = {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "fusion_bias": "fc.bias" in load_state(head),
        "layernorms": False,
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": config,
    }
    _write(head, {**wrapped, **top})
    return _rename(head, {"layers.0.": "transformer.", "fc.": "fusion_fc."})


def to_wrapped(
    head: Path,
    *,
    prefix: str = "",
    token_map: torch.Tensor | None = None,
    whole_lm_head: bool = False,
    extra_norm: bool = False,
    **keys: Any,
) -> Path:
    """Wrap an official head as vLLM's first EAGLE implementation wanted it.

    Args:
        head: directory, rewritten in place.
        prefix: in front of the layer's and the embedding's names.
        token_map: target ids of a truncated vocabulary, in any order.
        whole_lm_head: keep the lm_head of the whole vocabulary beside the map.
        extra_norm: store the input norm that is never applied.
        keys: of the outer configuration.
    """
    config, state = _config(head), load_state(head)
    outer = {"model_type": "eagle", "model": config, "eagle_fc_bias": "fc.bias" in state}
    if token_map is not None:
        state["token_map"] = token_map
        outer["truncated_vocab_size"] = token_map.numel()
        if not whole_lm_head:
            state["lm_head.weight"] = state["lm_head.weight"][token_map]
    if extra_norm:
        state["layers.0.input_layernorm.weight"] = torch.full((config["hidden_size"],), 5.0)
    save_state(head, state)
    _write(head, outer | keys)
    return _rename(
        head, {name: prefix + name for name in ("layers.", "midlayer.", "embed_tokens.")}
    )


def _rename(head: Path, prefixes: dict[str, str]) -> Path:
    renamed = {}
    for name, tensor in load_state(head).items():
        for old, new in prefixes.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        renamed[name] = tensor
    save_state(head, renamed, as_bin=(head / "pytorch_model.bin").exists())
    return head


def _config(head: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((head / "config.json").read_text())
    return config


def _write(head: Path, config: dict[str, Any]) -> None:
    (head / "config.json").write_text(json.dumps(config, indent=1))

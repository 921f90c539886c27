"""Configurations as published, made narrow and given random weights, through the loader.

Ropes, windows, lengths, flags and the names of keys are those of the published files; hidden sizes,
heads (at their published size), layers, experts and vocabularies are cut.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.paged import Paged
from models.passes import relative_error, run_transformers
from models.tiny import spread_weights

from specgen.kernels import select_kernels
from specgen.models.registry import read_model_config
from specgen.models.weights import load_target

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
LLAMA3 = {**LLAMA, "bos_token_id": 128000, "eos_token_id": 128001, "rope_theta": 500000.0}
LLAMA31_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-2-7b-hf": {
        **{k: v for k, v in LLAMA.items() if k not in ("attention_bias", "mlp_bias")},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 4096,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    },
    "Meta-Llama-3-8B": {
        **LLAMA3,
        "hidden_size": 4096,
        "max_position_embeddings": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_scaling": None,
        "tie_word_embeddings": False,
    },
    "Llama-3.1-8B-Instruct": {
        **LLAMA3,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_size": 4096,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_scaling": LLAMA31_ROPE,
        "tie_word_embeddings": False,
    },
    "Llama-3.2-1B": {
        **LLAMA3,
        "head_dim": 64,
        "hidden_size": 2048,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_scaling": {**LLAMA31_ROPE, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "Mistral-7B-v0.1": {
        **MISTRAL,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
    },
    "Mistral-7B-Instruct-v0.3": {
        **MISTRAL,
        "attention_dropout": 0.0,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "Mixtral-8x7B-v0.1": {
        **MISTRAL,
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_size": 4096,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    "Qwen2.5-7B-Instruct": {
        **QWEN2,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    # As its card says to set it for long texts.
    "Qwen2.5-7B-Instruct, YaRN": {
        **QWEN2,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_scaling": {
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "type": "yarn",
        },
    },
    "Qwen3-8B": {
        **QWEN3,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Qwen3-30B-A3B": {
        **QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
    },
    # Through transformers:
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "initializer_range": 0.02,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "torch_dtype": "float32",
        "use_cache": True,
    },
    "Phi-3-mini-4k-instruct": {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "embd_pdrop": 0.0,
        "eos_token_id": 32000,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "initializer_range": 0.02,
        "max_position_embeddings": 4096,
        "model_type": "phi3",
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 0,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    },
    "OLMo-2-1124-7B": {
        "architectures": ["Olmo2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": 100257,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "max_position_embeddings": 4096,
        "model_type": "olmo2",
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": False,
    },
    "gpt-neox-20b": {
        "architectures": ["GPTNeoXForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "gelu_fast",
        "hidden_size": 6144,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "gpt_neox",
        "num_attention_heads": 64,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "use_cache": True,
    },
    "c4ai-command-r-v01": {
        "architectures": ["CohereForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 5,
        "eos_token_id": 255001,
        "hidden_act": "silu",
        "hidden_size": 8192,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-05,
        "logit_scale": 0.0625,
        "max_position_embeddings": 8192,
        "model_type": "cohere",
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "pad_token_id": 0,
        "rope_theta": 8000000.0,
        "torch_dtype": "float16",
        "use_cache": True,
        "use_qk_norm": False,
    },
}
NATIVE = ("Llama", "Meta-Llama", "Mistral", "Mixtral", "Qwen")
# Past the windows; the others' boundaries are of ropes, in which every length takes part.
LENGTHS = {"Mistral-7B-v0.1": 4120, "Phi-3-mini-4k-instruct": 2070, "gemma-2-2b": 4120}


def narrow(config: dict[str, Any]) -> dict[str, Any]:
    """Two heads of the published size over one for keys (or one each), two layers, few tokens."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    cut = {
        "hidden_size": 2 * head_dim if "head_dim" not in config else 96,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 160,
    }
    if "num_key_value_heads" in config:
        cut["num_key_value_heads"] = 2 if config["num_key_value_heads"] == heads else 1
    if "moe_intermediate_size" in config:
        cut |= {"moe_intermediate_size": 32, "num_experts": 16}
    return {**config, **cut}


def write(path: Path, config: dict[str, Any]) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    path.mkdir()
    file = path / "config.json"
    file.write_text(json.dumps(config))
    auto_class: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto_class.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
        spread_weights(model.eval())
    model.save_pretrained(path)
    file.write_text(json.dumps(config))  # as published, not as transformers would write it today
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_load_and_run(tmp_path: Path, name: str) -> None:
    published = PUBLISHED[name]
    path = write(tmp_path / "t", narrow(published))
    config = read_model_config(path)
    assert config.max_position_embeddings == published["max_position_embeddings"]
    assert config.backend == ("native" if name.startswith(NATIVE) else "transformers")
    eos = published["eos_token_id"]
    assert config.eos_token_ids == (tuple(eos) if isinstance(eos, list) else (eos,))
    assert config.dtype == published["torch_dtype"]
    length = LENGTHS.get(name, 40)
    target = load_target(
        path,
        device="cpu",
        dtype="float32",
        kernels=select_kernels("cpu"),
        max_model_len=min(config.longest_context, 4200),
    )
    ids = torch.randint(4, 160, (length,), generator=torch.Generator().manual_seed(5)).int()
    want = run_transformers(path, [ids])[0][0]
    paged = Paged(target, 1, length)
    with torch.inference_mode():
        hidden = [
            target.forward(ids[first : first + 1000], metadata, paged.caches)[0]
            for first in range(0, length, 1000)
            for metadata in [paged.prefill([(0, first, min(1000, length - first))])]
        ]
        got = target.compute_logits(torch.cat(hidden))
    assert relative_error(got, want) < 1e-4
    assert want.argmax(-1).unique().numel() >= 4


def test_reach_of_published_ropes() -> None:
    from specgen.models.config import parse_model_config
    from specgen.models.config_reader import ConfigReader
    from specgen.models.registry import find_family

    def reach(name: str) -> int:
        reader = ConfigReader(narrow(PUBLISHED[name]), name)
        return parse_model_config(reader, find_family(reader)).longest_context

    assert reach("Llama-3.1-8B-Instruct") == 131072
    assert reach("Qwen2.5-7B-Instruct") == 32768
    assert reach("Qwen2.5-7B-Instruct, YaRN") == 131072

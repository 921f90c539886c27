"""Configurations of targets: what is read from them, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.errors import EnvironmentProblem, ModelError
from specgen.models.config import ConfigReader, ModelConfig, RopeConfig, parse_model_config
from specgen.models.registry import FAMILIES, find_family, read_model_config
from specgen.models.rotary import build_cos_sin, inverse_frequencies

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "num_key_value_heads": 2}
QWEN3_MOE = QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 32}
SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def parse(data: dict[str, Any], **changes: Any) -> ModelConfig:
    reader = ConfigReader(data | changes, "config.json")
    return parse_model_config(reader, find_family(reader))


def test_absent_keys_of_llama() -> None:
    config = parse(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert config.max_position_embeddings == 2048
    assert config.rope == RopeConfig(rope_type="default", theta=10000.0)
    assert not config.tie_word_embeddings
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (False,) * 4
    assert config.dtype is None
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize("data", [LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE])
def test_absent_keys_mean_what_they_mean_to_transformers(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    from transformers import AutoConfig

    ours = parse(data)
    (model_type,) = (f.model_type for f in FAMILIES if f.architecture == ours.architecture)
    (tmp_path / "config.json").write_text(json.dumps({**data, "model_type": model_type}))
    theirs = AutoConfig.from_pretrained(tmp_path)
    for key in ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "bos_token_id"):
        assert getattr(ours, key) == getattr(theirs, key), key
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    heads = theirs.num_key_value_heads, getattr(theirs, "head_dim", None) or 16
    assert (ours.num_kv_heads, ours.head_dim) == heads
    has_bias = getattr(theirs, "attention_bias", ours.architecture.startswith("Qwen2"))
    assert ours.qkv_bias == has_bias
    switched_off = not getattr(theirs, "use_sliding_window", True)
    window = None if switched_off else getattr(theirs, "sliding_window", None)
    assert set(ours.layer_windows) == (set() if window is None else {window})
    if ours.experts is not None:
        count = getattr(theirs, "num_experts", None) or theirs.num_local_experts
        assert (ours.experts.num_experts, ours.experts.num_chosen) == (
            count,
            theirs.num_experts_per_tok,
        )
        assert ours.experts.normed == getattr(theirs, "norm_topk_prob", True)


def test_null_is_absent() -> None:
    keys = ("num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters")
    assert parse(LLAMA, **dict.fromkeys(keys)) == parse(LLAMA)


def test_tokens_that_are_null_are_none() -> None:
    config = parse(LLAMA, bos_token_id=None, eos_token_id=None)
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


@pytest.mark.parametrize(
    ("data", "keys", "named"),
    [
        (LLAMA, {"sliding_window": 16}, ["sliding_window"]),
        (LLAMA, {"layer_types": ["sliding_attention"] * 4}, ["layer_types"]),
        (LLAMA, {"sliding_window": None, "layer_types": ["full_attention"] * 4}, []),
        (MISTRAL, {"sliding_window": 16}, []),
        (QWEN3, {"sliding_window": 16, "use_sliding_window": False}, []),  # the switch says so
    ],
)
def test_windows_that_a_family_does_not_have_are_said_to_be_ignored(
    data: dict[str, Any], keys: dict[str, Any], named: list[str]
) -> None:
    notes = parse(data | keys).notes
    assert len(notes) == len(named)
    for note, key in zip(notes, named, strict=True):
        assert note.startswith(f'"{key}" of config.json has no effect')


def test_model_type_stands_in_for_architectures() -> None:
    data = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert parse(data, model_type="qwen3", num_key_value_heads=2).qk_norm


@pytest.mark.parametrize(
    ("data", "biases", "head_dim"),
    [
        (LLAMA, (False, False, False), 16),
        (LLAMA | {"attention_bias": True, "mlp_bias": True}, (True, True, True), 16),
        (QWEN2, (True, False, False), 16),
        (QWEN3, (False, False, False), 128),
        (QWEN3 | {"attention_bias": True}, (True, True, False), 128),
        (MISTRAL | {"sliding_window": None}, (False, False, False), 16),
    ],
)
def test_families(data: dict[str, Any], biases: tuple[bool, ...], head_dim: int) -> None:
    config = parse(data)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases
    assert config.head_dim == head_dim
    assert config.qk_norm == (data["architectures"] == ["Qwen3ForCausalLM"])


def test_tokens_and_dtype() -> None:
    config = parse(LLAMA, bos_token_id=1, eos_token_id=[2, 7], torch_dtype="float16")
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (1, (2, 7), "float16")
    assert parse(LLAMA, eos_token_id=2, dtype="bfloat16").eos_token_ids == (2,)


def test_rope_parameters_come_first() -> None:
    new = {"rope_type": "default", "rope_theta": 7.0}
    assert parse(LLAMA, rope_parameters=new, rope_theta=9.0).rope.theta == 7.0
    assert parse(LLAMA, rope_parameters={"rope_type": "default"}, rope_theta=9.0).rope.theta == 9.0
    assert parse(LLAMA, rope_theta=9.0).rope.theta == 9.0
    old = {"type": "linear", "factor": 2.0}
    assert parse(LLAMA, rope_scaling=old, rope_theta=9.0).rope == RopeConfig(
        rope_type="linear", theta=9.0, factor=2.0
    )
    llama3 = parse(LLAMA, rope_scaling=SCALED | {"rope_type": "llama3"}).rope
    assert llama3.original_max_position_embeddings == 2048
    assert (llama3.factor, llama3.low_freq_factor, llama3.high_freq_factor) == (8.0, 1.0, 4.0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 8192}
        | SCALED,
        {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 64}
        | SCALED
        | {"factor": 32.0},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 20.0}
        | {"original_max_position_embeddings": 512},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "truncate": False}
        | {"original_max_position_embeddings": 64, "attention_factor": 1.5},
    ],
)
def test_rope_tables_equal_transformers(rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=dict(rope))
    )
    mine = parse(LLAMA, head_dim=128, rope_parameters=rope).rope
    torch.testing.assert_close(
        inverse_frequencies(mine, 128, 2048), theirs.inv_freq, rtol=1e-6, atol=0.0
    )
    cos, sin = theirs(torch.zeros(1), torch.arange(3000)[None])
    table = build_cos_sin(mine, 128, 3000, "cpu")
    assert table.dtype == torch.float32
    # Angles of some thousand radians carry a few units of the last place into cosine and sine.
    torch.testing.assert_close(table[:, :64], cos[0, :, :64], rtol=0.0, atol=1e-3)
    torch.testing.assert_close(table[:, 64:], sin[0, :, :64], rtol=0.0, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["architectures", "MambaForCausalLM", "Llama"]),
        ({"architectures": None, "model_type": "gpt2"}, ["model_type", "gpt2", "Qwen3"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"hidden_size": True}, ["hidden_size", "True"]),
        ({"hidden_size": 0}, ["hidden_size", "0"]),
        ({"hidden_size": 66}, ["hidden_size", "66", "num_attention_heads"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "(4)"]),
        ({"head_dim": 15}, ["head_dim", "even", "15"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings", "1"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
        ({"dtype": "float8"}, ["dtype", "float8", "bfloat16"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 4.0}}, ["mrope", "supported", "yarn"]),
        ({"rope_scaling": {"type": "dynamic"}}, ["rope_scaling", "factor"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_parameters", "short_factor"]),
        (
            {"rope_parameters": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [1.0]}},
            ["long_factor", "8 numbers"],
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, ["rope_parameters", "factor"]),
        ({"rope_parameters": []}, ["rope_parameters", "object"]),
        ({"rope_parameters": {"full_attention": {}}}, ["differ between layers"]),
        ({"rope_parameters": {"rope_theta": -1}}, ["rope_theta", "-1"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        (
            {"rope_scaling": SCALED | {"rope_type": "llama3", "high_freq_factor": 1.0}},
            ["high_freq_factor", "1.0"],
        ),
    ],
)
def test_refused(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        parse(LLAMA, **changes)
    for part in ("config.json", *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("data", "windows"),
    [
        (MISTRAL, (4096, 4096)),
        (MISTRAL | {"sliding_window": 1024}, (1024, 1024)),
        (
            QWEN2 | {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1},
            (0, 512),
        ),
        (
            QWEN2 | {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0},
            (512, 512),
        ),
        (
            QWEN3
            | {
                "use_sliding_window": True,
                "sliding_window": 512,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (512, 0),
        ),
        (MIXTRAL | {"sliding_window": 64}, (64, 64)),
    ],
)
def test_sliding_windows(data: dict[str, Any], windows: tuple[int, ...]) -> None:
    config = parse(data)
    assert config.layer_windows == windows
    assert [config.window_of(i) for i in range(2)] == list(windows)


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (MISTRAL | {"sliding_window": "4k"}, ["sliding_window", "4k"]),
        (
            QWEN3
            | {
                "use_sliding_window": True,
                "layer_types": ["chunked_attention", "full_attention"],
            },
            ["layer_types", "chunked_attention"],
        ),
        (QWEN3 | {"use_sliding_window": True, "layer_types": ["full_attention"]}, ["layer_types"]),
        (MISTRAL | {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        (MIXTRAL | {"num_experts_per_tok": 9}, ["num_experts_per_tok", "num_local_experts", "8"]),
        (QWEN3_MOE | {"norm_topk_prob": 1}, ["norm_topk_prob"]),
        (QWEN3_MOE | {"moe_intermediate_size": None}, ["moe_intermediate_size", "missing"]),
    ],
)
def test_refused_windows_and_experts(data: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        parse(data)
    for part in parts:
        assert part in str(caught.value)


def test_experts() -> None:
    config = parse(QWEN3_MOE | {"num_hidden_layers": 4, "decoder_sparse_step": 2})
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.num_chosen) == (128, 8)
    assert (config.experts.intermediate_size, config.experts.normed) == (32, False)
    assert config.experts.layers == {1, 3}
    assert parse(LLAMA).experts is None
    mixtral = parse(MIXTRAL)
    assert mixtral.experts is not None
    assert (mixtral.experts.num_experts, mixtral.experts.num_chosen) == (8, 2)
    assert mixtral.experts.normed
    assert mixtral.rope.theta == 1e6
    assert mixtral.activation_width > parse(MISTRAL).activation_width


@pytest.mark.parametrize(
    ("rope", "reach"),
    [
        (None, 2048),
        ({"type": "linear", "factor": 4.0}, 8192),
        ({"type": "dynamic", "factor": 2.0}, 4096),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}, 2048),
        (SCALED | {"type": "llama3"}, 2048),
    ],
)
def test_longest_context(rope: dict[str, Any] | None, reach: int) -> None:
    assert parse(LLAMA, rope_scaling=rope).longest_context == reach


@pytest.mark.parametrize(
    "data",
    [
        MISTRAL | {"sliding_window": None},
        QWEN2 | {"use_sliding_window": False, "sliding_window": 512},
        QWEN2 | {"sliding_window": 512},
        QWEN3
        | {
            "use_sliding_window": True,
            "sliding_window": 512,
            "layer_types": ["full_attention", "full_attention"],
        },
        LLAMA | {"sliding_window": 512},
    ],
)
def test_windows_without_effect_are_accepted(data: dict[str, Any]) -> None:
    assert parse(data).layer_windows == ()


def test_key_value_heads_are_required_where_no_default_is_plain() -> None:
    for family in FAMILIES:
        data = LLAMA | {"architectures": [family.architecture], "sliding_window": None}
        if family.default_num_kv_heads_is_heads:
            assert parse(data).num_kv_heads == 4
        else:
            with pytest.raises(ModelError, match='"num_key_value_heads" is missing'):
                parse(data)


def test_reads_from_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ModelError, match=r'config\.json: "hidden_size" is missing'):
        read_model_config(tmp_path)


def test_a_rope_of_too_many_positions_is_refused_where_it_is_made() -> None:
    with pytest.raises(EnvironmentProblem, match="no memory for the rope") as caught:
        build_cos_sin(RopeConfig(), 128, 10**14, "cpu")
    assert "--max-model-len" in str(caught.value.hint)
    assert build_cos_sin(RopeConfig(), 128, 10**14, "meta").shape == (10**14, 128)

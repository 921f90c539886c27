"""Recognising draft layouts, and the facts of heads that are read, assumed or refused."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.errors import ModelError
from specgen.models.checkpoint import TensorInfo
from specgen.models.config import ConfigReader, DraftConfig, ModelConfig, RopeConfig
from specgen.models.draft import DraftOverrides
from specgen.models.draft_layout import DraftSource, recognise_draft
from specgen.models.eagle import parse_eagle1_config
from specgen.models.eagle3 import parse_eagle3_config

IDS = "eagle_aux_hidden_state_layer_ids"
HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


WRAPPER: dict[str, Any] = {"model_type": "eagle", "model": HEAD}


def target(num_layers: int = 32, **changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "architecture": "LlamaForCausalLM",
        "vocab_size": 100,
        "num_layers": num_layers,
        "max_position_embeddings": 4096,
        "rope": RopeConfig(),
        "tie_word_embeddings": False,
        "dtype": None,
    }
    return ModelConfig(**fields | changes)


def tensors(names: Iterable[str], **shapes: tuple[int, ...]) -> dict[str, TensorInfo]:
    all_shapes = dict.fromkeys(names, (1,)) | {
        name.replace("__", "."): shape for name, shape in shapes.items()
    }
    file = Path("head/model.safetensors")
    return {name: TensorInfo(file, shape, torch.float32) for name, shape in all_shapes.items()}


@pytest.mark.parametrize(
    ("made_for", "own", "warned"),
    [
        (["Qwen3ForCausalLM"], "LlamaForCausalLM", True),
        (["LlamaForCausalLM"], "LlamaForCausalLM", False),
        (["Gemma3ForConditionalGeneration"], "Gemma3ForCausalLM", False),
        (["Qwen3MoeForCausalLM"], "Qwen3ForCausalLM", True),
        ([], "LlamaForCausalLM", False),
        (None, "LlamaForCausalLM", False),
    ],
)
def test_a_head_that_names_a_target_of_another_architecture_is_warned_of(
    made_for: list[str] | None, own: str, warned: bool
) -> None:
    verifier = {"name_or_path": "org/target", "architectures": made_for}
    nested: dict[str, Any] = {
        "speculators_model_type": "eagle3",
        "speculators_config": {"verifier": verifier},
        "transformer_layer_config": HEAD,
        "norm_before_residual": False,
    }
    reader = ConfigReader(nested, "head/config.json")
    source = recognise_draft(reader, tensors(("layers.0.self_attn.q_proj.weight",)))
    config = parse_eagle3_config(source, target(architecture=own), DraftOverrides())
    assert bool(config.warnings) == warned
    if warned:
        assert made_for is not None
        for part in ("head/config.json", made_for[0], own):
            assert part in config.warnings[0]


EAGLE1_NAMES = ("fc.weight", "fc.bias", "layers.0.self_attn.q_proj.weight")
EAGLE3_NAMES = ("d2t", "lm_head.weight", "midlayer.hidden_norm.weight", "norm.weight")


def recognise(names: Iterable[str] | None, **changes: Any) -> str:
    reader = ConfigReader(HEAD | changes, "head/config.json")
    return recognise_draft(reader, None if names is None else tensors(names)).layout


def eagle3(
    num_layers: int = 32, overrides: DraftOverrides | None = None, num_aux: int = 3, **changes: Any
) -> DraftConfig:
    info = tensors(EAGLE3_NAMES, fc__weight=(64, 64 * num_aux), lm_head__weight=(100, 64))
    reader = ConfigReader(HEAD | changes, "head/config.json")
    source = DraftSource(layout="eagle3", origin="official", reader=reader, tensors=info)
    return parse_eagle3_config(source, target(num_layers), overrides or DraftOverrides())


def test_layouts_are_told_by_their_tensors() -> None:
    assert recognise(EAGLE1_NAMES) == "eagle1"
    assert recognise(EAGLE3_NAMES) == "eagle3"
    assert recognise(EAGLE3_NAMES, architectures=["LlamaForCausalLMEagle3"]) == "eagle3"


def test_layouts_without_tensors_are_told_by_the_configuration() -> None:
    assert recognise(None) == "eagle1"
    assert recognise(None, architectures=["LlamaForCausalLMEagle3"]) == "eagle3"
    assert recognise(None, draft_vocab_size=50) == "eagle3"


@pytest.mark.parametrize(
    ("names", "changes", "part"),
    [
        (EAGLE3_NAMES, {"speculators_model_type": "eagle3"}, '"layers.0" of the speculators'),
        (EAGLE1_NAMES, {"speculators_model_type": "eagle"}, '"fusion_fc.weight"'),
        (
            ("fusion_fc.weight", "embedding_layernorm.weight"),
            {"speculators_model_type": "eagle"},
            "layer norms of its own (embedding_layernorm.weight)",
        ),
        (
            ("fusion_fc.weight",),
            {"speculators_model_type": "eagle", "layernorms": True},
            "layer norms of its own",
        ),
        (EAGLE1_NAMES, {**WRAPPER, "model": {**HEAD, "add_para_norm": True}}, '"add_para_norm"'),
        (EAGLE1_NAMES, {**WRAPPER, "skip_output_norm": False}, '"skip_output_norm" is False'),
        (EAGLE1_NAMES, {"speculators_model_type": "hashgram"}, "'hashgram'"),
        ((*EAGLE3_NAMES, "mask_hidden"), {}, "P-EAGLE"),
        (EAGLE1_NAMES, {"speculators_model_type": "peagle"}, "P-EAGLE"),
        (("layers.0.mlp.up_proj.weight",), {"dflash_config": {"block_size": 16}}, "DFlash"),
        (("x",), {"architectures": ["DFlashDraftModel"]}, "DFlash"),
        (("x",), {"architectures": ["DeepSeekMTPModel"]}, "MTP"),
        (("model.layers.61.eh_proj.weight",), {}, "MTP"),
        (("0.0.linear.weight", "0.1.weight"), {}, "Medusa"),
        (("x",), {"architectures": ["MedusaModel"]}, "Medusa"),
        ((*EAGLE1_NAMES, "d2t"), {}, "describes an EAGLE-3 head"),
        (("model.mask_hidden", *EAGLE3_NAMES), {}, "P-EAGLE"),
        (("x",), {"speculators_model_type": "mtp"}, "MTP"),
        ((*EAGLE1_NAMES, *EAGLE3_NAMES), {}, "neither an EAGLE-1 nor"),
        (EAGLE1_NAMES, {"draft_vocab_size": 50}, "describes an EAGLE-3 head"),
        (("model.embed_tokens.weight", "lm_head.weight"), {}, '"model.embed_tokens.weight"'),
        ((), {}, "not a draft of a known layout"),
    ],
)
def test_other_layouts_are_refused_by_name(
    names: tuple[str, ...], changes: dict[str, Any], part: str
) -> None:
    with pytest.raises(ModelError) as caught:
        recognise(names, **changes)
    assert part in str(caught.value)
    assert "head" in str(caught.value)
    if "describes an EAGLE-3 head" not in part:
        assert "supported drafts: EAGLE-1" in str(caught.value)


@pytest.mark.parametrize(
    ("num_layers", "boundaries"),
    [(32, (2, 16, 29)), (36, (2, 18, 33)), (7, (2, 3, 4)), (8, (2, 4, 5)), (3, (0, 1, 2))],
)
def test_default_boundaries(num_layers: int, boundaries: tuple[int, ...]) -> None:
    config = eagle3(num_layers)
    assert config.aux_layers == boundaries
    assert str(list(boundaries)) in config.notes[0]
    assert "default" in config.notes[0]


@pytest.mark.parametrize("num_layers", [1, 2, 4, 5, 6])
def test_default_boundaries_that_coincide_are_refused(num_layers: int) -> None:
    with pytest.raises(ModelError, match=f"must be distinct and within 0..{num_layers}"):
        eagle3(num_layers)


@pytest.mark.parametrize(
    ("keys", "boundaries", "origin"),
    [
        ({IDS: [2, 18, 33]}, (2, 18, 33), "eagle_aux"),
        ({IDS: [1, 17, 33]}, (1, 17, 33), "eagle_aux"),
        ({"eagle_config": {IDS: [1, 17, 33]}}, (2, 18, 34), "block outputs"),
        ({"eagle_config": {IDS: [33, 1, 17]}}, (2, 18, 34), "block outputs"),
        ({"eagle_config": {IDS: [2, 18, 36]}}, (2, 18, 36), "boundaries"),
        ({"eagle_config": {IDS: [1, 17, 33]}, IDS: [34, 18, 2]}, (2, 18, 34), "block outputs"),
        ({"eagle_config": {}}, (2, 18, 33), "default"),
    ],
)
def test_both_conventions_of_ids(
    keys: dict[str, Any], boundaries: tuple[int, ...], origin: str
) -> None:
    config = eagle3(36, **keys)
    assert config.aux_layers == boundaries
    assert origin in config.notes[0]


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"eagle_config": {IDS: [1, 17, 33]}, IDS: [1, 17, 33]}, ["[2, 18, 34]", IDS]),
        ({IDS: [2, 2, 5]}, ["distinct", "[2, 2, 5]"]),
        ({IDS: [2, 18, 37]}, ["0..36", "37"]),
        ({IDS: [2, -1, 3]}, [IDS, "-1"]),
        ({IDS: [2, 18, 33], "num_aux_hidden_states": 4}, ["num_aux_hidden_states", "4", "3"]),
        ({IDS: [2, 18]}, ["fc.weight", "[64, 192]", "[64, 128]"]),
        ({"norm_before_residual": True, "eagle_config": {"norm_before_residual": False}},
         ["norm_before_residual", "disagree"]),
        ({"norm_before_fc": True, "fc_norm": True}, ["norm_before_fc", "fc_norm", "exclude"]),
        ({"norm_output": True}, ["norm_output", "SpecForge", "--draft-norm-output"]),
        ({"norm_output": True, "norm_before_fc": True}, ["norm_output"]),
        ({"norm_output": "yes"}, ["norm_output", "'yes'"]),
        ({"sliding_window": "wide"}, ["sliding_window", "wide"]),
        ({"rope_scaling": {"rope_type": "magic", "factor": 2.0}}, ["magic"]),
        ({"num_hidden_layers": 2}, ["num_hidden_layers", "2"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["awq"]),
        ({"eagle_config": 3}, ["eagle_config", "object", "3"]),
        ({"draft_vocab_size": 0}, ["draft_vocab_size", "0"]),
    ],
)  # fmt: skip
def test_eagle3_configurations_refused(keys: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        eagle3(36, **keys)
    for part in ("head/", *parts):
        assert part in str(caught.value)


def test_settings_may_stand_inside_eagle_config() -> None:
    config = eagle3(eagle_config={"norm_before_residual": True, "fc_norm": True})
    assert config.norm_before_residual
    assert config.fc_norms == ("fc_norm.0", "fc_norm.1", "fc_norm.2")


def test_norm_output() -> None:
    assert not eagle3().norm_output
    assert not eagle3(norm_output=False).norm_output
    with_norms = eagle3(norm_output=True, fc_norm=True)
    assert with_norms.norm_output
    assert "normed feedback" in with_norms.notes[0]
    for decided in (True, False):
        config = eagle3(overrides=DraftOverrides(norm_output=decided), norm_output=True)
        assert config.norm_output is decided


def test_windows() -> None:
    assert eagle3(sliding_window=512).sliding_window == 512
    assert "last 512 tokens" in eagle3(sliding_window=512).notes[1]
    assert eagle3(sliding_window=512, layer_types=["sliding_attention"]).sliding_window == 512
    assert eagle3(sliding_window=512, use_sliding_window=True).sliding_window == 512
    for keys in (
        {"sliding_window": 4096},
        {"sliding_window": 5, "layer_types": ["full_attention"]},
        {"sliding_window": 5, "use_sliding_window": False},
        {"sliding_window": 5, "model_type": "qwen3"},
        {"sliding_window": None},
        {"sliding_window": None, "layer_types": ["full_attention", "sliding_attention"]},
        {"sliding_window": 5, "layer_types": ["full_attention"] * 32},
    ):
        assert eagle3(**keys).sliding_window == 0
    for kinds in (
        ["full_attention", "sliding_attention"],
        ["chunked_attention"],
        [["sliding_attention"]],
        "sliding_attention",
        [],
    ):
        with pytest.raises(ModelError, match='"layer_types" must be'):
            eagle3(sliding_window=5, layer_types=kinds)


def test_a_window_matters_up_to_where_a_rope_carries_the_target() -> None:
    """--max-model-len may go past the target's positions."""
    scaled = target(rope=RopeConfig(rope_type="linear", factor=2.0))
    assert scaled.longest_context == 8192
    for window, kept in ((4096, 4096), (8191, 8191), (8192, 0)):
        reader = ConfigReader(HEAD | {"sliding_window": window}, "head/config.json")
        source = DraftSource(layout="eagle3", origin="official", reader=reader, tensors=None)
        assert parse_eagle3_config(source, scaled, DraftOverrides()).sliding_window == kept


def test_rope_of_a_head_is_its_own() -> None:
    assert eagle3().rope.theta == 10000.0
    assert eagle3(rope_theta=5e5).rope.theta == 5e5
    assert eagle3(rope_parameters={"rope_theta": 7.0}, rope_theta=5e5).rope.theta == 7.0
    override = DraftOverrides(rope_theta=9.0)
    assert eagle3(overrides=override, rope_theta=5e5).rope.theta == 9.0
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert eagle3(rope_scaling=llama3, rope_theta=5e5).rope.rope_type == "llama3"


def test_bias_of_eagle1_is_decided_by_the_tensor() -> None:
    def parse(names: Iterable[str] | None, **changes: Any) -> DraftConfig:
        reader = ConfigReader(HEAD | changes, "head/config.json")
        info = None if names is None else tensors(names)
        source = DraftSource(layout="eagle1", origin="official", reader=reader, tensors=info)
        return parse_eagle1_config(source, target(), DraftOverrides())

    assert parse(EAGLE1_NAMES, bias=False).fc_bias
    assert not parse(EAGLE1_NAMES[::2], bias=True).fc_bias
    assert parse(None).fc_bias
    assert not parse(None, bias=False).fc_bias
    config = parse((*EAGLE1_NAMES, "layers.0.self_attn.q_proj.bias"))
    assert config.qkv_bias
    assert not config.o_bias
    assert (config.features, config.aux_layers, config.draft_vocab_size) == ("final", (), 100)

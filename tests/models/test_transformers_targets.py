"""Targets that run through transformers: equal to their own eager attention, or refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models.paged import Paged
from models.passes import (
    check_against,
    random_sequences,
    relative_error,
    run_all,
    run_transformers,
)
from models.tiny import (
    SIZES,
    edit_config,
    load_state,
    make_target,
    save_state,
    spread_weights,
)

from specgen.errors import ModelError
from specgen.kernels import select_kernels
from specgen.models import checkpoint, transformers_probe
from specgen.models.registry import read_model_config
from specgen.models.transformers_target import TransformersTarget, load_transformers_target
from specgen.models.weights import load_target

KERNELS = select_kernels("cpu")
STEPS = [0.1 * i for i in range(4)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1 + step for step in STEPS],
    "long_factor": [1 + 9 * step for step in STEPS],
}
# Windows are shorter than the sequences.
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "gemma2": ("gemma2", {"sliding_window": 9, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3", {"sliding_window": 9}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "gpt_neox_sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {"sliding_window": 9}),
    # Native families with options that the native decoder does not have.
    "llama_gelu": ("llama", {"hidden_act": "gelu"}),
}
# Not promised by name, but they pass: learned positions, scaled streams and logits, layers without
# positions, experts beside shared ones, norms behind the sub-layers.
OTHERS: dict[str, dict[str, Any]] = {
    "Cohere2": {"sliding_window": 9},
    "Exaone4": {"sliding_window": 9, "sliding_window_pattern": 3},
    "GPT2": {
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 7,
        "n_positions": 256,
        "tie_word_embeddings": False,
    },
    "Gemma": {},
    "Granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "Nemotron": {"head_dim": ...},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Olmo3": {"sliding_window": 9},
    "Phi": {"partial_rotary_factor": 0.5},
    "Qwen2Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "SmolLM3": {"no_rope_layer_interval": 2, "pad_token_id": 3},
    "Starcoder2": {"sliding_window": 9},
}


def load(path: Path, **options: Any) -> TransformersTarget:
    target = load_target(path, kernels=KERNELS, **{"device": "cpu", **options})
    assert isinstance(target, TransformersTarget)
    return target


def refused(call: Callable[[], object], *parts: str) -> None:
    with pytest.raises(ModelError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", TARGETS)
def test_logits_and_features_equal_transformers(tmp_path: Path, name: str) -> None:
    family, overrides = TARGETS[name]
    path = make_target(tmp_path / "t", family, **overrides)
    target = load(path, aux_layers=tuple(range(8)))
    assert target.config.backend == "transformers"
    assert "runs through transformers" in target.notes[0]
    sequences = random_sequences()
    expected = run_transformers(path, sequences)
    check_against(target, sequences, expected)
    if name == "llama_gelu":
        assert "hidden_act" in target.notes[0]
        return
    size = target.config.hidden_size
    final = target.model.get_submodule(
        "gpt_neox.final_layer_norm" if "neox" in name else "model.norm"
    )
    for (hidden, aux), _ in zip(run_all(target, sequences), expected, strict=True):
        assert relative_error(final(aux[:, 7 * size :]), hidden) < 1e-5
    ids = sequences[0]
    embedded = target.embed(ids)
    assert relative_error(embedded, expected[0][1][0]) < 1e-6


@pytest.mark.parametrize("prefix", OTHERS)
def test_other_families_equal_transformers_too(tmp_path: Path, prefix: str) -> None:
    import transformers

    keys = {k: v for k, v in {**SIZES, **OTHERS[prefix]}.items() if v is not ...}
    config = getattr(transformers, f"{prefix}Config")(**keys)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        name = f"{prefix}LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM"
        model = getattr(transformers, name)(config).eval()
        spread_weights(model)
    model.save_pretrained(tmp_path)
    target = load(tmp_path, aux_layers=tuple(range(8)))
    sequences = random_sequences()
    check_against(target, sequences, run_transformers(tmp_path, sequences))
    skeleton = load(tmp_path, device="meta")
    outline = skeleton.outline()
    assert outline is not None, "it runs without values too"
    assert (skeleton.num_kv_heads, skeleton.head_dim) == (target.num_kv_heads, target.head_dim)
    calls = sorted(target._pass.calls, key=lambda call: call.layer)
    assert outline.windows == tuple(call.window for call in calls)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "mixtral"])
def test_native_families_give_the_same_through_transformers(tmp_path: Path, family: str) -> None:
    options = {"sliding_window": 9} if family.startswith("mi") else {}
    path = make_target(tmp_path / "t", family, **options)
    native = load_target(path, device="cpu", kernels=KERNELS, aux_layers=(2, 5, 7))
    config = replace(read_model_config(path), backend="transformers")
    wrapped = load_transformers_target(
        path, config, device="cpu", dtype=torch.float32, kernels=KERNELS, aux_layers=(2, 5, 7)
    )
    ids = random_sequences()[0]
    outputs = []
    for target in (native, wrapped):
        paged = Paged(target, 1, len(ids))
        with torch.inference_mode():
            hidden, aux = target.forward(ids, paged.prefill([(0, 0, len(ids))]), paged.caches)
            assert aux is not None
            outputs.append((target.compute_logits(hidden), aux))
    for want, got in zip(*outputs, strict=True):
        assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize(("original", "max_model_len"), [(20, 61), (64, 61)])
def test_ropes_of_a_length_are_fixed_by_the_longest_row(
    tmp_path: Path, original: int, max_model_len: int
) -> None:
    path = make_target(
        tmp_path / "t", "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=original
    )
    target = load(path, max_model_len=max_model_len)
    assert str(max_model_len) in target.notes[1]
    ids = torch.randint(4, 96, (61,), generator=torch.Generator().manual_seed(1)).int()
    want = run_transformers(path, [ids])[0][0]
    paged = Paged(target, 1, len(ids))
    hidden = []
    with torch.inference_mode():
        for first in range(0, len(ids), 17):
            part = ids[first : first + 17]
            metadata = paged.prefill([(0, first, len(part))])
            hidden.append(target.forward(part, metadata, paged.caches)[0])
        got = target.compute_logits(torch.cat(hidden))
    assert relative_error(got, want) < 1e-4


def test_low_precision_passes_the_probe(tmp_path: Path) -> None:
    for family in ("gemma2", "cohere"):
        for dtype in ("bfloat16", "float16"):
            target = load(make_target(tmp_path / f"{family}-{dtype}", family), dtype=dtype)
            assert target.dtype == getattr(torch, dtype)


def test_low_precision_does_not_blind_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_target(tmp_path / "t", "phi3", sliding_window=9)
    _drop_the_window(monkeypatch)
    # Nor does a window that nothing else would show.
    monkeypatch.setattr(transformers_probe, "_uses_windows", lambda _: False)
    refused(lambda: load(path, dtype="bfloat16"), "differs from its own eager attention")


@pytest.mark.parametrize("load_format", ["dummy", "dummy-uniform"])
def test_dummy_weights_need_only_the_configuration(tmp_path: Path, load_format: str) -> None:
    path = make_target(tmp_path / "t", "olmo2")
    (path / "model.safetensors").unlink()
    refused(lambda: load(path), "no weight file")
    first, second = load(path, load_format=load_format), load(path, load_format=load_format)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_configurations_leave_defaults_to_their_class(tmp_path: Path) -> None:
    path = make_target(tmp_path / "t", "gemma2")
    edit_config(path, eos_token_id=..., bos_token_id=..., head_dim=...)
    config = read_model_config(path)
    assert (config.bos_token_id, config.eos_token_ids, config.head_dim) == (2, (1,), 256)


# What is refused

SMALL = {**SIZES, "num_hidden_layers": 4}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
REFUSED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "sinks": ("GptOss", {"num_local_experts": 4}, ["sinks"]),
    "shared_kv": ("Gemma3nText", {"num_kv_shared_layers": 2}, ["num_kv_shared_layers"]),
    "mla": ("DeepseekV3", {"kv_lora_rank": 16}, ["kv_lora_rank"]),
    "other_layers": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
        ["layers of type conv"],
    ),
    "chunked": ("Llama4Text", {}, ["layers of type chunked_attention"]),
    "state_space": ("Mamba", {}, ["MambaForCausalLM", "attention interface", "LlamaForCausalLM"]),
    "alibi": ("Bloom", {}, ["BloomForCausalLM", "attention interface"]),
    "encoder": ("T5", {}, ["T5", "not a causal decoder"]),
    "encoder_only": ("Bert", {}, ["BertModel"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_configuration(tmp_path: Path, name: str) -> None:
    import transformers

    prefix, options, parts = REFUSED[name]
    config = getattr(transformers, f"{prefix}Config")(**{**SMALL, **options})
    suffix = {"T5": "ForConditionalGeneration", "Bert": "Model"}.get(prefix, "ForCausalLM")
    config.architectures = [prefix.removesuffix("Text") + suffix]
    config.save_pretrained(tmp_path)
    refused(lambda: read_model_config(tmp_path), "config.json", *parts)


def test_refused_configurations_without_a_class(tmp_path: Path) -> None:
    def write(**data: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps(data))

    write(architectures=["NobodysForCausalLM"], model_type="nobodys")
    refused(lambda: read_model_config(tmp_path), "nobodys", "transformers", "--trust-remote-code")
    write(architectures=["NobodysForCausalLM"])
    refused(lambda: read_model_config(tmp_path), "NobodysForCausalLM", "model_type", "Qwen3")
    for data in ({}, {"architectures": None, "model_type": None}):
        write(**data)
        refused(lambda: read_model_config(tmp_path), 'neither "architectures" nor "model_type"')
    write(architectures=["LlamaForSequenceClassification"], model_type="llama")
    refused(lambda: read_model_config(tmp_path), "SequenceClassification", "LlamaForCausalLM")
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    write(architectures=["Phi3ForCausalLM"], model_type="phi3", quantization_config=quantised)
    refused(lambda: read_model_config(tmp_path), "quantization_config", "bitsandbytes")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_family_of_transformers_is_described_or_refused(tmp_path: Path) -> None:
    """Sizes may be lists, one a layer, or raise when the whole model is asked for them."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    described, errors = [], []
    for model_type, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        try:
            config = AutoConfig.for_model(model_type)
            config.architectures = [class_name]
            config.save_pretrained(tmp_path)
        except Exception:
            continue  # a family that needs more than its defaults
        try:
            described.append(read_model_config(tmp_path))
        except ModelError as error:
            errors.append(error)
        except Exception as error:
            raise AssertionError(f"{model_type}: {error!r}") from error
    assert min(len(described), len(errors)) > 40
    sizes = [(c.num_kv_heads, c.head_dim, c.intermediate_size) for c in described]
    assert all(type(size) is int and size > 0 for three in sizes for size in three)


@pytest.mark.parametrize("model_type", ["vit", "t5", "mamba", "gpt_oss"])
def test_what_is_not_named_is_not_said_to_be_named(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ModelError) as caught:
        read_model_config(tmp_path)
    assert "None" not in str(caught.value)


def test_multimodal_checkpoints_are_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.Gemma3Config(architectures=["Gemma3ForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    refused(lambda: read_model_config(tmp_path), "config.json", "not supported")


def test_sinks_are_refused_by_the_probe_too(tmp_path: Path) -> None:
    """Should a configuration not show them."""
    import transformers

    config = transformers.GptOssConfig(**SMALL, num_local_experts=4)
    model: Any = transformers.GptOssForCausalLM(config)
    model.save_pretrained(tmp_path)
    like = read_model_config(make_target(tmp_path / "other", "olmo2", num_hidden_layers=4))
    refused(
        lambda: load_transformers_target(
            tmp_path, like, device="cpu", dtype=torch.float32, kernels=KERNELS
        ),
        "attention sinks",
    )


def test_two_attention_calls_in_a_layer_are_refused(tmp_path: Path) -> None:
    import transformers

    model: Any = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**SMALL))
    model.save_pretrained(tmp_path)
    refused(lambda: load(tmp_path), "8 attention calls", "4 layers")


@pytest.mark.parametrize(("dtype", "factor"), [("float32", float("nan")), ("float16", 1e5)])
def test_hidden_states_that_are_not_finite_are_no_fault_of_the_family(
    tmp_path: Path, dtype: str, factor: float
) -> None:
    """Weights may be damaged, activations too large for the dtype."""
    path = make_target(tmp_path / "t", "olmo2", num_hidden_layers=2)
    state = load_state(path)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"):
        state[name] = (state[name] * factor).clamp(-6e4, 6e4)
    save_state(path, state)
    options: dict[str, Any] = {"dtype": dtype}
    with pytest.raises(ModelError, match=f"NaN or infinite in {dtype}") as caught:
        load(path, **options)
    assert "--dtype" in str(caught.value.hint)


def test_layers_of_several_streams_have_no_auxiliary_features(tmp_path: Path) -> None:
    """The target runs, and so would an EAGLE-1 head."""
    import transformers

    sizes = {key: value for key, value in SMALL.items() if key != "num_hidden_layers"}
    config = transformers.Gemma3nTextConfig(
        **sizes,
        num_hidden_layers=4,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=SIZES["vocab_size"],
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
    )
    model: Any = transformers.Gemma3nForCausalLM(config)
    model.save_pretrained(tmp_path)
    assert load(tmp_path).aux_layers == ()
    refused(lambda: load(tmp_path, aux_layers=(1, 2, 3)), "one vector a token", "EAGLE-3")


def _keep_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """As families do that only log a warning: the name that was set is not looked at."""
    from transformers.models.olmo2 import modeling_olmo2 as module

    own = module.eager_attention_forward
    interface = type("Own", (), {"get_interface": lambda *_: own})()
    monkeypatch.setattr(module, "ALL_ATTENTION_FUNCTIONS", interface)


def _drop_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that only the mask knows."""
    from transformers.models.phi3 import modeling_phi3 as module

    interface = module.ALL_ATTENTION_FUNCTIONS

    class Dropping:
        def get_interface(self, *args: Any) -> Any:
            function = interface.get_interface(*args)
            return lambda *a, sliding_window=None, **k: function(*a, **k)

    monkeypatch.setattr(module, "ALL_ATTENTION_FUNCTIONS", Dropping())


def _ignore_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions counted from the front of the pass, whatever they were said to be."""
    from transformers.models.olmo2 import modeling_olmo2 as module

    forward = module.Olmo2RotaryEmbedding.forward

    def counting(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(self, x, torch.arange(position_ids.shape[1])[None])

    monkeypatch.setattr(module.Olmo2RotaryEmbedding, "forward", counting)


def _look_at_the_whole_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something beside attention that mixes the tokens of a pass."""
    from transformers.models.olmo2 import modeling_olmo2 as module

    forward = module.Olmo2MLP.forward
    monkeypatch.setattr(module.Olmo2MLP, "forward", lambda s, x: forward(s, x) + x.mean(1, True))


@pytest.mark.parametrize(
    ("family", "options", "fault", "part"),
    [
        ("olmo2", {}, _keep_own_attention, "does not call the attention function"),
        ("phi3", {"sliding_window": 9}, _drop_the_window, "its window of 9"),
        ("phi3", {"sliding_window": 4000}, _drop_the_window, "its window of 4000"),
        ("olmo2", {}, _ignore_positions, "single steps differ"),
        ("olmo2", {}, _look_at_the_whole_pass, "two prompts in one pass"),
    ],
)
def test_the_probe_finds_classes_that_do_otherwise(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    options: dict[str, Any],
    fault: Callable[[pytest.MonkeyPatch], None],
    part: str,
) -> None:
    path = make_target(tmp_path / "t", family, **options)
    load(path)
    fault(monkeypatch)
    refused(lambda: load(path), str(path), part, "not supported")


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    path = make_target(tmp_path / "t", "olmo2")
    state = load_state(path)
    norm = state.pop("model.norm.weight")
    save_state(path, state)
    refused(lambda: load(path), "missing", "model.norm.weight")
    save_state(path, {**state, "model.norm.weight": norm, "extra": norm.clone()})
    refused(lambda: load(path), "unexpected", "extra")
    save_state(path, {**state, "model.norm.weight": norm[:7].clone()})
    refused(lambda: load(path), "model.norm.weight", "[7], expected [32]")
    save_state(path, {**state, "model.norm.weight": norm.to(torch.int8)})
    refused(lambda: load(path), "model.norm.weight", "torch.int8", "quantized")
    large = {**state, "model.norm.weight": norm * 1e6}
    save_state(path, large)
    refused(lambda: load(path, dtype="float16"), "model.norm.weight", "beyond float16")
    save_state(path, large, as_bin=True)
    refused(lambda: load(path, dtype="float16"), "pytorch_model.bin", "beyond float16")
    save_state(path, {**state, "model.norm.weight": norm})
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(lambda: load(path), "model.safetensors")


@pytest.mark.parametrize("as_bin", [False, True])
def test_shards_and_pickles_hold_the_same_model(tmp_path: Path, as_bin: bool) -> None:
    """Experts are stored one by one and fused by transformers, whichever file each is in."""
    path = make_target(tmp_path / "t", "qwen3_moe", hidden_act="gelu", max_shard_size="40KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    sequences = random_sequences()
    expected = run_transformers(path, sequences)
    if as_bin:
        save_state(path, load_state(path), as_bin=True)
    target = load(path, aux_layers=tuple(range(8)))
    check_against(target, sequences, expected)
    assert {parameter.device.type for parameter in target.parameters()} == {"cpu"}


def test_a_model_read_from_a_pickle_is_not_the_file(tmp_path: Path) -> None:
    path = make_target(tmp_path / "t", "olmo2")
    save_state(path, load_state(path), as_bin=True)
    target = load(path)
    before = target.lm_head_weight.clone()
    file = path / "pytorch_model.bin"
    size = file.stat().st_size
    with open(file, "r+b") as opened:
        opened.write(b"\xff" * size)
    assert torch.equal(target.lm_head_weight, before)


@pytest.mark.parametrize("name", TARGETS)
def test_headers_are_enough_to_compare_names_and_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    family, overrides = TARGETS[name]
    path = make_target(tmp_path / "t", family, **overrides)
    state = load_state(path)
    whole = load(path)

    def read(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(checkpoint, "read_tensor", read)
    options: dict[str, Any] = {"device": "meta", "kernels": KERNELS}
    shapes = load_target(path, **options)
    count = sum(parameter.numel() for parameter in whole.parameters())
    assert sum(parameter.numel() for parameter in shapes.parameters()) == count
    assert (shapes.num_kv_heads, shapes.head_dim) == (whole.num_kv_heads, whole.head_dim)
    assert shapes.lm_head_weight.shape == whole.lm_head_weight.shape
    assert shapes.notes == whole.notes
    last = max(state)
    save_state(path, {**state, last: torch.zeros(3)})
    refused(lambda: load_target(path, **options), last.rpartition(".")[2], "[3], expected")
    del state[last]
    save_state(path, state)
    refused(lambda: load_target(path, **options), "missing", last)


def test_code_beside_a_checkpoint_runs_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    path = make_target(tmp_path / "t", "olmo2")
    (path / "odd.py").write_text(
        "from pathlib import Path\n"
        "from transformers import Olmo2Config, Olmo2ForCausalLM\n"
        "Path(__file__).with_name('ran').touch()\n"
        "class OddConfig(Olmo2Config):\n    model_type = 'odd'\n"
        "class OddForCausalLM(Olmo2ForCausalLM):\n    config_class = OddConfig\n"
    )
    sequences = random_sequences()
    expected = run_transformers(path, sequences)
    edit_config(
        path,
        model_type="odd",
        architectures=["OddForCausalLM"],
        auto_map={"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"},
    )
    refused(lambda: load(path), "--trust-remote-code")
    assert not list(tmp_path.rglob("ran"))
    target = load(path, aux_layers=tuple(range(8)), trust_remote_code=True)
    assert type(target.model).__name__ == "OddForCausalLM"
    check_against(target, sequences, expected)


#: family, keys of the configuration with an unknown name in them, what is said.
NAMES: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": ("llama", {"hidden_act": "relu6x"}, '"hidden_act" must be one of'),
    "activation of another": ("gemma2", {"hidden_activation": "x"}, '"hidden_activation" must be'),
    "rope": (
        "llama",
        {"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}},
        '"rope_parameters.rope_type" must be one of default, linear',
    ),
    "rope, as it was written": (
        "llama",
        {"rope_parameters": None, "rope_scaling": {"type": "foo", "factor": 2.0}},
        '"rope_scaling.rope_type" must be one of default, linear',
    ),
    "rope of a layer type": (
        "gemma3",
        {"rope_parameters": {"full_attention": {"rope_type": "foo", "rope_theta": 1e4}}},
        '"rope_parameters.full_attention.rope_type" must be one of',
    ),
}


@pytest.mark.parametrize("kind", NAMES)
def test_names_that_nobody_knows_are_named_with_those_that_are(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    family, keys, part = NAMES[kind]
    value = next(iter({"relu6x", "x", "foo"} & set(re.findall(r"\w+", json.dumps(keys)))))
    path = make_target(tmp_path / "t", family)
    edit_config(path, **keys)
    capfd.readouterr()
    refused(lambda: read_model_config(path), f"{path}/config.json: {part}", f"got {value!r}")
    assert capfd.readouterr().err == "", "transformers' own remarks are not for users"


def test_what_a_known_class_misses_in_its_configuration_is_no_matter_of_trust(
    tmp_path: Path,
) -> None:
    path = make_target(tmp_path / "t", "gemma2")
    edit_config(path, rope_parameters={"rope_type": "linear", "rope_theta": 1e4})
    refused(lambda: load(path), "factor", "hint: correct its config.json")

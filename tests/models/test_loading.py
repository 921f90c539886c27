"""Strict loading: what is right loads, and every fault is one ModelError that names it."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import (
    edit_config,
    load_state,
    make_eagle1,
    make_eagle3,
    make_llama,
    make_target,
    save_state,
)
from safetensors.torch import save_file
from torch import nn

from specgen.errors import ModelError
from specgen.kernels import select_kernels
from specgen.models.decoder import Decoder
from specgen.models.registry import read_model_config
from specgen.models.weights import inspect_draft, load_draft, load_target, resolve_dtype

KERNELS = select_kernels("cpu")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    target = make_llama(root / "target", num_hidden_layers=7)
    return {
        "target": target,
        "sharded": make_llama(root / "sharded", max_shard_size="60KB"),
        "eagle1": make_eagle1(root / "eagle1", target),
        "eagle3": make_eagle3(root / "eagle3", target),
    }


@pytest.fixture
def copies(written: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a checkpoint that a test may damage."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(written[name], tmp_path / name))

    return copy


def load(path: Path, **options: Any) -> Decoder:
    return load_target(path, device="cpu", kernels=KERNELS, **options)


def refused(call: Callable[[], object], *parts: str) -> ModelError:
    """The call raises a ModelError whose text holds every part."""
    with pytest.raises(ModelError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)
    return caught.value


def change(path: Path, **tensors: torch.Tensor | None) -> Path:
    """Replace, add or (None) remove tensors; double underscores stand for dots."""
    state = load_state(path)
    for key, tensor in tensors.items():
        name = key.replace("__", ".")
        if tensor is None:
            del state[name]
        else:
            state[name] = tensor
    save_state(path, state)
    return path


def both_ways(path: Path, target: Path, *parts: str) -> None:
    """Refused when inspected, before any weight is loaded, and when loaded."""
    refused(lambda: inspect_draft(path, read_model_config(target)), *parts)
    model = load(target, aux_layers=(2, 3, 4))
    refused(lambda: load_draft(path, model, device="cpu", kernels=KERNELS), *parts)


def only_loaded(path: Path, target: Path, *parts: str) -> None:
    """Refused when loaded."""
    model = load(target, aux_layers=(2, 3, 4))
    refused(lambda: load_draft(path, model, device="cpu", kernels=KERNELS), *parts)


# What loads


def same_weights(left: Decoder, right: Decoder) -> bool:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_shards_and_pickles_hold_the_same_model(
    written: dict[str, Path], copies: Callable[[str], Path]
) -> None:
    assert len(list(written["sharded"].glob("*.safetensors"))) > 2
    single = load(written["target"])
    assert same_weights(single, load(written["sharded"]))
    pickled = copies("target")
    state = load_state(pickled)
    save_state(pickled, state, as_bin=True)
    assert same_weights(single, load(pickled))
    (pickled / "pytorch_model.bin").unlink()
    names = sorted(state)
    parts = {"a.bin": names[:20], "b.bin": names[20:]}
    for file, part in parts.items():
        torch.save({name: state[name] for name in part}, pickled / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (pickled / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert same_weights(single, load(pickled))


def test_an_old_style_pickle_loads(written: dict[str, Path], copies: Callable[[str], Path]) -> None:
    path = copies("target")
    state = load_state(path)
    save_state(path, state, as_bin=True)
    torch.save(state, path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert same_weights(load(written["target"]), load(path))


def test_stored_rope_frequencies_of_old_checkpoints_are_passed_over(
    written: dict[str, Path], copies: Callable[[str], Path]
) -> None:
    path = copies("target")
    change(path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    assert same_weights(load(written["target"]), load(path))


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "tied", tie_word_embeddings=True)
    decoder = load(path)
    assert decoder.lm_head_weight is decoder.embed_weight
    state = load_state(path)
    assert "lm_head.weight" not in state
    embedding = state["model.embed_tokens.weight"]
    assert torch.equal(decoder.embed_weight, embedding)
    # Stored though tied: fine while it is the same.
    change(path, lm_head__weight=embedding.clone())
    assert load(path).lm_head_weight.data_ptr() != 0
    change(path, lm_head__weight=embedding + 1)
    refused(lambda: load(path), "model.safetensors", '"lm_head.weight"', "tie_word_embeddings")


def test_dtype(written: dict[str, Path], tmp_path: Path) -> None:
    half = make_llama(tmp_path / "half")
    change(half, **{n.replace(".", "__"): t.bfloat16() for n, t in load_state(half).items()})
    edit_config(half, dtype="bfloat16")
    assert load(half).dtype == torch.float32
    assert load(half, dtype="float16").dtype == torch.float16
    assert load(half, dtype=torch.bfloat16).dtype == torch.bfloat16
    config = read_model_config(half)
    assert config.dtype == "bfloat16"
    assert resolve_dtype("auto", "cuda", config) == torch.bfloat16
    assert resolve_dtype("float32", "cuda", config) == torch.float32


def test_dtype_without_a_word_in_the_configuration_is_that_of_the_weights(tmp_path: Path) -> None:
    from specgen.models.checkpoint import Checkpoint

    path = make_llama(tmp_path / "half")
    change(path, **{n.replace(".", "__"): t.half() for n, t in load_state(path).items()})
    edit_config(path, dtype=..., torch_dtype=...)
    config = read_model_config(path)
    assert config.dtype is None
    assert resolve_dtype("auto", "cuda", config, Checkpoint.open(path)) == torch.float16


@pytest.mark.parametrize(("load_format", "largest"), [("dummy", 10), ("dummy-uniform", 1e-3)])
def test_dummy_weights_need_only_configurations(
    written: dict[str, Path], tmp_path: Path, load_format: str, largest: float
) -> None:
    for name in ("target", "eagle1", "eagle3"):
        (tmp_path / name).mkdir()
        shutil.copy(written[name] / "config.json", tmp_path / name)
    config = inspect_draft(
        tmp_path / "eagle3", read_model_config(tmp_path / "target"), load_format=load_format
    )
    assert (config.layout, config.draft_vocab_size) == ("eagle3", 48)
    target = load(tmp_path / "target", load_format=load_format, aux_layers=config.aux_layers)
    again = load(tmp_path / "target", load_format=load_format, aux_layers=config.aux_layers)
    assert same_weights(target, again)
    assert all(0 < weight.abs().max() < 1.01 * largest for weight in target.parameters())
    for name in ("eagle1", "eagle3"):
        draft = load_draft(
            tmp_path / name, target, device="cpu", kernels=KERNELS, load_format=load_format
        )
        assert draft.config.layout == name
        assert isinstance(draft, torch.nn.Module)
        for parameter in draft.parameters():
            assert torch.isfinite(parameter).all()
            assert parameter.abs().max() < 1.01 * largest  # biases may be zeros
        if draft.target_ids is not None:
            assert (draft.target_ids.diff() > 0).all()
    refused(lambda: load(tmp_path / "target"), str(tmp_path / "target"), "no weight file")


# Faults of files


def test_missing_directory_and_configuration(tmp_path: Path) -> None:
    refused(
        lambda: load(tmp_path / "nowhere"), str(tmp_path / "nowhere"), "no such model directory"
    )
    refused(lambda: load(tmp_path), "config.json", "missing")
    (tmp_path / "config.json").write_text("{")
    refused(lambda: load(tmp_path), "config.json", "JSON")
    (tmp_path / "config.json").write_text("[]")
    refused(lambda: load(tmp_path), "config.json", "object", "list")


def test_missing_shard(copies: Callable[[str], Path]) -> None:
    path = copies("sharded")
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    refused(lambda: load(path), shard.name, "missing", "index.json")


def test_index_that_disagrees_with_its_shards(copies: Callable[[str], Path]) -> None:
    path = copies("sharded")
    index = path / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    name = next(iter(data["weight_map"]))
    original = data["weight_map"][name]
    data["weight_map"][name] = next(s for s in data["weight_map"].values() if s != original)
    index.write_text(json.dumps(data))
    refused(lambda: load(path), name, data["weight_map"][name])
    data["weight_map"] = {"x": "../model.safetensors"}
    index.write_text(json.dumps(data))
    refused(lambda: load(path), "../model.safetensors", "plain")
    index.write_text("{}")
    refused(lambda: load(path), index.name, "weight_map")


def test_a_tensor_in_two_shards(copies: Callable[[str], Path]) -> None:
    path = copies("sharded")
    first, second = sorted(path.glob("*.safetensors"))[:2]
    from safetensors.torch import load_file

    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)
    refused(lambda: load(path), name, first.name, second.name)


@pytest.mark.parametrize("keep", [0, 5, 1000, 0.7])
def test_truncated_safetensors(copies: Callable[[str], Path], keep: float) -> None:
    file = copies("target") / "model.safetensors"
    content = file.read_bytes()
    size = int(len(content) * keep) if isinstance(keep, float) else keep
    file.write_bytes(content[:size])
    refused(lambda: load(file.parent), str(file), "not a complete safetensors file")


@pytest.mark.parametrize("keep", [0, 5, 1000, 0.7])
def test_truncated_pickle(copies: Callable[[str], Path], keep: float) -> None:
    path = copies("target")
    save_state(path, load_state(path), as_bin=True)
    file = path / "pytorch_model.bin"
    content = file.read_bytes()
    size = int(len(content) * keep) if isinstance(keep, float) else keep
    file.write_bytes(content[:size])
    refused(lambda: load(path), str(file))


class _RunsCode:
    """Unpickling would touch a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("modern", [False, True])
@pytest.mark.parametrize("kind", ["target", "eagle3"])
def test_a_pickle_of_parameters_holds_their_values(
    written: dict[str, Path], copies: Callable[[str], Path], kind: str, modern: bool
) -> None:
    """As some trainers save a model's own tensors: they want gradients."""
    path = copies(kind)
    state = load_state(path)
    wanting = {n: nn.Parameter(t) if t.is_floating_point() else t for n, t in state.items()}
    save_state(path, wanting, as_bin=True)
    file = path / "pytorch_model.bin"
    torch.save(wanting, file, _use_new_zipfile_serialization=modern)
    if kind == "target":
        assert same_weights(load(written["target"]), load(path))
        return
    model = load(written["target"], aux_layers=(2, 3, 4))
    head = load_draft(path, model, device="cpu", kernels=KERNELS)
    assert torch.equal(head.lm_head_weight, state["lm_head.weight"])
    assert not head.lm_head_weight.requires_grad


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda tensor: tensor.to_sparse(), "layout torch.sparse_coo"),
        (lambda tensor: tensor.to("meta"), "without values"),
        (lambda tensor: tensor.to(torch.complex64), "expected a float type"),
        (lambda tensor: [tensor], "is a list, not a tensor"),
    ],
)
def test_a_pickle_of_tensors_that_cannot_be_read(
    copies: Callable[[str], Path], spoil: Callable[[torch.Tensor], Any], words: str
) -> None:
    path = copies("target")
    state = load_state(path)
    name = "model.norm.weight"
    save_state(path, state | {name: spoil(state[name])}, as_bin=True)
    refused(lambda: load(path), "pytorch_model.bin", name, words)


@pytest.mark.parametrize("as_bin", [False, True])
def test_a_pointer_in_the_place_of_a_file_is_named(
    copies: Callable[[str], Path], as_bin: bool
) -> None:
    path = copies("target")
    save_state(path, load_state(path), as_bin=as_bin)
    file = path / ("pytorch_model.bin" if as_bin else "model.safetensors")
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n")
    error = refused(lambda: load(path), file.name, "pointer of git-lfs")
    assert "git lfs pull" in str(error.hint)


@pytest.mark.parametrize("plain", [False, True])
def test_a_pickle_that_runs_code_is_refused(
    copies: Callable[[str], Path], tmp_path: Path, plain: bool
) -> None:
    path = copies("target")
    marker = tmp_path / "it-ran"
    save_state(path, load_state(path), as_bin=True)
    file = path / "pytorch_model.bin"
    content = {"model.norm.weight": _RunsCode(marker)}
    if plain:
        file.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, file)
    refused(lambda: load(path), str(file), "refused or damaged")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [([1, 2], "a list"), ({"step": 3}, '"step" is a int'), ({"model": {}}, '"model" is a dict')],
)
def test_a_pickle_of_something_else(
    copies: Callable[[str], Path], content: object, said: str
) -> None:
    path = copies("target")
    save_state(path, {}, as_bin=True)
    torch.save(content, path / "pytorch_model.bin")
    refused(lambda: load(path), "pytorch_model.bin", said, "state dictionary alone")


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80"])
def test_what_is_no_pickle_says_why(copies: Callable[[str], Path], content: bytes) -> None:
    path = copies("target")
    save_state(path, {}, as_bin=True)
    (path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: .*: \w+") as caught:
        load(path)
    assert "fetch it again" in str(caught.value.hint)
    assert content or "it is empty" in caught.value.message


# Faults of tensors


def test_missing_tensor(copies: Callable[[str], Path]) -> None:
    path = change(copies("target"), model__layers__2__mlp__up_proj__weight=None)
    refused(lambda: load(path), str(path), '"model.layers.2.mlp.up_proj.weight" is missing')


def test_missing_lm_head_is_not_left_random(copies: Callable[[str], Path]) -> None:
    path = change(copies("target"), lm_head__weight=None)
    refused(lambda: load(path), '"lm_head.weight" is missing')


def test_extra_tensor(copies: Callable[[str], Path]) -> None:
    path = change(copies("target"), model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
    name = '"model.layers.0.self_attn.q_proj.bias"'
    refused(lambda: load(path), "model.safetensors", name, "not part of the model")


def test_more_layers_than_declared(copies: Callable[[str], Path]) -> None:
    path = copies("target")
    edit_config(path, num_hidden_layers=6)
    refused(lambda: load(path), '"model.layers.6.', "not part of the model", "(and 6 more)")


def test_wrong_shape(copies: Callable[[str], Path]) -> None:
    path = change(copies("target"), model__layers__1__self_attn__k_proj__weight=torch.ones(64, 32))
    name = '"model.layers.1.self_attn.k_proj.weight"'
    refused(lambda: load(path), "model.safetensors", name, "[64, 32]", "[32, 32]")


def test_quantized_tensor(copies: Callable[[str], Path]) -> None:
    path = copies("target")
    change(path, model__norm__weight=torch.ones(32, dtype=torch.int8))
    refused(lambda: load(path), '"model.norm.weight"', "int8", "float")


@pytest.mark.parametrize(
    "suffix", ["qweight", "weight_packed", "weight_scale", "weight_scale_inv", "scales", "SCB"]
)
@pytest.mark.parametrize("kind", ["target", "eagle3", "olmo2"])
def test_quantized_weights_that_no_configuration_tells_of(
    written: dict[str, Path], tmp_path: Path, kind: str, suffix: str
) -> None:
    """Instead of the weight (GPTQ, AWQ, packed) or beside it (FP8, bitsandbytes)."""
    if kind == "olmo2":
        path = make_target(tmp_path / "t", "olmo2", num_hidden_layers=2)
    else:
        path = Path(shutil.copytree(written[kind], tmp_path / kind))
    state = load_state(path)
    name = next(n for n in state if n.endswith("mlp.up_proj.weight"))
    if suffix in ("qweight", "weight_packed"):
        del state[name]
    save_state(path, state | {name.replace("weight", suffix): torch.ones(2, dtype=torch.int32)})
    words = (suffix, "quantized weights, which are not supported")
    if kind == "eagle3":
        only_loaded(path, written["target"], *words)
    else:
        refused(lambda: load(path), *words)


def test_values_beyond_float16(copies: Callable[[str], Path]) -> None:
    path = change(copies("target"), model__norm__weight=torch.full((32,), 1e5))
    assert load(path).dtype == torch.float32
    refused(lambda: load(path, dtype="float16"), '"model.norm.weight"', "float16", "bfloat16")


# Faults of heads


def test_head_tensor_missing_or_extra(
    copies: Callable[[str], Path], written: dict[str, Path]
) -> None:
    path = change(copies("eagle3"), norm__weight=None)
    only_loaded(path, written["target"], '"norm.weight" is missing')
    path = change(copies("eagle1"), layers__0__input_layernorm__weight=torch.ones(32))
    only_loaded(path, written["target"], '"layers.0.input_layernorm.weight"', "not part")


def test_head_tensor_of_wrong_shape(
    copies: Callable[[str], Path], written: dict[str, Path]
) -> None:
    path = change(copies("eagle3"), midlayer__self_attn__q_proj__weight=torch.ones(64, 32))
    name = '"midlayer.self_attn.q_proj.weight"'
    only_loaded(path, written["target"], name, "[64, 32]", "[64, 64]")


def test_eagle3_head_of_another_target_size(written: dict[str, Path], tmp_path: Path) -> None:
    other = make_llama(tmp_path / "wide", hidden_size=64)
    both_ways(written["eagle3"], other, '"fc.weight"', "[32, 96]", "[32, 192]", "64")
    path = make_eagle3(tmp_path / "says", written["target"], target_hidden_size=4096)
    both_ways(path, written["target"], '"target_hidden_size"', "4096", "32")


def test_eagle1_head_of_another_target_size(written: dict[str, Path], tmp_path: Path) -> None:
    other = make_llama(tmp_path / "wide", hidden_size=64)
    both_ways(written["eagle1"], other, '"hidden_size"', "32", "64")


def test_head_of_another_vocabulary(written: dict[str, Path], tmp_path: Path) -> None:
    other = make_llama(tmp_path / "more", vocab_size=128)
    for name in ("eagle1", "eagle3"):
        both_ways(written[name], other, '"vocab_size"', "96", "128")


@pytest.mark.parametrize("make", [make_eagle1, make_eagle3])
def test_more_than_one_layer(
    make: Callable[..., Path], written: dict[str, Path], tmp_path: Path
) -> None:
    path = make(tmp_path / "head", written["target"], num_hidden_layers=2)
    both_ways(path, written["target"], '"num_hidden_layers"', "2", "one layer")
    edit_config(path, num_hidden_layers=1)
    prefix = "layers__1" if make is make_eagle1 else "midlayer__1"
    change(path, **{f"{prefix}__input_layernorm__weight": torch.ones(32)})
    name = prefix.replace("__", ".") + ".input_layernorm.weight"
    both_ways(path, written["target"], name, "second layer")


def test_d2t_of_absolute_ids(copies: Callable[[str], Path], written: dict[str, Path]) -> None:
    path = copies("eagle3")
    absolute = load_state(path)["d2t"] + torch.arange(48)
    change(path, d2t=absolute)
    only_loaded(path, written["target"], '"d2t"', "96", "look like absolute target ids")
    # Small ids stay below the vocabulary when read as offsets; nothing but "t2d" can tell then.
    small = torch.arange(48)
    change(path, d2t=small, t2d=torch.arange(96) < 48)
    only_loaded(path, written["target"], '"t2d"', "48", "look like absolute target ids")
    change(path, t2d=None)
    only_loaded(path, written["target"], '"d2t"', '"t2d"', "look like absolute target ids")


def test_d2t_that_is_no_map(copies: Callable[[str], Path], written: dict[str, Path]) -> None:
    path = copies("eagle3")
    state = load_state(path)
    d2t = state["d2t"].clone()
    d2t[10] -= 20
    change(path, d2t=d2t)
    only_loaded(path, written["target"], '"d2t"', "draft id 10", str(10 + int(d2t[10])))
    change(path, d2t=state["d2t"].float())
    only_loaded(path, written["target"], '"d2t"', "float32", "[48]")
    change(path, d2t=state["d2t"][:40].clone())
    only_loaded(path, written["target"], '"d2t"', "[40]", "[48]")


def test_d2t_that_was_never_filled_is_said(
    written: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = make_eagle3(tmp_path / "head", written["target"], store_t2d=False)
    change(head, d2t=torch.zeros(48, dtype=torch.int64))
    model = load(written["target"], aux_layers=(2, 3, 4))
    draft = load_draft(head, model, device="cpu", kernels=KERNELS)
    assert draft.target_ids is not None
    assert draft.target_ids.tolist() == list(range(48))
    (record,) = caplog.records
    assert "never filled" in record.getMessage()
    assert "first 48 tokens" in record.getMessage()


def test_t2d_that_disagrees(copies: Callable[[str], Path], written: dict[str, Path]) -> None:
    path = copies("eagle3")
    flags = load_state(path)["t2d"]
    change(path, t2d=~flags)
    only_loaded(path, written["target"], '"t2d"', "48")
    change(path, t2d=flags[:90].clone())
    only_loaded(path, written["target"], '"t2d"', "[90]", "[96]")


def test_d2t_missing(copies: Callable[[str], Path], written: dict[str, Path]) -> None:
    path = change(copies("eagle3"), d2t=None)
    both_ways(path, written["target"], '"d2t" is missing', "48", "96")


def test_t2d_alone_must_flag_the_whole_vocabulary(written: dict[str, Path], tmp_path: Path) -> None:
    path = make_eagle3(tmp_path / "head", written["target"], draft_vocab_size=None)
    target = load(written["target"], aux_layers=(2, 3, 4))
    change(path, t2d=torch.ones(96, dtype=torch.bool))
    assert load_draft(path, target, device="cpu", kernels=KERNELS).target_ids is None
    change(path, t2d=torch.arange(96) < 50)
    only_loaded(path, written["target"], '"t2d"', "50", "96")


def test_eagle3_tensors_that_only_the_target_could_lend(
    written: dict[str, Path], tmp_path: Path
) -> None:
    path = make_eagle3(tmp_path / "a", written["target"], store_lm_head=False)
    both_ways(path, written["target"], '"lm_head.weight" is missing', "[48, 32]")
    path = make_eagle3(tmp_path / "b", written["target"], hidden_size=48, num_attention_heads=6)
    both_ways(path, written["target"], '"embed_tokens.weight" is missing', "32", "48")


def test_nothing_is_logged_for_a_plain_head(
    written: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    target = load(written["target"], aux_layers=(2, 3, 4))
    with caplog.at_level(logging.WARNING):
        load_draft(written["eagle3"], target, device="cpu", kernels=KERNELS)
    assert not caplog.records


def test_families_say_their_biases(tmp_path: Path) -> None:
    """A Qwen2 checkpoint without its biases, or under Llama's name, is refused."""
    path = make_target(tmp_path / "qwen2", "qwen2")
    edit_config(path, architectures=["LlamaForCausalLM"])
    refused(lambda: load(path), "self_attn.q_proj.bias", "not part of the model")

"""Heads with the numbers of published ones: recognised at full size, loaded and run narrow.

At full size the files hold headers and holes, which take no room on the disk.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from models.published_heads import HEADS, PublishedHead
from models.tiny import save_state, write_tokenizer
from safetensors.torch import load_file

from specgen.config import EngineConfig
from specgen.doctor_pair import examine_pair
from specgen.kernels import select_kernels
from specgen.models.registry import read_model_config
from specgen.models.weights import inspect_draft, load_draft, load_target

KERNELS = select_kernels("cpu")
DTYPES = {"BF16": 2, "I64": 8, "BOOL": 1}


def target_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    size, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or size // config["num_attention_heads"]
    rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], size),
        "model.norm.weight": (size,),
    }
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], size)
    for i in range(config["num_hidden_layers"]):
        layer = layer_shapes(f"model.layers.{i}", size, size, inner, rows)
        if "num_experts" in config:
            layer = {name: shape for name, shape in layer.items() if ".mlp." not in name}
            layer |= expert_shapes(f"model.layers.{i}.mlp", config)
        shapes |= layer
        shapes[f"model.layers.{i}.input_layernorm.weight"] = (size,)
        if config["model_type"].startswith("qwen3"):
            for name in ("q_norm", "k_norm"):
                shapes[f"model.layers.{i}.self_attn.{name}.weight"] = (head_dim,)
        if config["model_type"] == "qwen2":
            for name, count in zip("qkv", (rows[0], rows[1], rows[1]), strict=True):
                shapes[f"model.layers.{i}.self_attn.{name}_proj.bias"] = (count,)
    return shapes


def expert_shapes(prefix: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    size, inner = config["hidden_size"], config["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.gate.weight": (config["num_experts"], size)}
    for i in range(config["num_experts"]):
        for name in ("gate", "up"):
            shapes[f"{prefix}.experts.{i}.{name}_proj.weight"] = (inner, size)
        shapes[f"{prefix}.experts.{i}.down_proj.weight"] = (size, inner)
    return shapes


def layer_shapes(
    prefix: str, size: int, input_size: int, inner: int, rows: tuple[int, int]
) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": (rows[0], input_size),
        f"{prefix}.self_attn.k_proj.weight": (rows[1], input_size),
        f"{prefix}.self_attn.v_proj.weight": (rows[1], input_size),
        f"{prefix}.self_attn.o_proj.weight": (size, rows[0]),
        f"{prefix}.mlp.gate_proj.weight": (inner, size),
        f"{prefix}.mlp.up_proj.weight": (inner, size),
        f"{prefix}.mlp.down_proj.weight": (size, inner),
        f"{prefix}.post_attention_layernorm.weight": (size,),
    }


def head_shapes(head: PublishedHead, target: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    config = head.config.get("transformer_layer_config", head.config)
    size, vocab_size = config["hidden_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or size // heads
    rows = heads * head_dim, config["num_key_value_heads"] * head_dim
    is_eagle3 = "d2t" in head.stored
    num_aux = len(head.aux)
    draft_vocab = head.config.get("draft_vocab_size", vocab_size)
    shapes = layer_shapes(
        head.prefix, size, 2 * size if is_eagle3 else size, config["intermediate_size"], rows
    )
    if is_eagle3:
        for name in ("hidden_norm", "input_layernorm"):
            shapes[f"{head.prefix}.{name}.weight"] = (size,)
    if "qkv.bias" in head.stored:
        for name, count in zip("qkv", (rows[0], rows[1], rows[1]), strict=True):
            shapes[f"{head.prefix}.self_attn.{name}_proj.bias"] = (count,)
    others: dict[str, tuple[int, ...]] = {
        "fc": (size, num_aux * target["hidden_size"] if is_eagle3 else 2 * size),
        "input_norm": (num_aux * target["hidden_size"],),
        **{f"fc_norm.{i}": (target["hidden_size"],) for i in range(num_aux)},
        "norm": (size,),
        "lm_head": (draft_vocab, size),
        "embed_tokens": (vocab_size, size),
        "d2t": (draft_vocab,),
        "t2d": (vocab_size,),
        "fc.bias": (size,),
    }
    for name in head.stored:
        if name != "qkv.bias":
            is_bare = name in ("d2t", "t2d", "fc.bias")
            shapes[name if is_bare else f"{name}.weight"] = others[name]
    return shapes


def write_holes(path: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Path:
    """A checkpoint directory whose tensors are a hole in a sparse file."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        dtype = {"d2t": "I64", "t2d": "BOOL"}.get(name, "BF16")
        start, end = end, end + math.prod(shape) * DTYPES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        if "t2d" in shapes:  # beside offsets of zero
            file.seek(8 + len(text) + header["t2d"]["data_offsets"][0])
            file.write(b"\x01" * shapes["d2t"][0])
    return path


@pytest.mark.parametrize("name", HEADS)
def test_at_full_size(name: str, tmp_path: Path) -> None:
    head = HEADS[name]
    target_path = write_holes(tmp_path / "target", head.target, target_shapes(head.target))
    path = write_holes(tmp_path / "head", head.config, head_shapes(head, head.target))
    config = inspect_draft(path, read_model_config(target_path))
    assert config.aux_layers == head.aux
    assert config.rope.theta == head.theta
    for key, value in head.facts.items():
        assert getattr(config, key) == value, key
    options: dict[str, Any] = {"device": "meta", "dtype": "bfloat16", "kernels": KERNELS}
    target = load_target(target_path, aux_layers=config.aux_layers, max_model_len=64, **options)
    draft = load_draft(path, target, **options)
    floats = {n: s for n, s in head_shapes(head, head.target).items() if n not in ("d2t", "t2d")}
    assert isinstance(draft, torch.nn.Module)
    count = sum(parameter.numel() for parameter in draft.parameters())
    assert count == sum(map(math.prod, floats.values()))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", "131.4"),  # 70.6e9 in two bytes, GiB
        ("a head of speculators 0.8", "437.9"),  # 36,000 tensors
    ],
)
def test_doctor_takes_seconds_for_the_largest(name: str, size: str, tmp_path: Path) -> None:
    head = HEADS[name]
    target = write_holes(tmp_path / "target", head.target, target_shapes(head.target))
    path = write_holes(tmp_path / "head", head.config, head_shapes(head, head.target))
    write_tokenizer(target, head.target["vocab_size"])
    started = time.perf_counter()
    asked = EngineConfig(model=str(target), draft_model=str(path), device="cpu", dtype="bfloat16")
    found = {(f.section, f.name): f for f in examine_pair(asked, (2048,))}
    assert time.perf_counter() - started < 10
    assert found["draft", "fits the target"].value == "yes"
    assert found["memory", "target weights"].value.startswith(size)
    assert found["memory", "machine"].status == "problem"  # no test machine has that much memory


def narrow(config: dict[str, Any], scale: dict[int, int]) -> dict[str, Any]:
    """Real keys and proportions; widths and vocabularies replaced."""
    layer = dict(config)
    if "transformer_layer_config" in layer:
        layer["transformer_layer_config"] = narrow(layer["transformer_layer_config"], scale)
    for key in ("vocab_size", "draft_vocab_size", "hidden_size", "target_hidden_size"):
        if layer.get(key) is not None:
            layer[key] = scale[layer[key]]
    if "intermediate_size" in layer:
        layer["intermediate_size"] = 48
    if "num_experts" in layer:
        layer |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    if "num_attention_heads" in layer:
        layer["num_attention_heads"] //= layer["num_key_value_heads"]
        layer["num_key_value_heads"] = 1
        layer["head_dim"] = 16
    return layer


def random_state(
    shapes: dict[str, tuple[int, ...]], seed: int, vocab_size: int
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes.items():
        if name == "d2t":
            ids = torch.randperm(vocab_size, generator=generator)[: shape[0]].sort().values
            state["d2t"] = ids - torch.arange(shape[0])
            state["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        elif name != "t2d":
            values = torch.randn(shape, generator=generator)
            state[name] = values * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.1 * values
    return state


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_narrow(name: str, tmp_path: Path) -> None:
    """The real keys with narrow random weights load and draft."""
    head = HEADS[name]
    own = head.config.get("transformer_layer_config", head.config)["hidden_size"]
    vocab_size = head.target["vocab_size"]
    same = head.config.get("draft_vocab_size", 0) == vocab_size
    scale = {own: 48, head.target["hidden_size"]: 32, vocab_size: 160}
    if own == head.target["hidden_size"]:
        scale[own] = 32
    if not same:
        scale[head.config.get("draft_vocab_size", vocab_size)] = 160 if same else 96
        scale[vocab_size] = 160
    target_config, config = narrow(head.target, scale), narrow(head.config, scale)
    small = PublishedHead(target_config, config, head.stored, aux=head.aux, prefix=head.prefix)
    paths = []
    for kind, content, shapes in (
        ("target", target_config, target_shapes(target_config)),
        ("head", config, head_shapes(small, target_config)),
    ):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps(content))
        save_state(tmp_path / kind, random_state(shapes, len(paths), scale[vocab_size]))
        paths.append(tmp_path / kind)
    seen = inspect_draft(paths[1], read_model_config(paths[0]))
    assert seen.aux_layers == head.aux
    options: dict[str, Any] = {"device": "cpu", "kernels": KERNELS}
    target = load_target(paths[0], aux_layers=seen.aux_layers, max_model_len=64, **options)
    draft = load_draft(paths[1], target, **options)
    stored = load_file(paths[1] / "model.safetensors")
    for official, slot in draft.slots().items():
        stored_name = official.replace("midlayer.", f"{head.prefix}.")
        assert torch.equal(slot, stored[stored_name]), official
    if "d2t" in stored and not same:
        assert draft.target_ids is not None
        wanted = stored["d2t"] + torch.arange(len(stored["d2t"]))
        assert draft.target_ids.tolist() == wanted.tolist()

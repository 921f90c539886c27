"""The target, straight-line: a Llama with the parameter names of its checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from tools.build_pair.tokenizer import BOS_ID, END_ID, EOS_ID, PAD_ID

SHARD_BYTES = 15_000_000


@dataclass(frozen=True)
class Shape:
    """Sizes of the target; the draft layers share them."""

    hidden: int = 320
    layers: int = 8
    heads: int = 10
    kv_heads: int = 5
    head_dim: int = 32
    intermediate: int = 896
    vocab: int = 8192
    theta: float = 10000.0
    eps: float = 1e-5
    max_positions: int = 1024


def rope_tables(shape: Shape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, `[..., head_dim]`, of `positions`."""
    half = torch.arange(0, shape.head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float().unsqueeze(-1) * shape.theta ** (-half / shape.head_dim)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split form that Llama checkpoints use."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """The norm in the type of its input: mixed types miss the fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Projections of one attention; `width` is the input width (2H in an EAGLE-3 draft)."""

    def __init__(self, shape: Shape, width: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        width = width or shape.hidden
        self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q `[B, heads, T, D]`, rotated k and v `[B, kv_heads, T, D]`."""
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, -1, self.shape.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, -1, self.shape.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, -1, self.shape.head_dim).transpose(1, 2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.project(x, cos, sin)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """The gated SiLU feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm decoder block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, eps=shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, eps=shape.eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Target(nn.Module):
    """The whole target without its head, which is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, eps=shape.eps)

    def reset(self) -> None:
        """Small normal weights; the matrices that write to the residual stream start smaller."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                down = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * self.shape.layers) ** 0.5 if down else 0.03
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The normed last hidden states `[B, T, H]`, and the residual stream at each boundary.

        Boundary i is what enters block i; the last one is what leaves the last block.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed_tokens(tokens)
        cos, sin = rope_tables(self.shape, positions)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        entering: list[Tensor] = []
        for layer in self.layers:
            entering.append(x)
            x = layer(x, cos, sin)
        entering.append(x)
        return self.norm(x), entering

    def features(self, tokens: Tensor, aux: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Final normed states `[B, T, H]` and the streams at the boundaries `aux` side by side."""
        last, streams = self(tokens)
        return last, torch.cat([streams[i] for i in aux], dim=-1) if aux else last

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of the tied head."""
        return functional.linear(hidden, self.embed_tokens.weight)


def save_target(model: Target, folder: Path) -> None:
    """Write the checkpoint: configuration, generation defaults, sharded bf16 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    common: dict[str, Any] = {"bos_token_id": BOS_ID, "pad_token_id": PAD_ID}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": EOS_ID,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_positions,
        "mlp_bias": False,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab,
        **common,
    }
    generation = {"eos_token_id": [EOS_ID, END_ID], **common}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().to("cpu", torch.bfloat16).contiguous()
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][f"model.{name}"] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def load_target(folder: Path, device: str, dtype: torch.dtype = torch.bfloat16) -> Target:
    """Read a checkpoint that `save_target` wrote."""
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        theta=config["rope_theta"],
        eps=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
    )
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        weights |= load_file(path)
    model = Target(shape)
    model.load_state_dict({name.removeprefix("model."): t for name, t in weights.items()})
    return model.to(device, dtype).requires_grad_(False).eval()

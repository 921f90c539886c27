"""EAGLE heads written down straight from their description: dense, uncached, no product code.

Each draft is computed by running the whole sequence of pairs again. Only torch is used.
"""

from __future__ import annotations

import math
from typing import Any

import torch

State = dict[str, torch.Tensor]


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def llama3(frequency: float, rope: dict[str, Any]) -> float:
    """Llama 3.1: long waves are slowed by the factor, short ones kept, those between blended."""
    length = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wave = 2 * math.pi / frequency
    if wave < length / high:
        return frequency
    if wave > length / low:
        return frequency / rope["factor"]
    kept = (length / wave - low) / (high - low)
    return (1 - kept) * frequency / rope["factor"] + kept * frequency


def yarn(index: int, head_dim: int, theta: float, rope: dict[str, Any]) -> float:
    """YaRN: pairs that turn often are kept, slow ones slowed by the factor, with a ramp between."""
    first, last = (
        head_dim
        * math.log(rope["original_max_position_embeddings"] / (turns * 2 * math.pi))
        / (2 * math.log(theta))
        for turns in (rope["beta_fast"], rope["beta_slow"])
    )
    begin, end = max(math.floor(first), 0), min(math.ceil(last), head_dim - 1)
    slowed = min(max((index - begin) / (end - begin), 0.0), 1.0)
    frequency = theta ** (-2 * index / head_dim)
    return slowed * frequency / rope["factor"] + (1 - slowed) * frequency


def rotate(
    x: torch.Tensor, positions: torch.Tensor, theta: float, rope: dict[str, Any]
) -> torch.Tensor:
    """Rotate the halves of ``[n, heads, D]`` as complex numbers."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    if rope.get("rope_type") == "llama3":
        scaled = [llama3(frequency, rope) for frequency in frequencies.tolist()]
        frequencies = torch.tensor(scaled, dtype=torch.float64)
    if rope.get("rope_type") == "linear":
        frequencies = frequencies / rope["factor"]
    size = 1.0
    if rope.get("rope_type") == "yarn":
        scaled = [yarn(i, 2 * half, theta, rope) for i in range(half)]
        frequencies = torch.tensor(scaled, dtype=torch.float64)
        size = 0.1 * math.log(rope["factor"]) + 1
    angles = positions.double()[:, None] * frequencies  # [n, D/2]
    turn = torch.polar(torch.full_like(angles, size), angles)[:, None]
    number = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
    return torch.cat((number.real, number.imag), dim=-1).to(x.dtype)


def attention(
    x: torch.Tensor, state: State, prefix: str, config: dict[str, Any], theta: float
) -> torch.Tensor:
    """Dense causal self-attention of pairs 0..n-1 over the input ``[n, width]``."""
    n, head_dim = x.shape[0], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def project(name: str, count: int) -> torch.Tensor:
        y = x @ state[f"{prefix}.{name}_proj.weight"].T
        if f"{prefix}.{name}_proj.bias" in state:
            y = y + state[f"{prefix}.{name}_proj.bias"]
        return y.reshape(n, count, head_dim)

    def normed(name: str, y: torch.Tensor) -> torch.Tensor:
        weight = state.get(f"{prefix}.{name}_norm.weight")
        return y if weight is None else rms(y, weight, config["rms_norm_eps"])

    positions = torch.arange(n)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    q = rotate(normed("q", project("q", heads)), positions, theta, rope)
    k = rotate(normed("k", project("k", kv_heads)), positions, theta, rope)
    v = project("v", kv_heads)
    unseen = positions[:, None] < positions
    if config.get("sliding_window"):
        unseen |= positions[:, None] - positions >= config["sliding_window"]
    out = torch.empty_like(q)
    for head in range(heads):
        source = head // (heads // kv_heads)
        scores = q[:, head] @ k[:, source].T / math.sqrt(head_dim)
        scores = scores.masked_fill(unseen, -math.inf)
        out[:, head] = scores.softmax(-1) @ v[:, source]
    return out.reshape(n, -1) @ state[f"{prefix}.o_proj.weight"].T


def mlp(x: torch.Tensor, state: State, prefix: str) -> torch.Tensor:
    """down(silu(gate) * up)."""
    gate = x @ state[f"{prefix}.gate_proj.weight"].T
    up = x @ state[f"{prefix}.up_proj.weight"].T
    return (gate * torch.sigmoid(gate) * up) @ state[f"{prefix}.down_proj.weight"].T


class Eagle1:
    """x = fc([embed; f]); h = x + attn(x); h += mlp(rms(h)); logits = target head of h."""

    def __init__(self, state: State, config: dict[str, Any], target: State, theta: float) -> None:
        self.state, self.config, self.theta = state, config, theta
        self.embedding = state.get("embed_tokens.weight", target["model.embed_tokens.weight"])
        head = target.get("lm_head.weight", target["model.embed_tokens.weight"])
        self.head = state.get("lm_head.weight", head)

    def first_hidden(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def run(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = self.state
        x = torch.cat((self.embedding[tokens], hidden), -1) @ s["fc.weight"].T
        if "fc.bias" in s:
            x = x + s["fc.bias"]
        h = x + attention(x, s, "layers.0.self_attn", self.config, self.theta)
        normed = rms(h, s["layers.0.post_attention_layernorm.weight"], self.config["rms_norm_eps"])
        h = h + mlp(normed, s, "layers.0.mlp")
        return h @ self.head.T, h

    def target_id(self, draft_id: int) -> int:
        if "token_map" not in self.state:
            return draft_id
        return int(self.state["token_map"][draft_id])


class Eagle3:
    """Attention over [norm(embed); norm(g)], residual g; g = fc(aux) first, then its own output."""

    def __init__(self, state: State, config: dict[str, Any], target: State, theta: float) -> None:
        self.state, self.config, self.theta = state, config, theta
        self.embedding = state.get("embed_tokens.weight", target["model.embed_tokens.weight"])
        head = target.get("lm_head.weight", target["model.embed_tokens.weight"])
        self.head = state.get("lm_head.weight", head)

    def first_hidden(self, features: torch.Tensor) -> torch.Tensor:
        s, eps = self.state, self.config["rms_norm_eps"]
        if "fc.weight" not in s:
            return features
        if "input_norm.weight" in s:
            features = rms(features, s["input_norm.weight"], eps)
        new, old = "fc_norm.{}", ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
        names = [new.format(i) if f"{new.format(i)}.weight" in s else old[i] for i in range(3)]
        if f"{names[0]}.weight" in s:
            width = features.shape[-1] // 3
            parts = [
                rms(features[:, i * width : (i + 1) * width], s[f"{names[i]}.weight"], eps)
                for i in range(3)
            ]
            features = torch.cat(parts, -1)
        fused = features @ s["fc.weight"].T
        return fused + s["fc.bias"] if "fc.bias" in s else fused

    def run(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s, eps = self.state, self.config["rms_norm_eps"]
        e = rms(self.embedding[tokens], s["midlayer.input_layernorm.weight"], eps)
        g = rms(hidden, s["midlayer.hidden_norm.weight"], eps)
        residual = g if self.config.get("norm_before_residual") else hidden
        x = torch.cat((e, g), -1)
        h = residual + attention(x, s, "midlayer.self_attn", self.config, self.theta)
        normed = rms(h, s["midlayer.post_attention_layernorm.weight"], eps)
        h = h + mlp(normed, s, "midlayer.mlp")
        out = rms(h, s["norm.weight"], eps)
        return out @ self.head.T, out if self.config.get("norm_output") else h

    def target_id(self, draft_id: int) -> int:
        if "d2t" not in self.state:
            return draft_id
        return draft_id + int(self.state["d2t"][draft_id])


def draft_tokens(
    head: Eagle1 | Eagle3, tokens: torch.Tensor, features: torch.Tensor, k: int
) -> tuple[list[int], list[torch.Tensor]]:
    """k greedy drafts after the committed tokens t_0..t_n, given true features f_0..f_{n-1}.

    The pairs are (f_i, t_{i+1}) at positions i; each draft appends (own hidden, draft) behind them.

    Returns:
        Target ids, and the logits that each was taken from.
    """
    assert features.shape[0] == tokens.shape[0] - 1
    pair_tokens = tokens[1:].clone()
    hidden = head.first_hidden(features)
    drafts: list[int] = []
    logits_of: list[torch.Tensor] = []
    for _ in range(k):
        logits, feedback = head.run(pair_tokens, hidden)
        draft = head.target_id(int(logits[-1].argmax()))
        drafts.append(draft)
        logits_of.append(logits[-1])
        pair_tokens = torch.cat((pair_tokens, torch.tensor([draft])))
        hidden = torch.cat((hidden, feedback[-1:]))
    return drafts, logits_of

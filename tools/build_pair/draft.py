"""The drafts, straight-line: EAGLE-1 and EAGLE-3 heads, their training forward and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from tools.build_pair.model import MLP, Attention, RMSNorm, Shape, rope_tables

MAX_PASSES = 8
# The customary boundaries {2, L // 2, L - 3} leave three of eight blocks unseen: on a target this
# shallow the stream that leaves the last block tells the draft far more.
AUX = (2, 5, 8)
INTERMEDIATE = 1280  # of an EAGLE-3 draft's feed-forward


def attend(
    q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, number: Tensor
) -> Tensor:
    """Attention of index t over `keys[:t + 1]` and the first `number` of its own keys.

    q `[B, KV, G, T, D]`, scaled; keys, values `[B, KV, T, D]`; own ones `[B, KV, T, N, D]`. The
    shapes are those of every pass, so that a compiler sees one function.
    """
    T = q.shape[-2]
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ keys.unsqueeze(2).mT).float().masked_fill(future, float("-inf"))
    own = (q.unsqueeze(-2) * own_keys.unsqueeze(2)).float().sum(-1)
    unused = torch.arange(own.shape[-1], device=q.device) >= number
    own = own.masked_fill(unused, float("-inf"))
    top = torch.maximum(scores.amax(-1, keepdim=True), own.amax(-1, keepdim=True)).detach()
    first, later = (scores - top).exp(), (own - top).exp()
    total = first.sum(-1, keepdim=True) + later.sum(-1, keepdim=True)
    out = first.to(values.dtype) @ values.unsqueeze(2)
    out = out.float() + (later.unsqueeze(-1) * own_values.unsqueeze(2)).sum(-2)
    return (out / total).to(values.dtype)


class Middle(nn.Module):
    """The decoder layer of a draft; EAGLE-3 norms its two inputs, EAGLE-1 neither."""

    def __init__(self, shape: Shape, eagle3: bool) -> None:
        super().__init__()
        if eagle3:
            self.hidden_norm = RMSNorm(shape.hidden, eps=shape.eps)
            self.input_layernorm = RMSNorm(shape.hidden, eps=shape.eps)
        self.self_attn = Attention(shape, 2 * shape.hidden if eagle3 else shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden, eps=shape.eps)
        self.mlp = MLP(shape)


class Draft(nn.Module):
    """An EAGLE head. Its embedding is the target's; an EAGLE-1 head has the target's lm_head too.

    The hidden state it is fed is `fc` of the auxiliary features (EAGLE-3) or the target's final
    state (EAGLE-1) on the first pass, and its own output afterwards.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self,
        shape: Shape,
        embedding: Tensor,
        draft_vocab: int | None,
        aux: tuple[int, ...] = AUX,
        intermediate: int = INTERMEDIATE,
    ) -> None:
        super().__init__()
        self.eagle3 = draft_vocab is not None
        if self.eagle3:
            shape = replace(shape, intermediate=intermediate)
        self.shape = shape
        self.aux = tuple(min(i, shape.layers) for i in aux) if self.eagle3 else ()
        H = shape.hidden
        self.attend: Callable[..., Tensor] = attend
        self.embedding = [embedding]  # in a list: not a parameter of the draft
        self.midlayer = Middle(shape, self.eagle3)
        if draft_vocab is not None:
            self.fc = nn.Linear(len(aux) * H, H, bias=False)
            self.norm = RMSNorm(H, eps=shape.eps)
            self.lm_head = nn.Linear(H, draft_vocab, bias=False)
            self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(shape.vocab, dtype=torch.bool))
        else:
            self.fc = nn.Linear(2 * H, H, bias=True)

    def reset(self, ids: Tensor | None) -> None:
        """Initial weights; the head of an EAGLE-3 draft starts from the target's rows `ids`."""
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        if ids is not None:
            self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
            self.t2d[ids] = True
            self.lm_head.weight.data.copy_(self.embedding[0][ids])

    @property
    def ids(self) -> Tensor:
        """Target ids of the draft vocabulary."""
        if not self.eagle3:
            return torch.arange(self.shape.vocab, device=self.fc.weight.device)
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def first(self, features: Tensor) -> Tensor:
        """The hidden state of the first pass from the target's features."""
        return self.fc(features) if self.eagle3 else features

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the draft vocabulary."""
        if self.eagle3:
            return self.lm_head(self.norm(hidden))  # type: ignore[no-any-return]
        return functional.linear(hidden, self.embedding[0].to(hidden.dtype))

    def step(
        self, hidden: Tensor, tokens: Tensor, past: list[tuple[Tensor, Tensor]], offset: int
    ) -> Tensor:
        """Pass `offset` at all indices at once; index t stands at position t + offset.

        `past` holds keys and values of the passes before, and receives this pass's. Index t
        attends the first pass up to t, and of later passes its own index only: what a chain that
        starts at t would see.
        """
        layer, shape = self.midlayer, self.shape
        B, T = tokens.shape
        embedded = functional.embedding(tokens, self.embedding[0]).to(hidden.dtype)
        if self.eagle3:
            residual = hidden
            x = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], dim=-1)
        else:
            x = residual = self.fc(torch.cat([embedded, hidden], dim=-1))
        cos, sin = rope_tables(shape, torch.arange(T, device=tokens.device) + offset)
        q, k, v = layer.self_attn.project(x, cos.to(x.dtype), sin.to(x.dtype))
        past.append((k, v))
        q = q.view(B, shape.kv_heads, -1, T, shape.head_dim) * shape.head_dim**-0.5
        own = past[1:]
        none = [torch.zeros_like(k)] * (MAX_PASSES - 1 - len(own))
        own_keys = torch.stack([*(key for key, _ in own), *none], dim=-2)
        own_values = torch.stack([*(value for _, value in own), *none], dim=-2)
        number = torch.tensor(len(own), device=q.device)
        out = self.attend(q, *past[0], own_keys, own_values, number)
        out = out.reshape(B, -1, T, shape.head_dim).transpose(1, 2).reshape(B, T, -1)
        hidden = residual + layer.self_attn.o_proj(out)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))  # type: ignore[no-any-return]

    def chain(
        self, features: Tensor, given: Tensor, passes: int, choose: Callable[[Tensor, int], Tensor]
    ) -> list[Tensor]:
        """Draft tokens of `passes` passes, `[B, T]` each, for a chain that starts at every index.

        `given[:, t]` is the token after index t; `choose(logits, pass)` picks draft-vocabulary ids.
        """
        hidden, tokens, drafts = self.first(features), given, list[Tensor]()
        past: list[tuple[Tensor, Tensor]] = []
        for number in range(passes):
            hidden = self.step(hidden, tokens, past, number)
            tokens = self.ids[choose(self.logits(hidden), number)]
            drafts.append(tokens)
        return drafts


def save_draft(draft: Draft, folder: Path) -> None:
    """Write the official layout: `midlayer.*` for EAGLE-3, `layers.0.*` for EAGLE-1."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = draft.shape
    weights: dict[str, Tensor] = {}
    for name, tensor in draft.state_dict().items():
        if not draft.eagle3:
            name = name.replace("midlayer.", "layers.0.")
        kept = tensor.detach().cpu().contiguous()
        weights[name] = kept.bfloat16() if kept.is_floating_point() else kept
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if draft.eagle3 else "LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bias": not draft.eagle3,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_positions,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab,
    }
    if draft.eagle3:
        config["draft_vocab_size"] = len(draft.d2t)
        config["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(draft.aux),
        }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def load_draft(
    folder: Path, shape: Shape, embedding: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Draft:
    """Read a head that `save_draft` wrote."""
    weights = load_file(folder / "model.safetensors")
    vocab = len(weights["d2t"]) if "d2t" in weights else None
    config = json.loads((folder / "config.json").read_text())
    ids = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    draft = Draft(shape, embedding, vocab, tuple(ids or AUX), config["intermediate_size"])
    names = {name.replace("layers.0.", "midlayer."): t for name, t in weights.items()}
    draft.load_state_dict(names)
    return draft.to(embedding.device, dtype).requires_grad_(False).eval()

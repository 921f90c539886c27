"""Completions of the target in large batches, from a static cache and captured steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from tools.build_pair.model import Block, Target, rope_tables, rotate
from tools.build_pair.tokenizer import END_ID, EOS_ID, PAD_ID

SPAN = 64  # a captured step attends a multiple of this many positions


@dataclass
class Completions:
    """Prompts with their completions: `tokens [R, T]`, prompt lengths and total lengths `[R]`."""

    tokens: Tensor
    prompts: Tensor
    lengths: Tensor


class Sampler:
    """All rows stand at the same position: prompts are fed token by token, then it samples."""

    def __init__(self, model: Target, rows: int, length: int) -> None:
        self.model = model
        self.rows, self.length = rows, length
        shape, weight = model.shape, model.embed_tokens.weight
        device, dtype = weight.device, weight.dtype
        size = (shape.layers, rows, shape.kv_heads, length, shape.head_dim)
        self.keys = torch.zeros(size, device=device, dtype=dtype)
        self.values = torch.zeros(size, device=device, dtype=dtype)
        self.tokens = torch.full((rows, length), PAD_ID, device=device)
        self.prompts = torch.ones(rows, device=device, dtype=torch.long)
        self.heat = torch.ones(rows, device=device)
        self.done = torch.zeros(rows, device=device, dtype=torch.bool)
        self.position = torch.zeros(1, device=device, dtype=torch.long)
        self.cos, self.sin = rope_tables(shape, torch.arange(length, device=device))
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @torch.no_grad()
    def _step(self, span: int) -> None:
        model, shape, at = self.model, self.model.shape, self.position
        x = model.embed_tokens(self.tokens.index_select(1, at))  # [R, 1, H]
        cos = self.cos.index_select(0, at).to(x.dtype)
        sin = self.sin.index_select(0, at).to(x.dtype)
        hidden_keys = torch.arange(span, device=x.device) > at
        for index, module in enumerate(model.layers):
            layer = cast(Block, module)
            normed = layer.input_layernorm(x)
            attention = layer.self_attn
            q = attention.q_proj(normed).view(self.rows, shape.heads, 1, -1)
            k = attention.k_proj(normed).view(self.rows, shape.kv_heads, 1, -1)
            v = attention.v_proj(normed).view(self.rows, shape.kv_heads, 1, -1)
            self.keys[index].index_copy_(2, at, rotate(k, cos, sin))
            self.values[index].index_copy_(2, at, v)
            q = rotate(q, cos, sin).view(self.rows, shape.kv_heads, -1, shape.head_dim)
            scores = q @ self.keys[index, :, :, :span].mT * shape.head_dim**-0.5
            weights = scores.masked_fill(hidden_keys, float("-inf")).softmax(-1, torch.float32)
            out = weights.to(x.dtype) @ self.values[index, :, :, :span]
            x = x + attention.o_proj(out.view(self.rows, 1, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = model.head(model.norm(x[:, 0])).float()
        noise = torch.empty_like(logits).exponential_().log_()  # Gumbel noise, negated
        drawn = (logits - self.heat.unsqueeze(1) * noise).argmax(-1)
        after = at + 1
        # Past the last column the write below lands on it again, with the value it has.
        column = after.clamp(max=self.length - 1)
        given = self.tokens.index_select(1, column)[:, 0]
        chosen = torch.where(self.done, PAD_ID, drawn)
        chosen = torch.where(after < self.prompts, given, chosen)
        chosen = torch.where(after < self.length, chosen, given)
        self.tokens.index_copy_(1, column, chosen.unsqueeze(1))
        ended = (chosen == EOS_ID) | (chosen == END_ID)
        self.done |= ended & (after >= self.prompts)
        self.position += 1

    def _run(self, span: int) -> None:
        if self.keys.device.type != "cuda":
            self._step(span)
            return
        if span not in self.graphs:
            saved = [t.clone() for t in (self.tokens, self.done, self.position)]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step(span)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step(span)
            self.graphs[span] = graph
            for tensor, copy in zip((self.tokens, self.done, self.position), saved, strict=True):
                tensor.copy_(copy)
        self.graphs[span].replay()

    def sample(self, prompts: Tensor, lengths: Tensor, heat: Tensor) -> Completions:
        """Complete `prompts [R, <=T]` of `lengths [R]` at the row's temperature `heat [R]`."""
        self.tokens.fill_(PAD_ID)
        self.tokens[:, : prompts.shape[1]] = prompts
        self.prompts.copy_(lengths)
        self.heat.copy_(heat)
        self.done.zero_()
        self.position.zero_()
        for at in range(self.length - 1):
            self._run(min(self.length, (at // SPAN + 1) * SPAN))
            if at % 32 == 31 and bool(self.done.all()):
                break
        total = (self.tokens != PAD_ID).sum(1)
        return Completions(self.tokens.clone(), lengths.clone(), total)


def repeats(tokens: Tensor, prompts: Tensor, lengths: Tensor, n: int = 4) -> Tensor:
    """Where a completion's token n-gram ends that occurred in it before: `[R, T]` booleans."""
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    code = torch.zeros_like(tokens)
    for back in range(n):
        code = code * 8209 + tokens.roll(back, 1)
    inside = (columns >= prompts.unsqueeze(1) + n - 1) & (columns < lengths.unsqueeze(1))
    code = torch.where(inside, code, -1 - columns)
    same = code.unsqueeze(2) == code.unsqueeze(1)  # [R, T, T]
    return same.tril(-1).any(2) & inside

"""EAGLE-1 drafts, which are EAGLE-2's too (Li et al. 2024, arXiv 2401.15077, 2406.16858)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specgen.errors import ModelError
from specgen.models.attention import Attention, AttentionMetadata, KVCache
from specgen.models.config import DraftConfig, ModelConfig
from specgen.models.draft import DraftOverrides
from specgen.models.draft_head import (
    DraftHead,
    describe_rope,
    layer_notes,
    parse_draft_layer,
    parse_vocab_size,
)
from specgen.models.draft_layout import DraftSource
from specgen.models.layers import GatedMLP, Linear, RMSNorm
from specgen.models.target import TargetModel

if TYPE_CHECKING:
    from specgen.kernels import Kernels

__all__ = ["Eagle1Draft", "parse_eagle1_config"]


def parse_eagle1_config(
    source: DraftSource, target: ModelConfig, overrides: DraftOverrides
) -> DraftConfig:
    """Describe an EAGLE-1 head.

    Args:
        source: the head in the official layout's terms.
        target: the target it is to draft for.
        overrides: only ``rope_theta`` applies.

    Raises:
        ModelError: the head is malformed, unsupported or made for another target.
    """
    reader, names = source.reader, source.tensors or {}
    layer = parse_draft_layer(source, "layers.0", target, overrides)
    vocab_size = parse_vocab_size(reader, target)
    if layer["hidden_size"] != target.hidden_size:
        raise reader.error(
            "hidden_size",
            layer["hidden_size"],
            f"the target's ({target.hidden_size}) for an EAGLE-1 head",
            hint="the head was made for another target",
        )
    draft_vocab_size = _truncated_vocab_size(source, vocab_size)
    known = ("embed_tokens.weight", "lm_head.weight", "token_map")
    stored = {n.removesuffix(".weight") for n in known if n in names and n not in source.unused}
    if draft_vocab_size != vocab_size:
        # Dummy weights have every tensor; a real lm_head of the whole vocabulary is cut to the map.
        stored |= {"lm_head", "token_map"}
    drafted = (
        "" if draft_vocab_size == vocab_size else f"{draft_vocab_size} of {vocab_size} tokens, "
    )
    return DraftConfig(
        **layer,
        layout="eagle1",
        features="final",
        aux_layers=(),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        # Llama-3 heads declare "bias": false and store one all the same: the tensor decides.
        fc_bias=reader.flag("bias", True) if source.tensors is None else "fc.bias" in names,
        stored=frozenset(stored),
        notes=(
            f"EAGLE-1 head ({source.origin} layout), features behind the target's final norm, "
            f"{drafted}{describe_rope(layer)}",
            *layer_notes(source, layer),
        ),
    )


def _truncated_vocab_size(source: DraftSource, vocab_size: int) -> int:
    """Rows of the lm_head of a wrapped head, which may have a map of its own."""
    reader, tensors = source.reader, source.tensors
    if source.origin != "wrapped":
        return vocab_size
    size = reader.positive_int("truncated_vocab_size", vocab_size)
    if size >= vocab_size or tensors is None:
        return min(size, vocab_size)
    for name in ("token_map", "lm_head.weight"):
        if name not in tensors:
            raise ModelError(
                f'{reader.source}: tensor "{name}" is missing, but "truncated_vocab_size" ({size}) '
                f'is not "vocab_size" ({vocab_size})',
                hint="fetch the complete head: without it the head's tokens have no meaning",
            )
    return size


class Eagle1Draft(DraftHead):
    """One layer over ``fc([embed(t_{i+1}); f_i])``, f the target's hidden behind its final norm.

    The layer has no input norm and nothing follows it: the target's lm_head reads its output, which
    is also the next pass's feature.
    """

    def __init__(self, config: DraftConfig, target: TargetModel, kernels: Kernels) -> None:
        """Allocate uninitialised parameters beside the target's, in its dtype."""
        super().__init__(config, target, kernels)
        device, dtype = target.device, target.dtype
        size = config.hidden_size
        self.fc = Linear(2 * size, (size,), config.fc_bias, kernels, device=device, dtype=dtype)
        self.attention = Attention(
            config, kernels, window=config.sliding_window, device=device, dtype=dtype
        )
        self.post_attention_norm = RMSNorm(
            size, config.rms_norm_eps, kernels, device=device, dtype=dtype
        )
        self.mlp = GatedMLP(config, kernels, device=device, dtype=dtype)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The features themselves, ``[T, H]``."""
        return features

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: Sequence[KVCache],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`specgen.models.draft.DraftModel.forward`; both results are the same tensor."""
        x = self.fc(torch.cat((self.embed(input_ids), hidden), dim=-1))
        attended = self.attention(x, self.cos_sin, metadata, kv_caches[0])
        normed, residual = self.post_attention_norm.add(attended, metadata.at_queries(x))
        out = self.mlp(normed) + residual
        return out, out

    def write_cache(
        self,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: Sequence[KVCache],
    ) -> None:
        """See :meth:`specgen.models.draft.DraftModel.write_cache`."""
        x = self.fc(torch.cat((self.embed(input_ids), hidden), dim=-1))
        self.attention.write_entries(x, self.cos_sin, metadata, kv_caches[0])

    def slots(self) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the tensor to copy into."""
        return (
            self.fc.slots("fc")
            | self.attention.slots("layers.0.self_attn")
            | self.post_attention_norm.slots("layers.0.post_attention_layernorm")
            | self.mlp.slots("layers.0.mlp")
            | self.vocab_slots()
        )

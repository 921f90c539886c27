"""EAGLE-1 drafts, which are EAGLE-2's too (Li et al. 2024, arXiv 2401.15077, 2406.16858)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from specgen.models.attention import Attention, AttentionMetadata, KVCache
from specgen.models.config import ConfigReader, DraftConfig, ModelConfig
from specgen.models.decoder import Decoder
from specgen.models.draft import DraftOverrides
from specgen.models.draft_head import DraftHead, parse_draft_layer, parse_vocab_size
from specgen.models.layers import GatedMLP, Linear, RMSNorm

if TYPE_CHECKING:
    from specgen.kernels import Kernels
    from specgen.models.checkpoint import TensorInfo

__all__ = ["Eagle1Draft", "parse_eagle1_config"]


def parse_eagle1_config(
    reader: ConfigReader,
    tensors: Mapping[str, TensorInfo] | None,
    target: ModelConfig,
    overrides: DraftOverrides,
) -> DraftConfig:
    """Describe an official EAGLE-1 head.

    Args:
        reader: the head's configuration.
        tensors: its tensors, None for dummy weights.
        target: the target it is to draft for.
        overrides: only ``rope_theta`` applies.

    Raises:
        ModelError: the head is malformed, unsupported or made for another target.
    """
    layer = parse_draft_layer(reader, tensors, "layers.0", overrides)
    vocab_size = parse_vocab_size(reader, target)
    if layer["hidden_size"] != target.hidden_size:
        raise reader.error(
            "hidden_size",
            layer["hidden_size"],
            f"the target's ({target.hidden_size}) for an EAGLE-1 head",
            hint="the head was made for another target",
        )
    names = tensors or {}
    return DraftConfig(
        **layer,
        layout="eagle1",
        features="final",
        aux_layers=(),
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        target_hidden_size=target.hidden_size,
        # Llama-3 heads declare "bias": false and store one all the same: the tensor decides.
        fc_bias=reader.flag("bias", True) if tensors is None else "fc.bias" in names,
        stored=frozenset(n for n in ("embed_tokens", "lm_head") if f"{n}.weight" in names),
        notes=(f"EAGLE-1 head, rope theta {layer['rope'].theta:g}",),
    )


class Eagle1Draft(DraftHead):
    """One layer over ``fc([embed(t_{i+1}); f_i])``, f the target's hidden behind its final norm.

    The layer has no input norm and nothing follows it: the target's lm_head reads its output, which
    is also the next pass's feature.
    """

    def __init__(self, config: DraftConfig, target: Decoder, kernels: Kernels) -> None:
        """Allocate uninitialised parameters beside the target's, in its dtype."""
        super().__init__(config, target)
        device, dtype = target.device, target.dtype
        size = config.hidden_size
        self.fc = Linear(2 * size, (size,), config.fc_bias, device=device, dtype=dtype)
        self.attention = Attention(config, kernels, device=device, dtype=dtype)
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
        normed, residual = self.post_attention_norm.add(attended, x)
        out = self.mlp(normed) + residual
        return out, out

    def slots(self) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the tensor to copy into."""
        return (
            self.fc.slots("fc")
            | self.attention.slots("layers.0.self_attn")
            | self.post_attention_norm.slots("layers.0.post_attention_layernorm")
            | self.mlp.slots("layers.0.mlp")
            | self.vocab_slots()
        )

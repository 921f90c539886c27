"""What EAGLE heads have in common: the layer's configuration, embedding, lm_head, rope table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from specgen.errors import ModelError
from specgen.models.config import (
    ConfigReader,
    DraftConfig,
    ModelConfig,
    parse_block_sizes,
    parse_rope,
    refuse_quantization,
)
from specgen.models.decoder import Decoder
from specgen.models.draft import DraftOverrides
from specgen.models.layers import empty_parameter
from specgen.models.rotary import build_cos_sin

if TYPE_CHECKING:
    from specgen.models.checkpoint import TensorInfo

__all__ = ["DraftHead", "parse_draft_layer", "parse_vocab_size"]


def parse_draft_layer(
    reader: ConfigReader,
    tensors: Mapping[str, TensorInfo] | None,
    layer: str,
    overrides: DraftOverrides,
) -> dict[str, Any]:
    """The fields of :class:`DraftConfig` that describe the one layer: sizes, biases, rope.

    A bias exists where it is stored or where the configuration asks for it; in the second case the
    strict loading finds it missing.

    Raises:
        ModelError: a key is malformed or unsupported, or there is more than one layer.
    """
    refuse_quantization(reader)
    names = tensors or {}
    _check_one_layer(reader, names)
    sizes = parse_block_sizes(reader)
    max_positions = reader.positive_int("max_position_embeddings", 2048)
    return {
        **sizes,
        "qkv_bias": reader.flag("qkv_bias", reader.flag("attention_bias"))
        or f"{layer}.self_attn.q_proj.bias" in names,
        "o_bias": f"{layer}.self_attn.o_proj.bias" in names,
        "mlp_bias": reader.flag("mlp_bias") or f"{layer}.mlp.down_proj.bias" in names,
        "max_position_embeddings": max_positions,
        "rope": parse_rope(reader, max_positions, overrides.rope_theta),
    }


def parse_vocab_size(reader: ConfigReader, target: ModelConfig) -> int:
    """The vocabulary that the head reads, which must be the target's."""
    vocab_size = reader.positive_int("vocab_size", target.vocab_size)
    if vocab_size != target.vocab_size:
        raise reader.error(
            "vocab_size",
            vocab_size,
            f"the target's ({target.vocab_size})",
            hint="the head was made for another target",
        )
    return vocab_size


def _check_one_layer(reader: ConfigReader, tensors: Mapping[str, TensorInfo]) -> None:
    hint = "only heads of one layer are supported"
    declared = reader.positive_int("num_hidden_layers", 1)
    if declared != 1:
        raise reader.error("num_hidden_layers", declared, "1 for an EAGLE head", hint=hint)
    for name, info in tensors.items():
        stack, _, rest = name.partition(".")
        index = rest.partition(".")[0]
        if stack in ("layers", "midlayer") and index.isdigit() and int(index) > 0:
            raise ModelError(f'{info.file}: tensor "{name}" belongs to a second layer', hint=hint)


class DraftHead(nn.Module):
    """Embedding, lm_head and rope table of a head, its own or the target's.

    Shared tensors are kept detached: only what the head owns is a parameter of it.
    """

    def __init__(self, config: DraftConfig, target: Decoder) -> None:
        """Allocate uninitialised parameters beside the target's, in its dtype."""
        super().__init__()
        self.config = config
        self.features = config.features
        self.aux_layers = config.aux_layers
        self.num_layers = config.num_layers
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.target_ids: torch.Tensor | None = None
        self.draft_ids: torch.Tensor | None = None
        device, dtype = target.device, target.dtype
        self.embed_weight: torch.Tensor = (
            empty_parameter(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
            if "embed_tokens" in config.stored
            else target.embed_weight.detach()
        )
        self.lm_head_weight: torch.Tensor = (
            empty_parameter(config.draft_vocab_size, config.hidden_size, device=device, dtype=dtype)
            if "lm_head" in config.stored
            else target.lm_head_weight.detach()
        )
        # A head's own length is one of training: its table covers the target's. One table serves
        # both where the ropes agree.
        num_positions = target.cos_sin.shape[0]
        shared = config.rope == target.config.rope and config.head_dim == target.head_dim
        self.cos_sin = (
            target.cos_sin
            if shared
            else build_cos_sin(config.rope, config.head_dim, num_positions, device)
        )

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of target ids, ``[T] -> [T, H]``."""
        return functional.embedding(input_ids, self.embed_weight)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary, ``[R, H] -> [R, Vd]``."""
        return functional.linear(hidden, self.lm_head_weight)

    def share_embedding(self, target: Decoder) -> None:
        """Drop the head's own embedding and read the target's."""
        del self.embed_weight
        self.embed_weight = target.embed_weight.detach()

    def vocab_slots(self) -> dict[str, torch.Tensor]:
        """Destinations of the embedding and lm_head that the checkpoint stores."""
        slots: dict[str, torch.Tensor] = {}
        if "embed_tokens" in self.config.stored:
            slots["embed_tokens.weight"] = self.embed_weight
        if "lm_head" in self.config.stored:
            slots["lm_head.weight"] = self.lm_head_weight
        return slots

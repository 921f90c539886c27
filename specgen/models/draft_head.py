"""What EAGLE heads have in common: the layer's configuration, embedding, lm_head, rope table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from specgen.errors import ModelError
from specgen.models.config import (
    ConfigReader,
    DraftConfig,
    ModelConfig,
    RopeConfig,
    parse_block_sizes,
    parse_rope,
    refuse_quantization,
)
from specgen.models.draft import DraftOverrides
from specgen.models.draft_layout import DraftSource
from specgen.models.layers import empty_parameter
from specgen.models.rotary import TABLE_MARGIN, build_cos_sin
from specgen.models.target import TargetModel

if TYPE_CHECKING:
    from specgen.kernels import Kernels

__all__ = ["DraftHead", "describe_rope", "layer_notes", "parse_draft_layer", "parse_vocab_size"]


def parse_draft_layer(
    source: DraftSource, layer: str, target: ModelConfig, overrides: DraftOverrides
) -> dict[str, Any]:
    """The fields of :class:`DraftConfig` that describe the one layer: sizes, biases, norms, rope.

    A bias or a norm exists where it is stored or where the configuration asks for it; in the second
    case the strict loading finds it missing.

    Args:
        source: the head in the official layout's terms.
        layer: official name of its layer.
        target: the target, whose length bounds a window that matters.
        overrides: of which ``rope_theta`` applies.

    Raises:
        ModelError: a key is malformed or unsupported, or there is more than one layer.
    """
    reader, names = source.reader, source.tensors or {}
    refuse_quantization(reader)
    _check_one_layer(source)
    sizes = parse_block_sizes(reader)
    max_positions = reader.positive_int("max_position_embeddings", 2048)
    rope = parse_rope(reader, max_positions, overrides.rope_theta, head_dim=sizes["head_dim"])
    speculators_qwen3 = source.origin == "speculators" and reader.get("model_type") == "qwen3"
    return {
        **sizes,
        "origin": source.origin,
        "qkv_bias": reader.flag("qkv_bias", reader.flag("attention_bias"))
        or f"{layer}.self_attn.q_proj.bias" in names,
        "o_bias": f"{layer}.self_attn.o_proj.bias" in names,
        "mlp_bias": reader.flag("mlp_bias") or f"{layer}.mlp.down_proj.bias" in names,
        "qk_norm": speculators_qwen3 or f"{layer}.self_attn.q_norm.weight" in names,
        "max_position_embeddings": max_positions,
        "position_limit": _position_limit(rope, max_positions),
        "rope": rope,
        "sliding_window": _sliding_window(reader, target),
        "warnings": _warnings(source, target),
    }


def describe_rope(layer: dict[str, Any]) -> str:
    """The rope of a parsed layer, in words."""
    rope: RopeConfig = layer["rope"]
    kind = "" if rope.rope_type == "default" else f" ({rope.rope_type})"
    return f"rope theta {rope.theta:g}{kind}"


def layer_notes(source: DraftSource, layer: dict[str, Any]) -> tuple[str, ...]:
    """What a user should know of a head's origin and its layer's reach, one sentence each."""
    notes = [] if source.made_for is None else [f"the head says that it is for {source.made_for}"]
    if layer["position_limit"] is not None:
        notes.append(
            f"the head's {layer['rope'].rope_type} rope ends at position "
            f"{layer['position_limit']}: rows go on without a draft from there"
        )
    if layer["sliding_window"]:
        notes.append(f"the head attends to the last {layer['sliding_window']} tokens")
    return tuple(notes)


def _warnings(source: DraftSource, target: ModelConfig) -> tuple[str, ...]:
    """A head that names a target of another architecture; wrappers of one model count as one."""
    made_for = source.made_for_architecture
    if made_for is None or made_for.split("For")[0] == target.architecture.split("For")[0]:
        return ()
    return (
        f"{source.reader.source}: the head says that it is for a {made_for}, the target is a "
        f"{target.architecture}: a head of another target costs time and gains nothing",
    )


def _position_limit(rope: RopeConfig, max_positions: int) -> int | None:
    """Positions that a rope made for a length reaches; None where it goes on past training.

    A dynamic rope ends where its base would begin to grow: a head was trained below.
    """
    if rope.rope_type == "yarn":
        return rope.reach(max_positions)
    return max_positions if rope.rope_type in ("dynamic", "longrope") else None


def _sliding_window(reader: ConfigReader, target: ModelConfig) -> int:
    """Keys that a token of the head sees, 0: all (also where the window is as long as the target).

    Qwen configurations have a switch, which is off where it is absent.
    """
    layer_types = reader.get("layer_types")
    if reader.get("sliding_window") is None:
        return 0
    has_switch = str(reader.get("model_type") or "").startswith("qwen") and layer_types is None
    if not reader.flag("use_sliding_window", not has_switch):
        return 0
    if layer_types is not None:
        # A list copied from a target names every layer of it: of use where all are of one kind.
        kinds = set(map(str, layer_types)) if isinstance(layer_types, list) else set()
        if len(kinds) != 1 or not kinds <= {"full_attention", "sliding_attention"}:
            raise reader.error(
                "layer_types", layer_types, '["full_attention"] or ["sliding_attention"]'
            )
        if "full_attention" in kinds:
            return 0
    window = reader.positive_int("sliding_window")
    return 0 if window >= target.longest_context else window


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


def _check_one_layer(source: DraftSource) -> None:
    hint = "only heads of one layer are supported"
    declared = source.reader.positive_int("num_hidden_layers", 1)
    if declared != 1:
        raise source.reader.error("num_hidden_layers", declared, "1 for an EAGLE head", hint=hint)
    for name, info in (source.tensors or {}).items():
        stack, _, rest = name.partition(".")
        index = rest.partition(".")[0]
        if stack in ("layers", "midlayer") and index.isdigit() and int(index) > 0:
            raise ModelError(
                f'{info.file}: tensor "{source.stored_name(name)}" belongs to a second layer',
                hint=hint,
            )


class DraftHead(nn.Module):
    """Embedding, lm_head and rope table of a head, its own or the target's.

    Shared tensors are kept detached: only what the head owns is a parameter of it.
    """

    def __init__(self, config: DraftConfig, target: TargetModel, kernels: Kernels) -> None:
        """Allocate uninitialised parameters beside the target's, in its dtype."""
        super().__init__()
        self.config = config
        self._linear = kernels.linear
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
        self.cos_sin = _rope_table(config, target)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of target ids, ``[T] -> [T, H]``; a negative one counts as 0."""
        return functional.embedding(input_ids.clamp_min(0), self.embed_weight)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary, ``[R, H] -> [R, Vd]``."""
        logits: torch.Tensor = self._linear.linear(hidden, self.lm_head_weight)
        return logits

    def share_embedding(self, target: TargetModel) -> None:
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


def _rope_table(config: DraftConfig, target: TargetModel) -> torch.Tensor:
    """A rope table as long as the target's, which is the target's own where the ropes agree.

    A head's length is one of training, and most ropes go on past it. Where one ends, nothing is
    drafted from there on, and its rows only have to exist.
    """
    num_positions, device = target.cos_sin.shape[0], target.device
    limit = config.position_limit
    if limit is None:
        if config.rope == target.config.rope and config.head_dim == target.head_dim:
            return target.cos_sin
        return build_cos_sin(config.rope, config.head_dim, num_positions, device)
    num_reached = min(num_positions, limit + TABLE_MARGIN)
    table = build_cos_sin(config.rope, config.head_dim, num_reached, device)
    return torch.cat((table, table.new_zeros(num_positions - num_reached, config.head_dim)))

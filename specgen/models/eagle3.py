"""EAGLE-3 drafts (Li et al. 2025, arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from specgen.errors import ModelError
from specgen.models.attention import Attention, AttentionMetadata, KVCache
from specgen.models.config import ConfigReader, DraftConfig, ModelConfig
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
    from specgen.models.checkpoint import TensorInfo

__all__ = ["Eagle3Draft", "parse_eagle3_config"]

IDS_KEY = "eagle_aux_hidden_state_layer_ids"


def parse_eagle3_config(
    source: DraftSource, target: ModelConfig, overrides: DraftOverrides
) -> DraftConfig:
    """Describe an EAGLE-3 head.

    Args:
        source: the head in the official layout's terms.
        target: the target it is to draft for.
        overrides: facts that replace the configuration's.

    Raises:
        ModelError: the head is malformed, unsupported, ambiguous or made for another target.
    """
    reader, tensors = source.reader, source.tensors
    layer = parse_draft_layer(source, "midlayer", target, overrides)
    vocab_size = parse_vocab_size(reader, target)
    target_size = reader.positive_int("target_hidden_size", target.hidden_size)
    if target_size != target.hidden_size:
        raise reader.error(
            "target_hidden_size",
            target_size,
            f"the target's hidden size ({target.hidden_size})",
            hint="the head was made for another target",
        )
    use_aux = _setting(reader, "use_aux_hidden_state") is not False
    boundaries, origin = _boundaries(reader, target, overrides) if use_aux else ((), "")
    draft_vocab_size = reader.positive_int("draft_vocab_size", _rows(tensors, vocab_size))
    size = layer["hidden_size"]
    if tensors is None:
        stored = {"lm_head"} | ({"embed_tokens"} if size != target_size else set())
        stored |= {"d2t"} if draft_vocab_size != vocab_size else set()
    else:
        known = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
        stored = {name.removesuffix(".weight") for name in known if name in tensors}
        if use_aux:
            _check_fc(reader, tensors, size, target_size, boundaries, origin)
        _check_stored(reader, stored, size, target_size, vocab_size, draft_vocab_size)
    if not use_aux and size != target_size:
        raise reader.error(
            "hidden_size", size, f"the target's ({target_size}) without auxiliary states"
        )
    fc_norms = _fc_norms(reader, tensors or {}, len(boundaries)) if use_aux else ()
    norm_output, feedback = _norm_output(source, fc_norms, overrides)
    before_residual, residual = _norm_before_residual(source, overrides)
    features = (
        f"features entering target blocks {list(boundaries)} ({origin})"
        if use_aux
        else "features behind the target's final norm"
    )
    return DraftConfig(
        **layer,
        layout="eagle3",
        features="aux" if use_aux else "final",
        aux_layers=boundaries,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target_size,
        has_fc=use_aux,
        fc_bias=use_aux and (reader.flag("bias") or "fc.bias" in (tensors or {})),
        fc_norms=fc_norms,
        norm_before_residual=before_residual,
        norm_output=norm_output,
        stored=frozenset(stored),
        notes=(
            f"EAGLE-3 head ({source.origin} layout), {features}, {draft_vocab_size} of "
            f"{vocab_size} tokens drafted, {describe_rope(layer)}{feedback}{residual}",
            *layer_notes(source, layer),
        ),
    )


def _setting(reader: ConfigReader, key: str) -> bool | None:
    """A boolean that may stand at the top or inside ``eagle_config``; both must agree."""
    nested = reader.section("eagle_config")
    values = {owner.flag(key) for owner in (reader, nested) if owner.get(key) is not None}
    if len(values) > 1:
        raise ModelError(f'{reader.source}: "{key}" and "eagle_config" / "{key}" disagree')
    return values.pop() if values else None


def _rows(tensors: Mapping[str, TensorInfo] | None, vocab_size: int) -> int:
    """The draft vocabulary where the configuration is silent: what the lm_head has rows for."""
    head = (tensors or {}).get("lm_head.weight")
    return head.shape[0] if head is not None and head.shape else vocab_size


def _boundaries(
    reader: ConfigReader, target: ModelConfig, overrides: DraftOverrides
) -> tuple[tuple[int, ...], str]:
    """Ascending boundaries of the target whose streams are the features, and their origin."""
    num_layers = target.num_layers
    top = reader.ids(IDS_KEY)
    nested = reader.section("eagle_config").ids(IDS_KEY)
    origin = f'"{IDS_KEY}"'
    if overrides.aux_layers is not None:
        ids, origin = overrides.aux_layers, "override"
    elif nested:
        # Both conventions are in use: outputs of blocks, whose first is block 1, and boundaries.
        ids = tuple(i + 1 for i in nested) if min(nested) == 1 else nested
        origin += " read as block outputs" if min(nested) == 1 else " read as boundaries"
        if top and sorted(top) != sorted(ids):
            raise ModelError(
                f'{reader.source}: "{IDS_KEY}" is {list(top)} at the top but {list(nested)} inside '
                f'"eagle_config", which means boundaries {sorted(ids)}',
                hint="remove the wrong one, or give the boundaries with --draft-aux-layers",
            )
    elif top:
        ids = top
    else:
        ids, origin = (2, num_layers // 2, num_layers - 3), "default"
    boundaries = tuple(sorted(ids))
    good = all(0 <= boundary <= num_layers for boundary in boundaries)
    if not good or len(set(boundaries)) != len(boundaries):
        name_others = f"name {len(boundaries)} from 0 to {num_layers} with --draft-aux-layers"
        hints = {
            "default": f"a target of {num_layers} layers has no usual ones: {name_others}",
            "override": f"{name_others}, or leave it out",
        }
        raise ModelError(
            f"{reader.source}: auxiliary boundaries {list(boundaries)} ({origin}) must be distinct "
            f"and within 0..{num_layers}, the target's layers",
            hint=hints.get(origin, f"the head was made for another target, or {name_others}"),
        )
    declared = reader.positive_int("num_aux_hidden_states", len(boundaries))
    if declared != len(boundaries):
        raise reader.error(
            "num_aux_hidden_states", declared, f"the number of ids ({len(boundaries)})"
        )
    return boundaries, origin


def _check_fc(
    reader: ConfigReader,
    tensors: Mapping[str, TensorInfo],
    size: int,
    target_size: int,
    boundaries: tuple[int, ...],
    origin: str,
) -> None:
    """Name a head of another target by its ``fc`` before any other shape is looked at."""
    fc = tensors.get("fc.weight")
    expected = (size, len(boundaries) * target_size)
    if fc is not None and fc.shape != expected:
        raise ModelError(
            f'{fc.file}: tensor "fc.weight" has shape {list(fc.shape)}, expected {list(expected)}: '
            f"{len(boundaries)} auxiliary states of the target's hidden size {target_size}",
            hint="the head was made for another target"
            if origin != "override"
            else "--draft-aux-layers names another number of states than the head takes",
        )


def _check_stored(
    reader: ConfigReader,
    stored: set[str],
    size: int,
    target_size: int,
    vocab_size: int,
    draft_vocab_size: int,
) -> None:
    if size != target_size and "embed_tokens" not in stored:
        raise ModelError(
            f'{reader.source}: tensor "embed_tokens.weight" is missing, and the target\'s '
            f"embedding has width {target_size}, not {size}",
            hint="a head of another hidden size than its target's must store its embedding",
        )
    if draft_vocab_size != vocab_size and "d2t" not in stored:
        raise ModelError(
            f'{reader.source}: tensor "d2t" is missing, but "draft_vocab_size" '
            f'({draft_vocab_size}) is not "vocab_size" ({vocab_size})',
            hint="fetch the complete head: without the map its tokens have no meaning",
        )
    if "lm_head" not in stored and (draft_vocab_size != vocab_size or size != target_size):
        raise ModelError(
            f'{reader.source}: tensor "lm_head.weight" is missing, and the target\'s has shape '
            f"{[vocab_size, target_size]}, not {[draft_vocab_size, size]}"
        )


def _fc_norms(
    reader: ConfigReader, tensors: Mapping[str, TensorInfo], num_aux: int
) -> tuple[str, ...]:
    """Names of the norms in front of ``fc``."""
    whole, chunks = bool(_setting(reader, "norm_before_fc")), bool(_setting(reader, "fc_norm"))
    if whole and chunks:
        raise ModelError(f'{reader.source}: "norm_before_fc" and "fc_norm" exclude one another')
    if whole:
        return ("input_norm",)
    if not chunks:
        return ()
    older = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
    if num_aux == len(older) and f"{older[0]}.weight" in tensors:
        return older
    return tuple(f"fc_norm.{i}" for i in range(num_aux))


def _norm_output(
    source: DraftSource, fc_norms: tuple[str, ...], overrides: DraftOverrides
) -> tuple[bool, str]:
    """Whether later passes are fed the normed state, and a remark on it."""
    if overrides.norm_output is not None:
        kind = "normed" if overrides.norm_output else "raw"
        return overrides.norm_output, f", {kind} feedback (override)"
    declared = bool(_setting(source.reader, "norm_output"))
    if declared and source.origin == "official" and len(fc_norms) < 2:
        # One trainer wrote its default, true, for heads that feed back the state before the norm.
        raise ModelError(
            f'{source.reader.source}: "norm_output" is true, which heads of either kind say: '
            "trained on their normed or on their raw output",
            hint="give --draft-norm-output false for a head that SpecForge trained before "
            "September 2026, true for one whose later passes take the normed state",
        )
    return declared, ", normed feedback" if declared else ""


def _norm_before_residual(source: DraftSource, overrides: DraftOverrides) -> tuple[bool, str]:
    """Whether the residual is the normed state, and a remark on it."""
    declared = _setting(source.reader, "norm_before_residual")
    if overrides.norm_before_residual is not None:
        kind = "normed" if overrides.norm_before_residual else "raw"
        return overrides.norm_before_residual, f", {kind} residual (override)"
    if declared is None and not source.defaults_are_known:
        raise ModelError(
            f'{source.reader.source}: "norm_before_residual" is missing, and readers of the '
            "speculators layout take it for true or for false",
            hint="give --draft-norm-before-residual true or false: the wrong one accepts less",
        )
    return bool(declared), ", normed residual" if declared else ""


class Eagle3Draft(DraftHead):
    """One layer over ``[norm(embed(t_{i+1})); norm(g_i)]`` with g fused from several target layers.

    ``g = fc(features)`` on the first pass; later passes take the layer's own output (before the
    final norm, unless ``norm_output``) and skip ``fc``.
    """

    features: Literal["aux", "final"]

    def __init__(self, config: DraftConfig, target: TargetModel, kernels: Kernels) -> None:
        """Allocate uninitialised parameters beside the target's, in its dtype."""
        super().__init__(config, target, kernels)
        self._pairs = kernels.pairs
        size = config.hidden_size
        options: dict[str, Any] = {"device": target.device, "dtype": target.dtype}

        def norm(width: int) -> RMSNorm:
            return RMSNorm(width, config.rms_norm_eps, kernels, **options)

        fused_size = len(config.aux_layers) * config.target_hidden_size
        self.fc = None
        if config.has_fc:
            self.fc = Linear(fused_size, (size,), config.fc_bias, kernels, **options)
        chunk_size = fused_size // max(1, len(config.fc_norms))
        self.fc_norms = nn.ModuleList(norm(chunk_size) for _ in config.fc_norms)
        self.input_norm = norm(size)
        self.hidden_norm = norm(size)
        self.attention = Attention(
            config, kernels, input_size=2 * size, window=config.sliding_window, **options
        )
        self.post_attention_norm = norm(size)
        self.mlp = GatedMLP(config, kernels, **options)
        self.norm = norm(size)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """``[T, A*Ht] -> [T, H]``; without auxiliary states the features themselves."""
        if self.fc is None:
            return features
        if len(self.fc_norms) == 1:
            features = self.fc_norms[0](features)
        elif len(self.fc_norms) > 1:
            chunks = features.chunk(len(self.fc_norms), dim=-1)
            normed = [
                norm(chunk.contiguous()) for norm, chunk in zip(self.fc_norms, chunks, strict=True)
            ]
            features = torch.cat(normed, dim=-1)
        fused: torch.Tensor = self.fc(features)
        return fused

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: Sequence[KVCache],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`specgen.models.draft.DraftModel.forward`."""
        x = self._layer_input(input_ids, hidden)
        residual = x[:, hidden.shape[1] :] if self.config.norm_before_residual else hidden
        attended = self.attention(x, self.cos_sin, metadata, kv_caches[0])
        residual = metadata.at_queries(residual)
        normed, residual = self.post_attention_norm.add(attended, residual)
        out, raw = self.norm.add(self.mlp.parts(normed), residual)
        return out, out if self.config.norm_output else raw

    def write_cache(
        self,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: Sequence[KVCache],
    ) -> None:
        """See :meth:`specgen.models.draft.DraftModel.write_cache`."""
        x = self._layer_input(input_ids, hidden)
        self.attention.write_entries(x, self.cos_sin, metadata, kv_caches[0])

    def _layer_input(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Normed embeddings and normed hidden states, ``[T, 2H]``."""
        pairs: torch.Tensor = self._pairs.norm_pairs(
            input_ids,
            self.embed_weight,
            self.input_norm.weight,
            hidden,
            self.hidden_norm.weight,
            self.hidden_norm.eps,
        )
        return pairs

    def slots(self) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the tensor to copy into."""
        slots = (
            self.input_norm.slots("midlayer.input_layernorm")
            | self.hidden_norm.slots("midlayer.hidden_norm")
            | self.attention.slots("midlayer.self_attn")
            | self.post_attention_norm.slots("midlayer.post_attention_layernorm")
            | self.mlp.slots("midlayer.mlp")
            | self.norm.slots("norm")
            | self.vocab_slots()
        )
        if self.fc is not None:
            slots |= self.fc.slots("fc")
        for name, norm in zip(self.config.fc_norms, self.fc_norms, strict=True):
            assert isinstance(norm, RMSNorm)
            slots |= norm.slots(name)
        return slots

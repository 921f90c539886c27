"""Our paged attention as an attention function of transformers.

transformers lets a function be registered under a name and calls it from every family that follows
its attention interface. The function finds what it needs (the caches and rows of the pass) in a
:class:`PagedPass` that is attached to the modules of one model, so that nothing is global but the
name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specgen.errors import ModelError
from specgen.models.attention import AttentionMetadata, KVCache, attend

if TYPE_CHECKING:
    from specgen.kernels import Kernels

__all__ = ["ATTENTION_NAME", "PROBE_NAME", "AttentionCall", "PagedPass", "register_attention"]

ATTENTION_NAME = "specgen_paged"
PROBE_NAME = "specgen_paged_probe"
"""The same, and masks are asked for: transformers makes none for a name without a mask function."""
_HOLDER = "specgen_pass"


@dataclass(frozen=True)
class AttentionCall:
    """What one layer asked for in a pass."""

    layer: int
    module: nn.Module
    num_kv_heads: int
    head_dim: int
    window: int
    softcap: float


@dataclass
class PagedPass:
    """The pass that a model is in: its rows, its caches, and the calls of its layers.

    ``name`` is what errors call the model, ``reason`` why our own decoder does not run it.
    """

    name: str
    kernels: Kernels
    reason: str = ""
    metadata: AttentionMetadata | None = None
    kv_caches: Sequence[KVCache] | None = None
    calls: list[AttentionCall] = field(default_factory=list)
    mask_windows: set[int] = field(default_factory=set)
    """Windows for which the model wanted a mask."""

    def attach(self, model: Any) -> None:
        """Let every module of the model, and its configuration, find this pass."""
        for module in model.modules():
            setattr(module, _HOLDER, self)
        setattr(model.config, _HOLDER, self)

    def refuse(self, what: str) -> ModelError:
        """The error for a model that needs something we do not have."""
        return ModelError(
            f"{self.name}: {what}, which is not supported for targets run through transformers",
            hint="use a checkpoint of another family"
            + (f" ({self.reason})" if self.reason else ""),
        )

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        """Write keys and values ``[1, Hkv, T, D]``, attend with queries ``[1, Hq, T, D]``.

        Of tensors without values, the call is kept and nothing done.

        Returns:
            ``[1, T, Hq, D]``.
        """
        layer = module.layer_idx
        num_heads, num_tokens, head_dim = query.shape[1:]
        self.calls.append(AttentionCall(layer, module, key.shape[1], head_dim, window, softcap))
        if key.shape[3] != head_dim or value.shape != key.shape:
            raise self.refuse("keys and values have heads of different sizes (such as MLA's)")
        if query.is_meta:
            return query.new_empty((1, num_tokens, num_heads, head_dim))
        metadata = self.metadata
        assert metadata is not None, "the model ran outside of a pass"
        assert self.kv_caches is not None
        k_cache, v_cache = self.kv_caches[layer]
        if k_cache.shape[2:] != (key.shape[1], head_dim):
            raise self.refuse("key and value heads differ between layers")
        _write(key[0], k_cache, metadata.slot_mapping)
        _write(value[0], v_cache, metadata.slot_mapping)
        q = query[0].transpose(0, 1).contiguous()  # [T, Hq, D]
        out = attend(
            self.kernels.attention,
            q,
            (k_cache, v_cache),
            metadata,
            scale=head_dim**-0.5 if scale is None else scale,
            window=window,
            softcap=softcap,
        )
        return out.reshape(1, -1, num_heads, head_dim)


def _write(heads: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write ``[Hkv, T, D]`` to the tokens' slots; tokens without one go to the spare last slot."""
    num_slots = cache.shape[0] * cache.shape[1]
    slots = torch.where(slot_mapping < 0, num_slots - 1, slot_mapping)
    rows = heads.transpose(0, 1).to(cache.dtype)
    cache.view(num_slots, *cache.shape[2:]).index_copy_(0, slots, rows)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function, with the signature that transformers calls."""
    held: PagedPass = getattr(module, _HOLDER)
    if attention_mask is not None:
        raise held.refuse("it makes an attention mask of its own")
    if options.get("s_aux") is not None:
        raise held.refuse("it has attention sinks")
    if options.get("position_bias") is not None:
        raise held.refuse("it adds a bias to the scores")
    out = held.attend(module, query, key, value, scaling, sliding_window or 0, softcap or 0.0)
    return out, None


def _mask(*_: Any, config: Any, local_size: int | None = None, **__: Any) -> None:
    """The mask function of a probe: makes none, but keeps which windows were asked for."""
    held: PagedPass | None = getattr(config, _HOLDER, None)
    if held is not None and local_size is not None:
        held.mask_windows.add(local_size)


def register_attention() -> None:
    """Make the attention function known to transformers, under its two names."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionInterface.register(PROBE_NAME, _attention)
    AttentionMaskInterface.register(PROBE_NAME, _mask)

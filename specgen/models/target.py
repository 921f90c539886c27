"""What every target offers, native or run through transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from specgen.models.attention import AttentionMetadata, KVCache
from specgen.models.config import ModelConfig

__all__ = ["CachedModel", "TargetModel"]


class CachedModel(Protocol):
    """What a cache must know of a model, target or draft."""

    @property
    def num_layers(self) -> int:
        """Layers with a cache."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of every layer."""
        ...

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        ...


class TargetModel(CachedModel, Protocol):
    """A causal decoder over paged caches, with the features that drafts are fed."""

    @property
    def config(self) -> ModelConfig:
        """Facts of its configuration."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Ascending boundaries ``0..num_layers`` whose streams :meth:`forward` returns."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether a pass can be captured in a CUDA graph."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how the target is run, one sentence each."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters, features and logits."""
        ...

    @property
    def embed_weight(self) -> torch.Tensor:
        """``[V, H]``, which drafts may share."""
        ...

    @property
    def lm_head_weight(self) -> torch.Tensor:
        """``[V, H]``, which drafts may share."""
        ...

    @property
    def cos_sin(self) -> torch.Tensor:
        """Table of the rope in ``config``, which drafts of the same rope share."""
        ...

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """All weights, shared ones once."""
        ...

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token embeddings, ``[T] -> [T, H]``."""
        ...

    def forward(
        self,
        input_ids: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: Sequence[KVCache],
        last: AttentionMetadata | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run T tokens; see :meth:`specgen.models.decoder.Decoder.forward`."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states behind the final norm, ``[R, H] -> [R, V]``."""
        ...

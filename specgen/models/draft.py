"""What every draft model offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from specgen.models.attention import AttentionMetadata, KVCache
from specgen.models.config import DraftConfig

__all__ = ["DraftModel", "DraftOverrides", "Layout"]

Layout = Literal["eagle1", "eagle3"]
"""The two architectures; checkpoints of each come in several layouts."""


@dataclass(frozen=True, kw_only=True)
class DraftOverrides:
    """Facts of a head that its configuration is known to get wrong; None keeps what it says."""

    aux_layers: tuple[int, ...] | None = None
    """Boundaries ``0..num_layers`` of the target whose streams feed ``fc``."""
    rope_theta: float | None = None
    norm_output: bool | None = None
    """Whether later passes are fed the normed hidden state."""
    norm_before_residual: bool | None = None
    """Whether the residual of the layer is the normed hidden state."""


class DraftModel(Protocol):
    """A head that drafts from target features; the pair (feature P, token P+1) predicts token P+2.

    The first pass over a pair takes ``fuse(features)`` as hidden; later ones take the feedback
    hidden of the pass before.
    """

    config: DraftConfig
    features: Literal["aux", "final"]
    """Which output of the target :meth:`fuse` takes: auxiliary streams or the final hidden."""
    aux_layers: tuple[int, ...]
    target_ids: torch.Tensor | None
    """int32 ``[Vd]``: target id of a draft id; None where they are the same."""
    draft_ids: torch.Tensor | None
    """int32 ``[V]``: draft id of a target id, -1 outside the draft vocabulary."""
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Target features ``[T, A*Ht]`` (or ``[T, Ht]``) -> hidden of the first pass ``[T, H]``."""
        ...

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: Sequence[KVCache],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run T pairs: target ids int32 ``[T]`` (-1: a row that drafts nothing), hidden ``[T, H]``.

        All of them are written to the cache; what follows that runs for those that attend, which
        ``metadata.query_idx`` may make fewer.

        Returns:
            What :meth:`compute_logits` takes, and what the next pass takes as hidden, both
            ``[T, H]``; of the pairs that attend.
        """
        ...

    def write_cache(
        self,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: Sequence[KVCache],
    ) -> None:
        """Write the cache entries that :meth:`forward` would write, and nothing else."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[R, H] -> [R, Vd]``."""
        ...

    def slots(self) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the tensor to copy into, for every parameter of its own."""
        ...

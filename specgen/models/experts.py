"""Mixtures of experts (Shazeer et al., arXiv 1701.06538) without decisions on the host.

Which expert gets how many tokens is known on the device alone: pairs of token and expert are sorted
there into blocks of one expert each, of which there is a number bounded by the shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from specgen.models.config import ExpertsConfig
from specgen.models.layers import empty_parameter

if TYPE_CHECKING:
    from specgen.kernels import Kernels

__all__ = ["RoutedMLP", "group_pairs"]

_SMALLEST_BLOCK, _LARGEST_BLOCK = 16, 64


def group_pairs(
    expert_ids: torch.Tensor, num_experts: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort pairs of a token and one of its experts into blocks of one expert.

    Args:
        expert_ids: int64 ``[T, K]``; pair ``t * K + i`` sends token t to its expert i.
        num_experts: E.
        block_size: pairs in a block.

    Returns:
        Pairs int32 ``[num_blocks * block_size]``, -1 for padding, and experts int32
        ``[num_blocks]``, -1 for a block not needed; ``num_blocks`` depends on the shapes alone.
    """
    flat = expert_ids.flatten()
    num_pairs = flat.shape[0]
    num_blocks = num_pairs // block_size + min(num_experts, num_pairs)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + block_size - 1) // block_size * block_size
    ends = padded.cumsum(0)
    order = flat.argsort(stable=True)
    experts = flat[order]
    # How far a pair stands behind the first of its expert, counted from where that one's block is.
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    places = torch.arange(num_pairs, device=flat.device) + shift[experts]
    pair_ids = flat.new_full((num_blocks * block_size,), -1, dtype=torch.int32)
    pair_ids.scatter_(0, places, order.to(torch.int32))
    starts = torch.arange(num_blocks, device=flat.device) * block_size
    block_experts = torch.searchsorted(ends, starts, right=True)
    block_experts = torch.where(starts < ends[-1], block_experts, -1)
    return pair_ids, block_experts.to(torch.int32)


class RoutedMLP(nn.Module):
    """Each token goes through the experts that its router finds most likely, weighted by it."""

    def __init__(
        self,
        hidden_size: int,
        config: ExpertsConfig,
        kernels: Kernels,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        count, inner = config.num_experts, config.intermediate_size
        self.config = config
        self.router_weight = empty_parameter(count, hidden_size, device=device, dtype=dtype)
        self.gate_up_weight = empty_parameter(
            count, 2 * inner, hidden_size, device=device, dtype=dtype
        )
        self.down_weight = empty_parameter(count, hidden_size, inner, device=device, dtype=dtype)
        self._grouped = kernels.grouped
        self._activation = kernels.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, H] -> [T, H]``."""
        count, chosen = self.config.num_experts, self.config.num_chosen
        logits = functional.linear(x, self.router_weight)
        weights, expert_ids = logits.softmax(-1, dtype=torch.float32).topk(chosen, dim=-1)
        if self.config.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        per_expert = max(1, x.shape[0] * chosen // count)
        block_size = min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, 1 << (per_expert - 1).bit_length()))
        groups = group_pairs(expert_ids, count, block_size)
        gate_up = self._grouped.grouped_linear(x, self.gate_up_weight, *groups, chosen)
        inner = self._activation.silu_mul(gate_up)
        out = self._grouped.grouped_linear(inner, self.down_weight, *groups, 1)
        out = out.view(-1, chosen, x.shape[-1]).float() * weights[:, :, None]  # [T, K, H]
        total: torch.Tensor = out.sum(1).to(x.dtype)
        return total

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """The same, in one part."""
        out: torch.Tensor = self(x)
        return out

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Destinations of ``{prefix}.gate`` and of every expert's projections."""
        gate, up, down = self.config.rules.projections
        inner = self.config.intermediate_size
        slots = {f"{prefix}.gate.weight": self.router_weight.detach()}
        for i in range(self.config.num_experts):
            expert = f"{prefix}.experts.{i}"
            slots[f"{expert}.{gate}.weight"] = self.gate_up_weight[i, :inner]
            slots[f"{expert}.{up}.weight"] = self.gate_up_weight[i, inner:]
            slots[f"{expert}.{down}.weight"] = self.down_weight[i]
        return slots

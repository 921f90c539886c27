"""Building blocks shared by targets and drafts.

Every module lists the tensors it takes from a checkpoint with ``slots(prefix)``: checkpoint name
-> the tensor to copy into, which for fused projections is a view of a part of the parameter.
Parameters never require gradients and are allocated uninitialised: loading fills them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from specgen.models.config import BlockConfig

if TYPE_CHECKING:
    from specgen.kernels import Kernels

__all__ = ["GatedMLP", "Linear", "RMSNorm", "empty_parameter"]


def empty_parameter(*shape: int, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter that takes no gradient."""
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """``y = x W^T + b`` where W stacks the output rows of one or more checkpoint projections."""

    def __init__(
        self,
        in_features: int,
        out_features: tuple[int, ...],
        bias: bool,
        kernels: Kernels,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.out_features = out_features
        total = sum(out_features)
        self.weight = empty_parameter(total, in_features, device=device, dtype=dtype)
        self.bias = empty_parameter(total, device=device, dtype=dtype) if bias else None
        self._kernel = kernels.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in] -> [T, sum(out)]``."""
        out: torch.Tensor = self._kernel.linear(x, self.weight, self.bias)
        return out

    def outputs_from(self, first: int, x: torch.Tensor) -> torch.Tensor:
        """``[T, in] -> [T, sum(out) - first]``: only the outputs from ``first`` on."""
        bias = None if self.bias is None else self.bias[first:]
        out: torch.Tensor = self._kernel.linear(x, self.weight[first:], bias)
        return out

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in] -> [T, sum(out)]``, or float32 ``[P, T, sum(out)]``: summed up by the norm
        behind, :meth:`RMSNorm.add`, which takes either.
        """
        out: torch.Tensor = self._kernel.linear_parts(x, self.weight, self.bias)
        return out

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in] -> [T, sum(out) / 2]``: silu of the first outputs times the second half."""
        out: torch.Tensor = self._kernel.linear_silu_mul(x, self.weight, self.bias)
        return out

    def slots(self, *names: str) -> dict[str, torch.Tensor]:
        """Destinations of ``{name}.weight`` (and ``.bias``), one name a stacked projection."""
        assert len(names) == len(self.out_features), (names, self.out_features)
        slots: dict[str, torch.Tensor] = {}
        weights = self.weight.split(self.out_features)
        biases = () if self.bias is None else self.bias.split(self.out_features)
        for i, name in enumerate(names):
            slots[f"{name}.weight"] = weights[i]
            if biases:
                slots[f"{name}.bias"] = biases[i]
        return slots


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019), optionally behind a residual addition."""

    def __init__(
        self,
        size: int,
        eps: float,
        kernels: Kernels,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(size, device=device, dtype=dtype)
        self.eps = eps
        self._norm = kernels.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, H] -> [T, H]``."""
        normed: torch.Tensor = self._norm.rms_norm(x, self.weight, self.eps)
        return normed

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(x + residual), x + residual)``, both ``[T, H]``; x perhaps in parts."""
        normed, total = self._norm.rms_norm_residual(x, residual, self.weight, self.eps)
        return normed, total

    def slots(self, name: str) -> dict[str, torch.Tensor]:
        """Destination of ``{name}.weight``."""
        return {f"{name}.weight": self.weight}


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` with gate and up in one product."""

    def __init__(
        self,
        config: BlockConfig,
        kernels: Kernels,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        inner = config.intermediate_size
        size, bias = config.hidden_size, config.mlp_bias
        self.gate_up = Linear(size, (inner, inner), bias, kernels, device=device, dtype=dtype)
        self.down = Linear(inner, (size,), bias, kernels, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, H] -> [T, H]``."""
        out: torch.Tensor = self.down(self.gate_up.silu_mul(x))
        return out

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """The same, or parts of it for :meth:`RMSNorm.add`."""
        return self.down.parts(self.gate_up.silu_mul(x))

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Destinations of ``{prefix}.{gate,up,down}_proj``."""
        return self.gate_up.slots(f"{prefix}.gate_proj", f"{prefix}.up_proj") | self.down.slots(
            f"{prefix}.down_proj"
        )

"""Muon for the hidden matrices; AdamW for the rest comes from torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonalise(update: Tensor) -> Tensor:
    """Newton-Schulz iteration: the nearest semi-orthogonal matrices of a stack `[n, a, b]`."""
    x: Tensor = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    result: Tensor = x.transpose(-2, -1) if tall else x
    return result


class Muon:
    """Momentum, then an orthogonalised update; matrices of one shape are handled in one stack."""

    def __init__(self, parameters: Iterable[Tensor], momentum: float = 0.95) -> None:
        self.momentum = momentum
        groups: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            groups[parameter.shape].append(parameter)
        self.groups = list(groups.values())
        self.buffers = [[torch.zeros_like(p) for p in group] for group in self.groups]

    @torch.no_grad()
    def step(self, lr: float, decay: float) -> None:
        """One update with learning rate `lr` and decoupled weight decay."""
        for group, buffers in zip(self.groups, self.buffers, strict=True):
            grads = [p.grad for p in group if p.grad is not None]
            torch._foreach_lerp_(buffers, grads, 1 - self.momentum)
            mixed = torch._foreach_lerp(grads, buffers, self.momentum)
            update = orthogonalise(torch.stack(list(mixed)))
            rows, columns = group[0].shape
            scale = lr * max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(group, 1 - lr * decay)
            torch._foreach_add_(group, list(update.float().unbind()), alpha=-scale)


def schedule(progress: float, warm: float = 0.02, flat: float = 0.4) -> float:
    """Warm-up, plateau, then linear decay to zero; `progress` runs from 0 to 1."""
    if progress < warm:
        return max(progress, 1e-4) / warm
    return min(1.0, max(0.0, (1.0 - progress) / (1.0 - flat)))

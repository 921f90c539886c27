"""Muon for the hidden matrices, AdamW of torch for the rest, and the schedule of their rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

MUON_RATE = 0.01  # of a draft's matrices


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


class DraftOptimiser:
    """Muon on a draft's layer and `fc`, AdamW on its head and norms, nothing on `frozen`."""

    def __init__(self, draft: nn.Module, lr: float, frozen: tuple[Tensor, ...] = ()) -> None:
        kept = {id(tensor) for tensor in frozen}
        mine = [(n, p) for n, p in draft.named_parameters() if id(p) not in kept]
        matrices = [p for n, p in mine if p.ndim == 2 and not n.startswith("lm_head")]
        chosen = {id(p) for p in matrices}
        self.muon = Muon(matrices)
        self.others = [p for _, p in mine if id(p) not in chosen]
        self.adam = torch.optim.AdamW(
            self.others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=matrices[0].is_cuda
        )
        self.mine, self.lr = [p for _, p in mine], lr

    def step(self, factor: float) -> None:
        """One update at `factor` of the peak rates."""
        torch.nn.utils.clip_grad_norm_(self.others, 0.5)
        for group in self.adam.param_groups:
            group["lr"] = self.lr * factor
        self.adam.step()
        self.muon.step(MUON_RATE * factor, 0.0)
        for parameter in self.mine:
            parameter.grad = None

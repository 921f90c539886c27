"""Pseudo-random weights for measurements without a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

__all__ = ["fill_dummy"]


def fill_dummy(slots: Mapping[str, torch.Tensor], seed: int = 0) -> None:
    """Fill every slot in place: norms with ones, biases with zeros, matrices with noise.

    Matrices have variance 1/fan-in, so that activations keep their size through any depth. The
    values depend on the seed, the order of the slots and the device.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, slot in slots.items():
        if slot.is_meta:
            continue  # shapes alone
        if name.endswith(".bias"):
            slot.zero_()
        elif slot.dim() == 1:
            slot.fill_(1.0)
        else:
            if slot.device not in generators:
                generators[slot.device] = torch.Generator(slot.device).manual_seed(seed)
            std = 1.0 if "embed_tokens" in name else 1.0 / math.sqrt(slot.shape[-1])
            slot.normal_(0.0, std, generator=generators[slot.device])

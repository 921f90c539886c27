"""Pseudo-random weights for measurements without a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

__all__ = ["fill_dummy"]

_LARGEST = 1e-3


def fill_dummy(
    slots: Mapping[str, torch.Tensor], load_format: str = "dummy", seed: int = 0
) -> None:
    """Fill every slot in place.

    What a product draws of a GPU's power depends on the numbers in it, and with it its speed. So
    there are numbers like those of trained models, and numbers like another engine's dummies.

    Args:
        slots: parameters by name.
        load_format: ``"dummy"``: norms are ones, biases zeros, matrices normal with variance
            1/fan-in, so that activations keep their size through any depth; ``"dummy-uniform"``:
            all uniform between -0.001 and 0.001, norms and biases too, as vLLM's are.
        seed: values depend on it, the order of the slots and the device.
    """
    fill = {"dummy": _fill_like_trained, "dummy-uniform": _fill_uniform}[load_format]
    generators: dict[torch.device, torch.Generator] = {}
    for name, slot in slots.items():
        if slot.is_meta:
            continue  # shapes alone
        if slot.device not in generators:
            generators[slot.device] = torch.Generator(slot.device).manual_seed(seed)
        fill(name, slot, generators[slot.device])


def _fill_like_trained(name: str, slot: torch.Tensor, generator: torch.Generator) -> None:
    if name.endswith(".bias"):
        slot.zero_()
    elif slot.dim() == 1:
        slot.fill_(1.0)
    else:
        std = 1.0 if "embed_tokens" in name else 1.0 / math.sqrt(slot.shape[-1])
        slot.normal_(0.0, std, generator=generator)


def _fill_uniform(name: str, slot: torch.Tensor, generator: torch.Generator) -> None:
    del name
    slot.uniform_(-_LARGEST, _LARGEST, generator=generator)

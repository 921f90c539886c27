"""Tables of the rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

import math

import torch

from specgen.models.config import RopeConfig

__all__ = ["TABLE_MARGIN", "build_cos_sin", "inverse_frequencies"]

TABLE_MARGIN = 256
"""Positions a table holds past the model's own length: drafts reach up to 2k past a row's end."""


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each rotated pair, scaled as the rope type says.

    Returns:
        float32 ``[head_dim / 2]`` on the CPU, in radians.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        # Short waves stay, long waves are stretched by the factor, those between are interpolated.
        turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return frequencies * kept + frequencies / rope.factor * (1.0 - kept)
    return frequencies


def build_cos_sin(
    rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device | str
) -> torch.Tensor:
    """Cosines and sines of every position.

    Returns:
        float32 ``[num_positions, head_dim]``: first half cosines, second half sines.
    """
    # Angles are made on the CPU: a table must not depend on the device that uses it.
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)

"""Tables of the rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

import math

import torch

from specgen.errors import EnvironmentProblem
from specgen.models.rope_config import RopeConfig

__all__ = ["TABLE_MARGIN", "build_cos_sin", "inverse_frequencies", "rope_note"]

TABLE_MARGIN = 256
"""Positions a table holds past the longest row: drafts reach up to 2k past a row's end."""


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_model_len: int) -> torch.Tensor:
    """Angle per position of each rotated pair, scaled as the rope type says.

    Types whose frequencies depend on the length take those of ``max_model_len`` for all lengths:
    what is cached of a row stays right as the row grows, and rows do not depend on one another.

    Returns:
        float32 ``[head_dim / 2]`` on the CPU, in radians.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    original = rope.original_max_position_embeddings
    if rope.rope_type == "dynamic":
        stretch = rope.factor * max(max_model_len, original) / original - (rope.factor - 1)
        theta = rope.theta * stretch ** (head_dim / (head_dim - 2))
        return torch.reciprocal(theta**exponents)
    frequencies = torch.reciprocal(rope.theta**exponents)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        # Short waves stay, long waves are stretched by the factor, those between are interpolated.
        turns = original * frequencies / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return frequencies * kept + frequencies / rope.factor * (1.0 - kept)
    if rope.rope_type == "yarn":
        kept = _yarn_kept(rope, head_dim)
        return frequencies * kept + frequencies / rope.factor * (1.0 - kept)
    if rope.rope_type == "longrope":
        is_long = max_model_len > original
        factors = rope.long_factors if is_long else rope.short_factors
        return frequencies / torch.tensor(factors, dtype=torch.float32)
    return frequencies


def _yarn_kept(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Share of each frequency that stays as it is: 1 for short waves, 0 for long ones."""

    def pair_that_turns(times: float) -> float:
        """Index of the pair that turns so often over the original length."""
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    return 1.0 - ((pairs - low) / width).clamp(0.0, 1.0)


def build_cos_sin(
    rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device | str
) -> torch.Tensor:
    """Cosines and sines of every position that a row can reach.

    Args:
        rope: type and base.
        head_dim: size of a head, all of which is rotated.
        num_positions: length of the longest row and :data:`TABLE_MARGIN`.
        device: where the table goes.

    Returns:
        float32 ``[num_positions, head_dim]``: first half cosines, second half sines. On the meta
        device no angle is made.

    Raises:
        EnvironmentProblem: there is no memory for so many positions.
    """
    if torch.device(device).type == "meta":
        return torch.empty(num_positions, head_dim, device=device)
    max_model_len = max(num_positions - TABLE_MARGIN, 1)
    # Angles are made on the CPU: a table must not depend on the device that uses it.
    try:
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = positions[:, None] * inverse_frequencies(rope, head_dim, max_model_len)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
    except (RuntimeError, MemoryError) as error:
        if "allocate" not in str(error):
            raise
        raise EnvironmentProblem(
            f"no memory for the rope of {max_model_len} positions", "give a lower --max-model-len"
        ) from error
    return table.to(device)


def rope_note(rope: RopeConfig, max_model_len: int) -> str | None:
    """What a user should know of a rope whose frequencies depend on the length."""
    if not rope.depends_on_length:
        return None
    note = f"{rope.rope_type} rope fixed for the whole run by max_model_len {max_model_len}"
    if rope.rope_type == "longrope":
        is_long = max_model_len > rope.original_max_position_embeddings
        note += f": {'long' if is_long else 'short'} factors for rows of any length"
    return note

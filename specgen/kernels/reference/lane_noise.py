"""The largest noises of every lane of the vocabulary: what a draw knows before there are logits."""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.kernels.lanes import (
    LANE_GROUP,
    LANE_IDS,
    NOISE_SLACK,
    NOISE_STEP,
    NUM_LANES,
    NUM_LOUDEST,
    VOCAB_BLOCK,
)
from specgen.kernels.reference.rng import gumbel_noise, philox
from specgen.kernels.streams import TARGET


def largest_noise(
    num_draft_tokens: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    first_positions: Tensor,
    sample_index: Tensor,
    num_steps: int,
    vocab_size: int,
) -> Tensor:
    """Return bounds of the largest noises of every lane, on stream TARGET, and whose they are.

    Noise is below its bound, ``NOISE_STEP`` times the upper ten bits. The lower six are the place
    of its token in the lane, from 0 to ``LANE_IDS - 1``.

    Args:
        num_draft_tokens: ``[B]`` int32; -1 = padding row.
        temperature: ``[B]`` fp32.
        seeds: ``[B]`` int64.
        first_positions: ``[B]`` int32 absolute position of step 0.
        sample_index: ``[B]`` int32.
        num_steps: k + 1.
        vocab_size: V. The last block counts with all its ids, also those from V on.

    Returns:
        ``[B, k + 1, N, NUM_LOUDEST, NUM_LANES]`` uint16 as int16, the largest first. Steps that
        draw nothing, those of padding and greedy rows and those behind a row's last draft, may
        hold anything.
    """
    batch, device = seeds.shape[0], seeds.device
    num_blocks = -(-vocab_size // VOCAB_BLOCK)
    shape = (batch, num_steps, num_blocks * VOCAB_BLOCK // 4)
    steps = torch.arange(num_steps, dtype=torch.int32, device=device)
    positions = first_positions[:, None] + steps
    words = philox(
        seeds[:, None, None].expand(shape).reshape(-1),
        torch.arange(shape[-1], dtype=torch.int32, device=device).expand(shape).reshape(-1),
        positions[:, :, None].expand(shape).reshape(-1),
        torch.full(shape, TARGET, dtype=torch.int32, device=device).reshape(-1),
        sample_index[:, None, None].expand(shape).reshape(-1),
    )
    # Large noise comes from small words.
    unsigned = words.to(torch.int64) & 0x100000000 - LANE_IDS
    by_group = unsigned.view(batch, num_steps, num_blocks, -1, NUM_LANES, LANE_GROUP)
    by_lane = by_group.transpose(3, 4).flatten(4) + torch.arange(LANE_IDS, device=device)
    least = by_lane.topk(NUM_LOUDEST, largest=False, sorted=True).values.transpose(3, 4)
    least_words = torch.where(least >= 1 << 31, least - (1 << 32), least).to(torch.int32)
    noise = gumbel_noise((least_words & -LANE_IDS).flatten()).view(least_words.shape)
    bounds = (noise.clamp(min=0.0) + NOISE_SLACK) * (1 / NOISE_STEP)
    steps = (bounds.to(torch.int32) + 1).clamp(max=1023)
    return (steps * LANE_IDS + (least_words & LANE_IDS - 1)).to(torch.int16)

"""The largest noises of every lane of the vocabulary: what a draw knows before there are logits."""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.kernels.lanes import LANE_GROUP, LANE_IDS, NUM_LANES, VOCAB_BLOCK
from specgen.kernels.reference.rng import philox
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
    """Return the words of the two largest noises of every lane, on stream TARGET.

    Large noise comes from small words. The lowest bits of a word, which change little, hold the
    place of its token in the lane instead, from 0 to ``LANE_IDS - 1``.

    Args:
        num_draft_tokens: ``[B]`` int32; -1 = padding row.
        temperature: ``[B]`` fp32.
        seeds: ``[B]`` int64.
        first_positions: ``[B]`` int32 absolute position of step 0.
        sample_index: ``[B]`` int32.
        num_steps: k + 1.
        vocab_size: V. The last block counts with all its ids, also those from V on.

    Returns:
        ``[B, k + 1, N, 2, NUM_LANES]`` uint32 words as int32, the least first. Steps that
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
    unsigned = words.to(torch.int64) & 0x100000000 - LANE_IDS
    by_group = unsigned.view(batch, num_steps, num_blocks, -1, NUM_LANES, LANE_GROUP)
    by_lane = by_group.transpose(3, 4).flatten(4) + torch.arange(LANE_IDS, device=device)
    least = by_lane.topk(2, largest=False, sorted=True).values.transpose(3, 4)
    return torch.where(least >= 1 << 31, least - (1 << 32), least).to(torch.int32)

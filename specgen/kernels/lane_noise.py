"""The largest noises of every lane of the vocabulary, known before there are logits.

The noise of a token depends on its row's seed, its position and its id alone. So a decode step can
look at all of it while the target runs, and a draw then looks only where noise and logits could win
together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
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
from specgen.kernels.rng import address_words, word_gumbel
from specgen.kernels.streams import GREEDY_TEMPERATURE, TARGET

# Philox calls of a thread at a time that do not wait for each other, and of those in one tensor.
_CALLS = 8
_WIDTH = 1
_WORD_BITS = tl.constexpr(0x100000000 - LANE_IDS)
_SLACK = tl.constexpr(NOISE_SLACK)
_STEP = tl.constexpr(NOISE_STEP)
_STEPS = tl.constexpr(1 / NOISE_STEP)
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_TARGET = tl.constexpr(TARGET)


@triton.jit
def _pack_noise(words, LANE_IDS: tl.constexpr):
    """Return a bound of the noise of words in ten bits, then the place in their lowest bits."""
    noise = tl.maximum(word_gumbel(words & (0x100000000 - LANE_IDS)), 0.0) + _SLACK
    steps = tl.minimum((noise * _STEPS).to(tl.int32) + 1, 1023)
    return (steps * LANE_IDS + (words & (LANE_IDS - 1)).to(tl.int32)).to(tl.int16)


@triton.jit
def unpack_noise(packed, LANE_IDS: tl.constexpr):
    """Return the bound of noise in int32 of what :func:`_pack_noise` made, not negative."""
    return (packed // LANE_IDS).to(tl.float32) * _STEP


@triton.jit
def _largest_noise_kernel(
    num_drafts_ptr,
    temperature_ptr,
    seeds_ptr,
    first_positions_ptr,
    sample_ptr,
    out_ptr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    CALLS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the two largest noises of every lane of one block, for one step of a row."""
    b = tl.program_id(0)
    step = tl.program_id(1)
    block = tl.program_id(2)
    is_drawn = step <= tl.load(num_drafts_ptr + b)
    if is_drawn & (tl.load(temperature_ptr + b) >= _GREEDY):
        seed = tl.load(seeds_ptr + b)
        position = tl.load(first_positions_ptr + b) + step
        sample = tl.load(sample_ptr + b)
        lanes = tl.arange(0, LANES)
        calls = tl.arange(0, WIDTH)[None, :]
        # A call has the words of four ids.
        PER_GROUP: tl.constexpr = GROUP // 4
        first = (block * BLOCK // 4 + lanes * PER_GROUP)[:, None]
        least = tl.full([LANES, WIDTH], 0xFFFFFFFF, tl.uint32)
        second = least
        for start in range(0, BLOCK // LANES // 4, CALLS):
            for i in tl.static_range(0, CALLS, WIDTH):
                call = start + i + calls
                c0 = first + call // PER_GROUP * (LANES * PER_GROUP) + call % PER_GROUP
                words = address_words(seed, c0, position, _TARGET, sample)
                for j in tl.static_range(4):
                    word = (words[j] & _WORD_BITS) | (call * 4 + j).to(tl.uint32)
                    second = tl.minimum(second, tl.maximum(least, word))
                    least = tl.minimum(least, word)
        # Large noise comes from small words. No two are equal, since each has an id of its own.
        at = (b * tl.num_programs(1) + step).to(tl.int64) * tl.num_programs(2) + block
        out = out_ptr + at * (2 * LANES) + lanes
        LANE_IDS: tl.constexpr = BLOCK // LANES
        lane_least = tl.min(least, axis=1)
        second = tl.where(least == lane_least[:, None], second, least)
        tl.store(out, _pack_noise(lane_least, LANE_IDS))
        tl.store(out + LANES, _pack_noise(tl.min(second, axis=1), LANE_IDS))


def largest_noise(
    num_draft_tokens: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    first_positions: Tensor,
    sample_index: Tensor,
    num_steps: int,
    vocab_size: int,
) -> Tensor:
    """Return the largest noises of the lanes for ``num_steps`` steps of every row; see the twin."""
    batch = temperature.shape[0]
    shape = (batch, num_steps, triton.cdiv(vocab_size, VOCAB_BLOCK))
    shape_out = (*shape, NUM_LOUDEST, NUM_LANES)
    out = torch.empty(shape_out, dtype=torch.int16, device=temperature.device)
    if batch:
        _largest_noise_kernel[shape](
            num_draft_tokens.contiguous(),
            temperature.contiguous(),
            seeds.contiguous(),
            first_positions.contiguous(),
            sample_index.contiguous(),
            out,
            BLOCK=VOCAB_BLOCK,
            LANES=NUM_LANES,
            GROUP=LANE_GROUP,
            CALLS=_CALLS,
            WIDTH=_WIDTH,
            num_warps=NUM_LANES // 32,
        )
    return out

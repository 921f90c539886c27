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

from specgen.kernels.lanes import LANE_GROUP, LANE_IDS, NUM_LANES, VOCAB_BLOCK
from specgen.kernels.rng import address_words
from specgen.kernels.streams import GREEDY_TEMPERATURE, TARGET

# Philox calls of a thread at a time that do not wait for each other, and of those in one tensor.
_CALLS = 8
_WIDTH = 1
_WORD_BITS = tl.constexpr(0x100000000 - LANE_IDS)
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_TARGET = tl.constexpr(TARGET)


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
    """Write the least two words of every lane of one block, for one step of a row."""
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
        # No two are equal, since each has an id of its own.
        lane_least = tl.min(least, axis=1)
        second = tl.where(least == lane_least[:, None], second, least)
        at = (b * tl.num_programs(1) + step).to(tl.int64) * tl.num_programs(2) + block
        out_ptr += at * (2 * LANES)
        tl.store(out_ptr + lanes, lane_least.to(tl.int32, bitcast=True))
        lane_second = tl.min(second, axis=1)
        tl.store(out_ptr + LANES + lanes, lane_second.to(tl.int32, bitcast=True))


def largest_noise(
    num_draft_tokens: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    first_positions: Tensor,
    sample_index: Tensor,
    num_steps: int,
    vocab_size: int,
) -> Tensor:
    """Return the least words of every lane for ``num_steps`` steps of every row; see the twin."""
    batch = temperature.shape[0]
    shape = (batch, num_steps, triton.cdiv(vocab_size, VOCAB_BLOCK))
    out = torch.empty((*shape, 2, NUM_LANES), dtype=torch.int32, device=temperature.device)
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

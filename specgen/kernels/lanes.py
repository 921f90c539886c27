"""Blocks of ids as lanes of 16, one thread's work: their noise words and their logits.

A lane's ids are two times eight that follow each other: four Philox calls, and two wide loads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specgen.kernels.rng import address_words

LANE_IDS = tl.constexpr(16)


@triton.jit
def lane_id(lane, slot, LANES: tl.constexpr):
    """Return which id of a block, from 0 on, is at ``slot`` of a lane."""
    return ((slot >> 3) * LANES + lane) * 8 + (slot & 7)


@triton.jit
def lane_words(seed, start, position, c2, sample, LANES: tl.constexpr):
    """Return the words of the ids ``start .. start + 16 * LANES - 1``: 16 tensors ``[LANES]``.

    ``start`` is a multiple of 4. The four Philox calls do not wait for each other.
    """
    group = start // 4 + 2 * tl.arange(0, LANES)
    return (
        address_words(seed, group, position, c2, sample)
        + address_words(seed, group + 1, position, c2, sample)
        + address_words(seed, group + 2 * LANES, position, c2, sample)
        + address_words(seed, group + (2 * LANES + 1), position, c2, sample)
    )


@triton.jit
def least_word(words):
    """Return the smallest word of every lane."""
    least = words[0]
    for i in tl.static_range(1, LANE_IDS):
        least = tl.minimum(least, words[i])
    return least


@triton.jit
def lane_logits(row_ptr, start, V, LANES: tl.constexpr):
    """Return the logits of the same ids in fp32, -inf from V on: 16 tensors ``[LANES]``."""
    columns = tl.arange(0, 8)[None, :]
    x = ()
    for half in tl.static_range(2):
        ids = start + (half * LANES + tl.arange(0, LANES)[:, None]) * 8 + columns
        wide = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        bits = wide.to(tl.int32, bitcast=True)
        for i in tl.static_range(8):
            # No sum is left once compiled: a thread holds whole rows.
            column = tl.sum(tl.where(columns == i, bits, 0), axis=1)
            x = x + (column.to(tl.float32, bitcast=True),)  # type: ignore[assignment]  # noqa: RUF005
    return x

"""Counter-based random numbers: Philox4x32-10, uniforms and Gumbel noise.

Every draw is a pure function of its address, so batch, slot, schedule and preemption change
nothing. The address has four 32-bit words:

====  ==========================================================
c0    token id >> 2 (the word ``token id & 3`` is used); 0 on ACCEPT
c1    absolute position of the token being drawn
c2    ``stream | (j << 8)``, j the index of a draft in its block
c3    sample index of the row (samples of one prompt)
====  ==========================================================

The key is the row's 64-bit seed. The generator is that of Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3" (SC 2011), bit for bit what ``tl.philox`` computes from int32 counters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.kernels.streams import ACCEPT

_MASK = 0xFFFFFFFF
_ROUND_A = 0xD2511F53
_ROUND_B = 0xCD9E8D57
_KEY_A = 0x9E3779B9
_KEY_B = 0xBB67AE85
_LARGEST_UNIFORM = 1.0 - 2.0**-24


def _philox_words(
    seeds: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words as int64 in [0, 2**32); the arguments (int64) broadcast."""
    k0, k1 = seeds & _MASK, (seeds >> 32) & _MASK
    c0, c1, c2, c3 = c0 & _MASK, c1 & _MASK, c2 & _MASK, c3 & _MASK
    for _ in range(10):
        # A product may exceed int64 and wrap; its low 64 bits, all that is used, stay exact.
        a, b = c0 * _ROUND_A, c2 * _ROUND_B
        c0 = ((b >> 32) ^ (c1 ^ k0)).bitwise_and_(_MASK)
        c2 = ((a >> 32) ^ (c3 ^ k1)).bitwise_and_(_MASK)
        c1, c3 = b.bitwise_and_(_MASK), a.bitwise_and_(_MASK)
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return c0, c1, c2, c3


def _uniform(words: Tensor) -> Tensor:
    """Map int64 words in [0, 2**32) to the uniform of :func:`uniform`."""
    # Rounding to fp32 first, then exact scaling: the same bits on every device.
    scaled = words.to(torch.float32).mul_(2.0**-32).add_(2.0**-33)
    return scaled.clamp_(max=_LARGEST_UNIFORM)


def _gumbel(words: Tensor) -> Tensor:
    w = _uniform(words)
    t = 1.0 - w
    tiny = t == 1.0
    # -log(1 - w) with the rounding error of 1 - w divided out, so that tiny w keeps its precision.
    gap = torch.where(tiny, 1.0, 1.0 - t)
    exponential = torch.where(tiny, w, -torch.log(t) * (w / gap))
    return -torch.log(exponential)


def philox(seeds: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> Tensor:
    """Return the four Philox4x32-10 words of N counters.

    Args:
        seeds: ``[N]`` int64 keys (low 32 bits are key word 0, high 32 bits key word 1).
        c0: ``[N]`` int32 counter word 0; likewise ``c1``, ``c2`` and ``c3``.
        c1: counter word 1.
        c2: counter word 2.
        c3: counter word 3.

    Returns:
        ``[N, 4]`` int32, the bit patterns of the four uint32 words.
    """
    counters = [c.to(torch.int64) for c in (c0, c1, c2, c3)]
    words = torch.stack(_philox_words(seeds, *counters), dim=-1)
    return torch.where(words > 0x7FFFFFFF, words - (1 << 32), words).to(torch.int32)


def uniform(words: Tensor) -> Tensor:
    """Map int32 words (bit patterns of uint32 x) to fp32 uniforms inside (0, 1).

    ``min(f32(x) * 2**-32 + 2**-33, 1 - 2**-24)``: the smallest value is 2**-33, the largest
    ``1 - 2**-24``; 0 and 1 never occur. Any shape.
    """
    return _uniform(words.to(torch.int64) & _MASK)


def gumbel_noise(words: Tensor) -> Tensor:
    """Map int32 words to fp32 standard Gumbel noise, finite, with a tail exact down to 2**-33.

    Any shape. Noise is ``-log(E)`` of an exponential ``E = -log(1 - w)`` computed without loss for
    tiny ``w``, so that rare tokens win as often as they should.
    """
    return _gumbel(words.to(torch.int64) & _MASK)


def _row_counters(
    positions: Tensor, stream: int, block_index: Tensor, sample_index: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return c1, c2 and c3 of R rows as int64."""
    c2 = stream | (block_index.to(torch.int64) << 8)
    return positions.to(torch.int64), c2, sample_index.to(torch.int64)


def token_gumbel(
    seeds: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    stream: int,
    block_index: Tensor,
    sample_index: Tensor,
) -> Tensor:
    """Return the Gumbel noise of given tokens.

    Args:
        seeds: ``[R]`` int64 row seeds.
        token_ids: ``[R, N]`` int32 target token ids.
        positions: ``[R]`` int32 absolute positions of the tokens drawn.
        stream: one of :mod:`specgen.kernels.streams`.
        block_index: ``[R]`` int32, index of the draft in its block (0 on TARGET).
        sample_index: ``[R]`` int32.

    Returns:
        ``[R, N]`` fp32.
    """
    c1, c2, c3 = _row_counters(positions, stream, block_index, sample_index)
    ids = token_ids.to(torch.int64)
    words = _philox_words(seeds[:, None], ids >> 2, c1[:, None], c2[:, None], c3[:, None])
    lane = ids & 3
    low = torch.where(lane == 0, words[0], words[1])
    high = torch.where(lane == 2, words[2], words[3])
    return _gumbel(torch.where(lane < 2, low, high))


def vocab_gumbel(
    seeds: Tensor,
    vocab_size: int,
    positions: Tensor,
    stream: int,
    block_index: Tensor,
    sample_index: Tensor,
) -> Tensor:
    """Return :func:`token_gumbel` of the ids ``0 .. vocab_size - 1`` of every row: ``[R, V]`` fp32.

    One generator call serves four neighbouring tokens.
    """
    c1, c2, c3 = _row_counters(positions, stream, block_index, sample_index)
    groups = torch.arange((vocab_size + 3) // 4, device=seeds.device)
    words = _philox_words(seeds[:, None], groups, c1[:, None], c2[:, None], c3[:, None])
    return _gumbel(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size])


def accept_uniform(
    seeds: Tensor, positions: Tensor, block_index: Tensor, sample_index: Tensor
) -> Tensor:
    """Return the uniforms of acceptance tests, ``[R]`` fp32: stream ACCEPT, c0 = 0, word 0.

    Args:
        seeds: ``[R]`` int64.
        positions: ``[R]`` int32 absolute positions of the drafts judged.
        block_index: ``[R]`` int32 index of the draft in its block.
        sample_index: ``[R]`` int32.
    """
    c1, c2, c3 = _row_counters(positions, ACCEPT, block_index, sample_index)
    return _uniform(_philox_words(seeds, torch.zeros_like(c1), c1, c2, c3)[0])

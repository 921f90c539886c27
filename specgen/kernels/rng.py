"""Counter-based random numbers in Triton; :mod:`specgen.kernels.reference.rng` is the definition.

The jit functions at the top are what the sampling kernels are built from; the plain functions
below have the signatures of the twin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.streams import ACCEPT

_BLOCK = 1024
_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
_FACTOR0 = tl.constexpr(0xD2511F53)
_FACTOR2 = tl.constexpr(0xCD9E8D57)
_SCALE = tl.constexpr(2.0**-32)
_HALF_STEP = tl.constexpr(2.0**-33)
_LARGEST_UNIFORM = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def word_uniform(words):
    """Map uint32 words to uniforms inside (0, 1)."""
    return tl.minimum(words.to(tl.float32) * _SCALE + _HALF_STEP, _LARGEST_UNIFORM)


@triton.jit
def word_gumbel(words):
    """Map uint32 words to Gumbel noise."""
    w = word_uniform(words)
    t = 1.0 - w
    tiny = t == 1.0
    gap = tl.where(tiny, 1.0, 1.0 - t)
    exponential = tl.where(tiny, w, -tl.log(t) * (w / gap))
    return -tl.log(exponential)


@triton.jit
def _multiply(x, factor):
    """Return the high and the low half of a product of uint32."""
    if _IS_COMPILED:  # one instruction, which LLVM often makes two of
        product = tl.inline_asm_elementwise(
            "mul.wide.u32 $0, $1, $2;",
            "=l,r,r",
            [x, factor],
            dtype=tl.uint64,
            is_pure=True,
            pack=1,
        )
    else:
        product = x.to(tl.uint64) * factor
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def address_words(seed, c0, c1, c2, c3):
    """Return the four uint32 words of a block of int32 ``c0``; other counters may be scalars.

    These are the words of ``tl.philox`` (Philox 4x32-10, Salmon et al., SC 2011), which computes
    the two halves of every product apart: a fifth slower.
    """
    key0 = seed.to(tl.uint64).to(tl.uint32)
    key1 = (seed.to(tl.uint64) >> 32).to(tl.uint32)
    x0 = c0.to(tl.uint32)
    x1 = (c0 * 0 + c1).to(tl.uint32)
    x2 = (c0 * 0 + c2).to(tl.uint32)
    x3 = (c0 * 0 + c3).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = _multiply(x0, _FACTOR0)
        high2, low2 = _multiply(x2, _FACTOR2)
        x0 = high2 ^ x1 ^ key0
        x1 = low2
        x2 = high0 ^ x3 ^ key1
        x3 = low0
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return x0, x1, x2, x3


@triton.jit
def id_gumbel(seed, ids, position, c2, sample):
    """Return the Gumbel noise of a block of arbitrary int32 target ids."""
    w0, w1, w2, w3 = address_words(seed, ids >> 2, position, c2, sample)
    lane = ids & 3
    words = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    return word_gumbel(words)


@triton.jit
def range_gumbel(seed, start, position, c2, sample, BLOCK: tl.constexpr):
    """Return the Gumbel noise of the ids ``start .. start + BLOCK - 1``, four to a Philox call.

    ``start`` must be a multiple of 4.
    """
    groups = start // 4 + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = address_words(seed, groups, position, c2, sample)
    return word_gumbel(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def _philox_kernel(seeds_ptr, c0_ptr, c1_ptr, c2_ptr, c3_ptr, out_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    seeds = tl.load(seeds_ptr + offs, mask=mask, other=0)
    c0 = tl.load(c0_ptr + offs, mask=mask, other=0)
    c1 = tl.load(c1_ptr + offs, mask=mask, other=0)
    c2 = tl.load(c2_ptr + offs, mask=mask, other=0)
    c3 = tl.load(c3_ptr + offs, mask=mask, other=0)
    w0, w1, w2, w3 = tl.philox(seeds, c0, c1, c2, c3)
    out = out_ptr + offs.to(tl.int64) * 4
    tl.store(out, w0.to(tl.int32, bitcast=True), mask=mask)
    tl.store(out + 1, w1.to(tl.int32, bitcast=True), mask=mask)
    tl.store(out + 2, w2.to(tl.int32, bitcast=True), mask=mask)
    tl.store(out + 3, w3.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _map_words_kernel(words_ptr, out_ptr, N, GUMBEL: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    words = tl.load(words_ptr + offs, mask=mask, other=0).to(tl.uint32, bitcast=True)
    if GUMBEL:
        tl.store(out_ptr + offs, word_gumbel(words), mask=mask)
    else:
        tl.store(out_ptr + offs, word_uniform(words), mask=mask)


@triton.jit
def _token_gumbel_kernel(
    seeds_ptr,
    ids_ptr,
    positions_ptr,
    block_index_ptr,
    sample_ptr,
    out_ptr,
    N,
    stream,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    start = tl.program_id(1) * BLOCK
    offs = start + tl.arange(0, BLOCK)
    mask = offs < N
    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row)
    c2 = (tl.load(block_index_ptr + row) << 8) | stream
    sample = tl.load(sample_ptr + row)
    at = row.to(tl.int64) * N + offs
    if HAS_IDS:
        ids = tl.load(ids_ptr + at, mask=mask, other=0)
        noise = id_gumbel(seed, ids, position, c2, sample)
    else:
        noise = range_gumbel(seed, start, position, c2, sample, BLOCK)
    tl.store(out_ptr + at, noise, mask=mask)


@triton.jit
def _accept_uniform_kernel(
    seeds_ptr,
    positions_ptr,
    block_index_ptr,
    sample_ptr,
    out_ptr,
    R,
    stream,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < R
    seeds = tl.load(seeds_ptr + offs, mask=mask, other=0)
    positions = tl.load(positions_ptr + offs, mask=mask, other=0)
    c2 = (tl.load(block_index_ptr + offs, mask=mask, other=0) << 8) | stream
    samples = tl.load(sample_ptr + offs, mask=mask, other=0)
    w0, _w1, _w2, _w3 = address_words(seeds, positions * 0, positions, c2, samples)
    tl.store(out_ptr + offs, word_uniform(w0), mask=mask)


def philox(seeds: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> Tensor:
    """Return the four Philox4x32-10 words of N counters, ``[N, 4]`` int32."""
    num = seeds.shape[0]
    out = torch.empty((num, 4), dtype=torch.int32, device=seeds.device)
    counters = [c.contiguous() for c in (c0, c1, c2, c3)]
    if num:
        grid = (triton.cdiv(num, _BLOCK),)
        _philox_kernel[grid](seeds.contiguous(), *counters, out, num, BLOCK=_BLOCK)
    return out


def uniform(words: Tensor) -> Tensor:
    """Map int32 words to fp32 uniforms inside (0, 1)."""
    return _map_words(words, gumbel=False)


def gumbel_noise(words: Tensor) -> Tensor:
    """Map int32 words to fp32 standard Gumbel noise."""
    return _map_words(words, gumbel=True)


def _map_words(words: Tensor, gumbel: bool) -> Tensor:
    words = words.contiguous()
    out = torch.empty(words.shape, dtype=torch.float32, device=words.device)
    num = words.numel()
    if num:
        grid = (triton.cdiv(num, _BLOCK),)
        _map_words_kernel[grid](words, out, num, GUMBEL=gumbel, BLOCK=_BLOCK)
    return out


def token_gumbel(
    seeds: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    stream: int,
    block_index: Tensor,
    sample_index: Tensor,
) -> Tensor:
    """Return the Gumbel noise of given target ids, ``[R, N]`` fp32."""
    return _launch_gumbel(
        seeds,
        token_ids.contiguous(),
        token_ids.shape[1],
        positions,
        stream,
        block_index,
        sample_index,
    )


def vocab_gumbel(
    seeds: Tensor,
    vocab_size: int,
    positions: Tensor,
    stream: int,
    block_index: Tensor,
    sample_index: Tensor,
) -> Tensor:
    """Return the Gumbel noise of the ids ``0 .. vocab_size - 1``, ``[R, V]`` fp32."""
    return _launch_gumbel(seeds, None, vocab_size, positions, stream, block_index, sample_index)


def _launch_gumbel(
    seeds: Tensor,
    token_ids: Tensor | None,
    num_ids: int,
    positions: Tensor,
    stream: int,
    block_index: Tensor,
    sample_index: Tensor,
) -> Tensor:
    num_rows = seeds.shape[0]
    out = torch.empty((num_rows, num_ids), dtype=torch.float32, device=seeds.device)
    if out.numel():
        grid = (num_rows, triton.cdiv(num_ids, _BLOCK))
        _token_gumbel_kernel[grid](
            seeds.contiguous(),
            token_ids,
            positions.contiguous(),
            block_index.contiguous(),
            sample_index.contiguous(),
            out,
            num_ids,
            stream,
            HAS_IDS=token_ids is not None,
            BLOCK=_BLOCK,
        )
    return out


def accept_uniform(
    seeds: Tensor, positions: Tensor, block_index: Tensor, sample_index: Tensor
) -> Tensor:
    """Return the uniforms of acceptance tests, ``[R]`` fp32."""
    num_rows = seeds.shape[0]
    out = torch.empty((num_rows,), dtype=torch.float32, device=seeds.device)
    if num_rows:
        grid = (triton.cdiv(num_rows, _BLOCK),)
        _accept_uniform_kernel[grid](
            seeds.contiguous(),
            positions.contiguous(),
            block_index.contiguous(),
            sample_index.contiguous(),
            out,
            num_rows,
            ACCEPT,
            BLOCK=_BLOCK,
        )
    return out

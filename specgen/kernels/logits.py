"""Thresholds of top-k and top-p in Triton, by exact radix search instead of a sort.

An fp32 number maps to a 32-bit key of the same order. The search fixes the threshold's key four
bits at a time: one pass over the row weighs the tokens at or above each of 16 candidates (a count
for top-k, a mass for top-p) and keeps the largest candidate that still has enough. Eight passes
give the exact value of the boundary token, ties included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.streams import GREEDY_TEMPERATURE

_BLOCK = 1024
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_SIGN_OFFSET = tl.constexpr(1 << 31)
_LOWEST_KEY = tl.constexpr(-(1 << 31))


@triton.jit
def _load_clean(row_ptr, start, V, BLOCK: tl.constexpr):
    """Load fp32 logits; padding and NaN become -inf, -0 becomes +0 (they are ties)."""
    offs = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + offs, mask=offs < V, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("-inf"), x)
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def _order_key(x):
    """Map fp32 to int32 keys of the same order; -inf maps to the lowest key: it never counts."""
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x == float("-inf"), _LOWEST_KEY, key)


@triton.jit
def _weigh(
    row_ptr,
    V,
    candidates,
    row_max,
    temperature,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the weight of the tokens at or above each of 16 candidate keys, fp32 ``[16]``."""
    total = tl.zeros([16], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        x = _load_clean(row_ptr, start, V, BLOCK)
        key = _order_key(x)
        if COUNT:
            weight = tl.where(key > _LOWEST_KEY, 1.0, 0.0)
        else:
            weight = tl.exp((x - row_max) / temperature)
        reached = key[:, None] >= candidates[None, :]
        total += tl.sum(tl.where(reached, weight[:, None], 0.0), axis=0)
    return total


@triton.jit
def _search(row_ptr, V, needed, row_max, temperature, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest key whose tokens at or above it weigh at least ``needed``."""
    digits = tl.arange(0, 16)
    prefix = tl.full([], 0, tl.int64)  # the key + 2**31, as far as it is known
    for step in range(8):
        shift = 28 - 4 * step
        candidates = prefix + (digits.to(tl.int64) << shift)
        keys = (candidates - _SIGN_OFFSET).to(tl.int32)
        weight = _weigh(row_ptr, V, keys, row_max, temperature, COUNT, BLOCK)
        digit = tl.max(tl.where(weight >= needed, digits, 0), axis=0)
        prefix = prefix + (digit.to(tl.int64) << shift)
    return (prefix - _SIGN_OFFSET).to(tl.int32)


@triton.jit
def _thresholds_kernel(
    logits_ptr,
    stride_b,
    stride_q,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    out_ptr,
    Q,
    V,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    b = row // Q
    q = row % Q
    temperature = tl.load(temperature_ptr + b)
    top_k = tl.load(top_k_ptr + b)
    top_p = tl.load(top_p_ptr + b)
    threshold = tl.full([], float("-inf"), tl.float32)
    use_k = (top_k > 0) & (top_k < V)
    use_p = top_p < 1.0
    if (temperature >= _GREEDY) & (use_k | use_p):
        row_ptr = logits_ptr + b.to(tl.int64) * stride_b + q.to(tl.int64) * stride_q
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, V, BLOCK):
            largest = tl.maximum(largest, _load_clean(row_ptr, start, V, BLOCK))
        row_max = tl.max(largest, axis=0)
        row_max = tl.where(row_max == float("-inf"), 0.0, row_max)

        key = tl.full([], _LOWEST_KEY, tl.int32)
        if use_k:
            key = _search(row_ptr, V, top_k.to(tl.float32), row_max, temperature, True, BLOCK)
        if use_p:
            mass = tl.zeros([BLOCK], dtype=tl.float32)
            for start in range(0, V, BLOCK):
                x = _load_clean(row_ptr, start, V, BLOCK)
                weight = tl.exp((x - row_max) / temperature)
                mass += tl.where(_order_key(x) >= key, weight, 0.0)
            needed = top_p * tl.sum(mass, axis=0)
            found = _search(row_ptr, V, needed, row_max, temperature, False, BLOCK)
            key = tl.maximum(key, found)
        bits = key ^ ((key >> 31) & 0x7FFFFFFF)
        value = bits.to(tl.float32, bitcast=True)
        # The lowest key is no number: nothing was cut. At least the largest token always stays.
        value = tl.where(key == _LOWEST_KEY, float("-inf"), value)
        threshold = tl.where(value < row_max, value, row_max)
    tl.store(out_ptr + row, threshold)


def filter_thresholds(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the raw logit from which on tokens are kept by top-k, then top-p, ``[B, Q]`` fp32."""
    batch, num_queries, vocab_size = logits.shape
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    out = torch.empty((batch, num_queries), dtype=torch.float32, device=logits.device)
    if out.numel():
        _thresholds_kernel[(batch * num_queries,)](
            logits,
            logits.stride(0),
            logits.stride(1),
            temperature.contiguous(),
            top_k.contiguous(),
            top_p.contiguous(),
            out,
            num_queries,
            vocab_size,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return out

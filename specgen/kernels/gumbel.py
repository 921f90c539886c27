"""Sampling by the Gumbel-max trick in Triton.

One pass over the logits leaves, for every vocabulary block, its largest logit and its best score
relative to that; a per-row pass brings the scores to the row's maximum and picks the winner. So the
logits are read once, and the score is still ``(logit - row max) / T + noise``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.overlap import enter, overlap_options
from specgen.kernels.rng import id_gumbel, range_gumbel
from specgen.kernels.streams import GREEDY_TEMPERATURE

_BLOCK = 1024
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_NO_ID = tl.constexpr((1 << 31) - 1)


@triton.jit
def _sample_blocks_kernel(
    logits_ptr,
    stride_b,
    stride_q,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    sample_ptr,
    thresholds_ptr,
    target_ids_ptr,
    slot_ids_ptr,
    kept_ptr,
    kept_stride,
    max_ptr,
    score_ptr,
    token_ptr,
    Q,
    V,
    c2,
    SAMPLE: tl.constexpr,
    HAS_THRESHOLDS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    KEEPS_LOGITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    enter(OVERLAP)
    row = tl.program_id(0)
    block = tl.program_id(1)
    position = tl.load(positions_ptr + row)
    if position < 0:
        return
    b = row // Q
    q = row % Q
    start = block * BLOCK
    offs = start + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + b.to(tl.int64) * stride_b + q.to(tl.int64) * stride_q
    stored = tl.load(row_ptr + offs, mask=offs < V, other=float("-inf"))
    if KEEPS_LOGITS:
        slot = tl.load(slot_ids_ptr + b)
        keep_ptr = kept_ptr + slot.to(tl.int64) * kept_stride
        tl.store(keep_ptr + offs, stored, mask=(offs < V) & (slot >= 0))
    x = stored.to(tl.float32)
    invalid = (x != x) | (x == float("inf"))
    num_invalid = tl.sum(invalid.to(tl.int32), axis=0)
    x = tl.where(invalid, float("-inf"), x)
    block_max = tl.max(x, axis=0)
    ids = offs
    if HAS_IDS:
        ids = tl.load(target_ids_ptr + offs, mask=offs < V, other=_NO_ID)

    score = x
    if SAMPLE:
        temperature = tl.load(temperature_ptr + b)
        if temperature >= _GREEDY:
            seed = tl.load(seeds_ptr + b)
            sample = tl.load(sample_ptr + b)
            if HAS_IDS:
                noise = id_gumbel(seed, ids, position, c2, sample)
            else:
                noise = range_gumbel(seed, start, position, c2, sample, BLOCK)
            base = tl.where(block_max == float("-inf"), 0.0, block_max)
            kept = x > float("-inf")
            if HAS_THRESHOLDS:
                kept = kept & (x >= tl.load(thresholds_ptr + row))
            score = tl.where(kept, (x - base) / temperature + noise, float("-inf"))
    best = tl.max(score, axis=0)
    token = tl.min(tl.where(score == best, ids, _NO_ID), axis=0)

    at = row.to(tl.int64) * tl.num_programs(1) + block
    # A block maximum of +inf marks NaN or +inf.
    tl.store(max_ptr + at, tl.where(num_invalid > 0, float("inf"), block_max))
    tl.store(score_ptr + at, best)
    tl.store(token_ptr + at, token)


@triton.jit
def _sample_rows_kernel(
    temperature_ptr,
    positions_ptr,
    max_ptr,
    score_ptr,
    token_ptr,
    out_token_ptr,
    out_ok_ptr,
    Q,
    NUM_BLOCKS,
    SAMPLE: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    enter(OVERLAP)
    row = tl.program_id(0)
    position = tl.load(positions_ptr + row)
    blocks = tl.arange(0, BLOCKS)
    mask = (blocks < NUM_BLOCKS) & (position >= 0)
    at = row.to(tl.int64) * NUM_BLOCKS + blocks
    block_max = tl.load(max_ptr + at, mask=mask, other=float("-inf"))
    score = tl.load(score_ptr + at, mask=mask, other=float("-inf"))
    token = tl.load(token_ptr + at, mask=mask, other=_NO_ID)
    row_max = tl.max(block_max, axis=0)
    good = (row_max > float("-inf")) & (row_max < float("inf"))
    if SAMPLE:
        temperature = tl.load(temperature_ptr + row // Q)
        if temperature >= _GREEDY:
            shifted = score + (block_max - tl.where(good, row_max, 0.0)) / temperature
            score = tl.where(score > float("-inf"), shifted, float("-inf"))
    best = tl.max(score, axis=0)
    winner = tl.min(tl.where(score == best, token, _NO_ID), axis=0)
    inert = position < 0
    tl.store(out_token_ptr + row, tl.where(good, winner, -1))
    tl.store(out_ok_ptr + row, (good | inert).to(tl.int8))


def greedy_sample(
    logits: Tensor, positions: Tensor, target_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the argmax of every row; see the twin for shapes."""
    return _launch(logits, None, None, positions, None, 0, None, target_ids)


def gumbel_sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    sample_index: Tensor,
    stream: int,
    block_index: int,
    thresholds: Tensor | None,
    target_ids: Tensor | None,
    slot_ids: Tensor | None = None,
    kept_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row from ``softmax(logits / temperature)``; see the twin for shapes."""
    c2 = stream | (block_index << 8)
    return _launch(
        logits,
        temperature,
        seeds,
        positions,
        sample_index,
        c2,
        thresholds,
        target_ids,
        slot_ids,
        kept_logits,
    )


def _launch(
    logits: Tensor,
    temperature: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor,
    sample_index: Tensor | None,
    c2: int,
    thresholds: Tensor | None,
    target_ids: Tensor | None,
    slot_ids: Tensor | None = None,
    kept_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    batch, num_queries, vocab_size = logits.shape
    device = logits.device
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    if kept_logits is not None:
        assert num_queries == 1, "one draft a row"
        assert kept_logits.stride(-1) == 1, kept_logits.stride()
        assert kept_logits.dtype == logits.dtype, "what is sampled is what is kept"
    num_rows = batch * num_queries
    tokens = torch.empty((batch, num_queries), dtype=torch.int32, device=device)
    ok = torch.empty((batch, num_queries), dtype=torch.int8, device=device)
    if num_rows == 0:
        return tokens, ok.view(torch.bool)
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    block_max = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device)
    block_score = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device)
    block_token = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device)
    positions = positions.contiguous()
    temperature = _contiguous(temperature)
    thresholds = _contiguous(thresholds)
    sample = temperature is not None
    _sample_blocks_kernel[(num_rows, num_blocks)](
        logits,
        logits.stride(0),
        logits.stride(1),
        temperature,
        _contiguous(seeds),
        positions,
        _contiguous(sample_index),
        thresholds,
        target_ids,
        slot_ids,
        kept_logits,
        0 if kept_logits is None else kept_logits.stride(0),
        block_max,
        block_score,
        block_token,
        num_queries,
        vocab_size,
        c2,
        SAMPLE=sample,
        HAS_THRESHOLDS=thresholds is not None,
        HAS_IDS=target_ids is not None,
        KEEPS_LOGITS=kept_logits is not None,
        BLOCK=_BLOCK,
        **overlap_options(logits),
    )
    _sample_rows_kernel[(num_rows,)](
        temperature,
        positions,
        block_max,
        block_score,
        block_token,
        tokens,
        ok,
        num_queries,
        num_blocks,
        SAMPLE=sample,
        BLOCKS=triton.next_power_of_2(num_blocks),
        **overlap_options(logits),
    )
    return tokens, ok.view(torch.bool)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()

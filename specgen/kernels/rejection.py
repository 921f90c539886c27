"""Verification of draft tokens in Triton: the ``standard`` and ``synthetic`` rules.

1. Statistics of every vocabulary block of every judged row: largest logit, its id, and the sum of
   exponentials of the kept tokens (and the same of the draft's rows).
2. Per request: combine them into softmaxes, judge draft after draft, find tau.
3. Over the vocabulary blocks of row tau alone: scores of the residual and of the target.
4. Per request: pick the token and write the outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.rng import address_words, range_gumbel, word_uniform
from specgen.kernels.streams import ACCEPT, GREEDY_TEMPERATURE, TARGET

_BLOCK = 1024
_STATS_BLOCK = 4096
_LOG2E = tl.constexpr(1.4426950408889634)
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_NO_ID = tl.constexpr((1 << 31) - 1)
_ACCEPT = tl.constexpr(ACCEPT)
_TARGET = tl.constexpr(TARGET)


@triton.jit
def _softmax_blocks_kernel(
    logits_ptr,
    stride_row,
    stride_step,
    slot_ids_ptr,
    num_drafts_ptr,
    temperature_ptr,
    thresholds_ptr,
    max_ptr,
    sum_ptr,
    argmax_ptr,
    V,
    HAS_SLOTS: tl.constexpr,
    HAS_THRESHOLDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write block maximum (+inf: the block holds NaN or +inf), its id, and the kept sum."""
    b = tl.program_id(0)
    i = tl.program_id(1)
    block = tl.program_id(2)
    if i > tl.load(num_drafts_ptr + b):  # also every row of a padding request
        return
    row = b
    if HAS_SLOTS:
        row = tl.load(slot_ids_ptr + b)
    offs = block * BLOCK + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + row.to(tl.int64) * stride_row + i.to(tl.int64) * stride_step
    x = tl.load(row_ptr + offs, mask=offs < V, other=float("-inf")).to(tl.float32)
    # Every instruction counts here: NaN becomes +inf, whose block ends the row, whatever its sum.
    x = tl.where(x < float("inf"), x, float("inf"))
    block_max = tl.max(x, axis=0)
    argmax = tl.min(tl.where(x == block_max, offs, _NO_ID), axis=0)

    temperature = tl.load(temperature_ptr + b)
    scale_log2 = _LOG2E / tl.where(temperature < _GREEDY, 1.0, temperature)
    is_number = (block_max > float("-inf")) & (block_max < float("inf"))
    base = tl.where(is_number, block_max, 0.0)
    weights = tl.exp2((x - base) * scale_log2)  # 0 at -inf
    step = b * tl.num_programs(1) + i
    if HAS_THRESHOLDS:
        weights = tl.where(x >= tl.load(thresholds_ptr + step), weights, 0.0)
    total = tl.sum(weights, axis=0)

    at = step.to(tl.int64) * tl.num_programs(2) + block
    tl.store(max_ptr + at, block_max)
    tl.store(sum_ptr + at, total)
    tl.store(argmax_ptr + at, argmax)


@triton.jit
def _combine_softmax(
    max_ptr, sum_ptr, argmax_ptr, step, num_blocks, temperature, BLOCKS: tl.constexpr
):
    """Return row maximum, sum of exponentials relative to it, and argmax (lowest id)."""
    blocks = tl.arange(0, BLOCKS)
    mask = blocks < num_blocks
    at = step.to(tl.int64) * num_blocks + blocks
    block_max = tl.load(max_ptr + at, mask=mask, other=float("-inf"))
    block_sum = tl.load(sum_ptr + at, mask=mask, other=0.0)
    block_argmax = tl.load(argmax_ptr + at, mask=mask, other=_NO_ID)
    row_max = tl.max(block_max, axis=0)
    base = tl.where((row_max > float("-inf")) & (row_max < float("inf")), row_max, 0.0)
    scale = tl.exp(tl.minimum(block_max - base, 0.0) / temperature)
    total = tl.sum(tl.where(block_sum > 0.0, block_sum * scale, 0.0), axis=0)
    argmax = tl.min(tl.where(block_max == row_max, block_argmax, _NO_ID), axis=0)
    return row_max, total, argmax


@triton.jit
def _accept_uniform(seed, position, j, sample):
    zero = position * 0
    c2 = ((zero + j) << 8) | _ACCEPT
    w0, _w1, _w2, _w3 = address_words(seed, zero, position, c2, sample)
    return word_uniform(w0)


@triton.jit
def _judge_kernel(
    logits_ptr,
    stride_row,
    stride_step,
    draft_tokens_ptr,
    num_drafts_ptr,
    draft_logits_ptr,
    stride_slot,
    stride_draft,
    slot_ids_ptr,
    draft_ids_ptr,
    temperature_ptr,
    seeds_ptr,
    first_positions_ptr,
    sample_ptr,
    thresholds_ptr,
    synthetic_rates_ptr,
    max_ptr,
    sum_ptr,
    argmax_ptr,
    draft_max_ptr,
    draft_sum_ptr,
    draft_argmax_ptr,
    out_tau_ptr,
    out_stats_ptr,
    out_argmax_ptr,
    out_good_ptr,
    V,
    Vd,
    num_blocks,
    num_draft_blocks,
    K: tl.constexpr,
    HAS_DRAFT_LOGITS: tl.constexpr,
    HAS_DRAFT_IDS: tl.constexpr,
    HAS_THRESHOLDS: tl.constexpr,
    HAS_SYNTHETIC: tl.constexpr,
    BLOCKS: tl.constexpr,
    DRAFT_BLOCKS: tl.constexpr,
):
    """Judge the drafts of one request; write tau and the softmax statistics of row tau."""
    b = tl.program_id(0)
    num_drafts = tl.load(num_drafts_ptr + b)
    if num_drafts < 0:
        return
    num_drafts = tl.minimum(num_drafts, K)
    temperature = tl.load(temperature_ptr + b)
    greedy = temperature < _GREEDY
    temperature = tl.where(greedy, 1.0, temperature)
    seed = tl.load(seeds_ptr + b)
    first_position = tl.load(first_positions_ptr + b)
    sample = tl.load(sample_ptr + b)
    row_ptr = logits_ptr + b.to(tl.int64) * stride_row

    alive = num_drafts * 0 + 1
    tau = num_drafts * 0
    for i in range(K):
        # Past num_drafts everything read is garbage, and masked at the end.
        step = b * (K + 1) + i
        row_max, total, argmax = _combine_softmax(
            max_ptr, sum_ptr, argmax_ptr, step, num_blocks, temperature, BLOCKS
        )
        token = tl.load(draft_tokens_ptr + b * K + i)
        in_vocab = (token >= 0) & (token < V)
        x = tl.where(in_vocab, token, 0)
        logit = tl.load(row_ptr + i * stride_step + x).to(tl.float32)
        p = tl.exp((logit - row_max) / temperature) / total
        if HAS_THRESHOLDS:
            p = tl.where(logit >= tl.load(thresholds_ptr + step), p, 0.0)
        u = _accept_uniform(seed, first_position + i, i, sample)
        bound = u
        if HAS_DRAFT_LOGITS:
            slot = tl.load(slot_ids_ptr + b)
            draft_max, draft_total, _draft_argmax = _combine_softmax(
                draft_max_ptr,
                draft_sum_ptr,
                draft_argmax_ptr,
                b * K + i,
                num_draft_blocks,
                temperature,
                DRAFT_BLOCKS,
            )
            draft_id = x
            if HAS_DRAFT_IDS:
                draft_id = tl.load(draft_ids_ptr + x)
            inside = (draft_id >= 0) & (draft_id < Vd)
            draft_ptr = draft_logits_ptr + slot.to(tl.int64) * stride_slot + i * stride_draft
            draft_logit = tl.load(draft_ptr + tl.where(inside, draft_id, 0)).to(tl.float32)
            q = tl.exp((draft_logit - draft_max) / temperature) / draft_total
            bound = bound * tl.where(inside, q, 0.0)
        good = (row_max > float("-inf")) & (row_max < float("inf"))
        accept = tl.where(greedy, (token == argmax).to(tl.int32), (bound < p).to(tl.int32))
        if HAS_SYNTHETIC:
            # The probabilities stay in the condition, or the compiler would drop their work.
            usable = (p >= 0.0) & (bound >= 0.0)
            accept = (usable & (u < tl.load(synthetic_rates_ptr + i))).to(tl.int32)
        judged = in_vocab & good & (i < num_drafts)
        alive = alive * tl.where(judged, accept, 0)
        tau = tau + alive

    row_max, total, argmax = _combine_softmax(
        max_ptr, sum_ptr, argmax_ptr, b * (K + 1) + tau, num_blocks, temperature, BLOCKS
    )
    good = (row_max > float("-inf")) & (row_max < float("inf"))
    tl.store(out_tau_ptr + b, tau)
    tl.store(out_argmax_ptr + b, argmax)
    tl.store(out_good_ptr + b, good.to(tl.int32))
    tl.store(out_stats_ptr + b * 4, row_max)
    tl.store(out_stats_ptr + b * 4 + 1, total)
    if HAS_DRAFT_LOGITS:
        draft_step = b * K + tl.minimum(tau, K - 1)
        draft_max, draft_total, _draft_argmax = _combine_softmax(
            draft_max_ptr,
            draft_sum_ptr,
            draft_argmax_ptr,
            draft_step,
            num_draft_blocks,
            temperature,
            DRAFT_BLOCKS,
        )
        tl.store(out_stats_ptr + b * 4 + 2, draft_max)
        tl.store(out_stats_ptr + b * 4 + 3, draft_total)


@triton.jit
def _score_blocks_kernel(
    logits_ptr,
    stride_row,
    stride_step,
    draft_tokens_ptr,
    num_drafts_ptr,
    draft_logits_ptr,
    stride_slot,
    stride_draft,
    slot_ids_ptr,
    draft_ids_ptr,
    temperature_ptr,
    seeds_ptr,
    first_positions_ptr,
    sample_ptr,
    thresholds_ptr,
    tau_ptr,
    stats_ptr,
    good_ptr,
    target_score_ptr,
    target_token_ptr,
    residual_score_ptr,
    residual_token_ptr,
    V,
    Vd,
    K: tl.constexpr,
    HAS_DRAFT_LOGITS: tl.constexpr,
    HAS_DRAFT_IDS: tl.constexpr,
    HAS_THRESHOLDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the best score and its id of one block of row tau, for p and for the residual."""
    b = tl.program_id(0)
    block = tl.program_id(1)
    num_drafts = tl.load(num_drafts_ptr + b)
    if num_drafts < 0:
        return
    temperature = tl.load(temperature_ptr + b)
    if temperature < _GREEDY:
        return
    if tl.load(good_ptr + b) == 0:
        return
    tau = tl.load(tau_ptr + b)
    row_max = tl.load(stats_ptr + b * 4)
    start = block * BLOCK
    offs = start + tl.arange(0, BLOCK)
    in_vocab = offs < V
    row_ptr = logits_ptr + b.to(tl.int64) * stride_row + tau.to(tl.int64) * stride_step
    x = tl.load(row_ptr + offs, mask=in_vocab, other=float("-inf")).to(tl.float32)
    kept = x > float("-inf")
    if HAS_THRESHOLDS:
        kept = kept & (x >= tl.load(thresholds_ptr + b * (K + 1) + tau))
    scaled = tl.where(kept, (x - row_max) / temperature, float("-inf"))

    seed = tl.load(seeds_ptr + b)
    position = tl.load(first_positions_ptr + b) + tau
    sample = tl.load(sample_ptr + b)
    noise = range_gumbel(seed, start, position, _TARGET, sample, BLOCK)
    score = scaled + noise
    at = b * tl.num_programs(1) + block
    best = tl.max(score, axis=0)
    tl.store(target_score_ptr + at, best)
    tl.store(target_token_ptr + at, tl.min(tl.where(score == best, offs, _NO_ID), axis=0))

    if K > 0:
        draft_row = tl.minimum(tau, K - 1)
        if HAS_DRAFT_LOGITS:
            p = tl.exp(scaled) / tl.load(stats_ptr + b * 4 + 1)
            draft_max = tl.load(stats_ptr + b * 4 + 2)
            draft_total = tl.load(stats_ptr + b * 4 + 3)
            slot = tl.load(slot_ids_ptr + b)
            draft_ids = offs
            if HAS_DRAFT_IDS:
                draft_ids = tl.load(draft_ids_ptr + offs, mask=in_vocab, other=-1)
            inside = in_vocab & (draft_ids >= 0) & (draft_ids < Vd)
            draft_ptr = (
                draft_logits_ptr
                + slot.to(tl.int64) * stride_slot
                + draft_row.to(tl.int64) * stride_draft
            )
            draft_x = tl.load(draft_ptr + draft_ids, mask=inside, other=float("-inf"))
            draft_x = draft_x.to(tl.float32)
            q = tl.exp((draft_x - draft_max) / temperature) / draft_total
            weight = p - tl.where(inside, q, 0.0)
            positive = weight > 0.0
            log_weight = tl.log(tl.where(positive, weight, 1.0))
            residual = tl.where(positive, log_weight + noise, float("-inf"))
        else:
            draft_token = tl.load(draft_tokens_ptr + b * K + draft_row)
            residual = tl.where(offs == draft_token, float("-inf"), score)
        best = tl.max(residual, axis=0)
        tl.store(residual_score_ptr + at, best)
        tl.store(residual_token_ptr + at, tl.min(tl.where(residual == best, offs, _NO_ID), axis=0))


@triton.jit
def _best_block(score_ptr, token_ptr, b, num_blocks, BLOCKS: tl.constexpr):
    """Return the best score of a request and its token, ties to the lowest id."""
    blocks = tl.arange(0, BLOCKS)
    mask = blocks < num_blocks
    score = tl.load(score_ptr + b * num_blocks + blocks, mask=mask, other=float("-inf"))
    token = tl.load(token_ptr + b * num_blocks + blocks, mask=mask, other=_NO_ID)
    best = tl.max(score, axis=0)
    return best, tl.min(tl.where(score == best, token, _NO_ID), axis=0)


@triton.jit
def _emit_kernel(
    draft_tokens_ptr,
    num_drafts_ptr,
    temperature_ptr,
    tau_ptr,
    argmax_ptr,
    good_ptr,
    target_score_ptr,
    target_token_ptr,
    residual_score_ptr,
    residual_token_ptr,
    out_tokens_ptr,
    out_num_ptr,
    out_ok_ptr,
    num_blocks,
    K: tl.constexpr,
    HAS_SYNTHETIC: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write tokens, their number and ok of one request."""
    b = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    num_drafts = tl.load(num_drafts_ptr + b)
    num_sampled = num_drafts * 0
    ok = num_drafts * 0 + 1
    tokens = columns * 0 - 1
    if num_drafts >= 0:
        ok = tl.load(good_ptr + b)
        if ok != 0:
            tau = tl.load(tau_ptr + b)
            num_sampled = tau + 1
            token = tl.load(argmax_ptr + b)
            if tl.load(temperature_ptr + b) >= _GREEDY:
                _score, token = _best_block(
                    target_score_ptr, target_token_ptr, b, num_blocks, BLOCKS
                )
                if K > 0:
                    best, residual_token = _best_block(
                        residual_score_ptr, residual_token_ptr, b, num_blocks, BLOCKS
                    )
                    rejected = tau < tl.minimum(num_drafts, K)
                    use_residual = rejected & (best > float("-inf"))
                    if not HAS_SYNTHETIC:
                        token = tl.where(use_residual, residual_token, token)
            tokens = tl.where(columns == tau, token, -1)
            if K > 0:
                accepted = columns < tau
                drafts = tl.load(draft_tokens_ptr + b * K + columns, mask=accepted, other=-1)
                tokens = tl.where(accepted, drafts, tokens)
    tl.store(out_tokens_ptr + b * (K + 1) + columns, tokens, mask=columns < K + 1)
    tl.store(out_num_ptr + b, num_sampled)
    tl.store(out_ok_ptr + b, ok.to(tl.int8))


def rejection_sample(
    target_logits: Tensor,
    draft_tokens: Tensor,
    num_draft_tokens: Tensor,
    draft_logits: Tensor | None,
    slot_ids: Tensor,
    draft_ids: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    first_positions: Tensor,
    sample_index: Tensor,
    thresholds: Tensor | None,
    synthetic_rates: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Judge the drafts of every row and draw the token after them; see the twin for shapes."""
    batch, num_steps, vocab_size = target_logits.shape
    k = num_steps - 1
    device = target_logits.device
    tokens = torch.empty((batch, num_steps), dtype=torch.int32, device=device)
    num_sampled = torch.empty((batch,), dtype=torch.int32, device=device)
    ok = torch.empty((batch,), dtype=torch.int8, device=device)
    if batch == 0:
        return tokens, num_sampled, ok.view(torch.bool)
    if target_logits.stride(-1) != 1:
        target_logits = target_logits.contiguous()
    if k == 0:
        draft_logits = None
    draft_tokens = draft_tokens.contiguous()
    num_draft_tokens = num_draft_tokens.contiguous()
    slot_ids = slot_ids.contiguous()
    temperature = temperature.contiguous()
    seeds = seeds.contiguous()
    first_positions = first_positions.contiguous()
    sample_index = sample_index.contiguous()
    if thresholds is not None:
        thresholds = thresholds.contiguous()
    if synthetic_rates is not None:
        synthetic_rates = synthetic_rates.contiguous()
    has_thresholds = thresholds is not None
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    blocks = triton.next_power_of_2(num_blocks)

    stats = _softmax_blocks(
        target_logits, num_steps, None, num_draft_tokens, temperature, thresholds
    )
    draft_vocab = 0
    draft_stats: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    draft_strides = (0, 0)
    if draft_logits is not None:
        if draft_logits.stride(-1) != 1:
            draft_logits = draft_logits.contiguous()
        draft_vocab = draft_logits.shape[-1]
        draft_strides = (draft_logits.stride(0), draft_logits.stride(1))
        draft_stats = _softmax_blocks(
            draft_logits, k, slot_ids, num_draft_tokens, temperature, None
        )
    num_stats_blocks = triton.cdiv(vocab_size, _STATS_BLOCK)
    num_draft_blocks = triton.cdiv(draft_vocab, _STATS_BLOCK)

    tau = torch.empty((batch,), dtype=torch.int32, device=device)
    argmax = torch.empty((batch,), dtype=torch.int32, device=device)
    good = torch.empty((batch,), dtype=torch.int32, device=device)
    row_stats = torch.empty((batch, 4), dtype=torch.float32, device=device)
    inputs = (
        target_logits,
        target_logits.stride(0),
        target_logits.stride(1),
        draft_tokens,
        num_draft_tokens,
        draft_logits,
        *draft_strides,
        slot_ids,
        draft_ids,
        temperature,
        seeds,
        first_positions,
        sample_index,
        thresholds,
    )
    _judge_kernel[(batch,)](
        *inputs,
        synthetic_rates,
        *stats,
        *draft_stats,
        tau,
        row_stats,
        argmax,
        good,
        vocab_size,
        draft_vocab,
        num_stats_blocks,
        num_draft_blocks,
        K=k,
        HAS_DRAFT_LOGITS=draft_logits is not None,
        HAS_DRAFT_IDS=draft_ids is not None,
        HAS_THRESHOLDS=has_thresholds,
        HAS_SYNTHETIC=synthetic_rates is not None,
        BLOCKS=triton.next_power_of_2(num_stats_blocks),
        DRAFT_BLOCKS=triton.next_power_of_2(max(num_draft_blocks, 1)),
        num_warps=1,
    )
    target_score = torch.empty((batch, num_blocks), dtype=torch.float32, device=device)
    target_token = torch.empty((batch, num_blocks), dtype=torch.int32, device=device)
    residual_score = torch.empty((batch, num_blocks), dtype=torch.float32, device=device)
    residual_token = torch.empty((batch, num_blocks), dtype=torch.int32, device=device)
    _score_blocks_kernel[(batch, num_blocks)](
        *inputs,
        tau,
        row_stats,
        good,
        target_score,
        target_token,
        residual_score,
        residual_token,
        vocab_size,
        draft_vocab,
        K=k,
        HAS_DRAFT_LOGITS=draft_logits is not None,
        HAS_DRAFT_IDS=draft_ids is not None,
        HAS_THRESHOLDS=has_thresholds,
        BLOCK=_BLOCK,
    )
    _emit_kernel[(batch,)](
        draft_tokens,
        num_draft_tokens,
        temperature,
        tau,
        argmax,
        good,
        target_score,
        target_token,
        residual_score,
        residual_token,
        tokens,
        num_sampled,
        ok,
        num_blocks,
        K=k,
        HAS_SYNTHETIC=synthetic_rates is not None,
        BLOCKS=blocks,
        COLUMNS=triton.next_power_of_2(num_steps),
        num_warps=1,
    )
    return tokens, num_sampled, ok.view(torch.bool)


def _softmax_blocks(
    logits: Tensor,
    num_steps: int,
    slot_ids: Tensor | None,
    num_drafts: Tensor,
    temperature: Tensor,
    thresholds: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return block maximum, kept sum and argmax, each ``[B, num_steps, num_blocks]``."""
    batch, vocab_size = num_drafts.shape[0], logits.shape[-1]
    num_blocks = triton.cdiv(vocab_size, _STATS_BLOCK)
    shape = (batch, num_steps, num_blocks)
    block_max = torch.empty(shape, dtype=torch.float32, device=logits.device)
    block_sum = torch.empty(shape, dtype=torch.float32, device=logits.device)
    block_argmax = torch.empty(shape, dtype=torch.int32, device=logits.device)
    _softmax_blocks_kernel[shape](
        logits,
        logits.stride(0),
        logits.stride(1),
        slot_ids,
        num_drafts,
        temperature,
        thresholds,
        block_max,
        block_sum,
        block_argmax,
        vocab_size,
        HAS_SLOTS=slot_ids is not None,
        HAS_THRESHOLDS=thresholds is not None,
        BLOCK=_STATS_BLOCK,
    )
    return block_max, block_sum, block_argmax

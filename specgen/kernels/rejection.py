"""Verification of draft tokens in Triton: the ``standard`` and ``synthetic`` rules.

1. Statistics of every vocabulary block of every row that may be judged, of the target and of the
   draft: the only pass over all the logits.
2. One program a request combines them into softmaxes, judges the drafts, and draws the token behind
   those accepted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.draw import draw_token
from specgen.kernels.lane_noise import largest_noise
from specgen.kernels.lanes import LANE_GROUP, NUM_LANES, NUM_LOUDEST, VOCAB_BLOCK
from specgen.kernels.overlap import overlap_options, release, wait
from specgen.kernels.rng import address_words, word_uniform
from specgen.kernels.row_statistics import combine_blocks, find_argmax, load_blocks
from specgen.kernels.step_statistics import step_statistics
from specgen.kernels.streams import ACCEPT, GREEDY_TEMPERATURE, TARGET

_JUDGE_WARPS = 4
_JUDGE_LANES = 32  # read at a time
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_ACCEPT = tl.constexpr(ACCEPT)
_TARGET = tl.constexpr(TARGET)


@triton.jit
def _pick(values, steps, step):
    """Return ``values[step]``."""
    return tl.sum(tl.where(steps == step, values, 0), axis=0)


@triton.jit(do_not_specialize=["k"])
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
    first_ptr,
    lane_max_ptr,
    draft_max_ptr,
    draft_sum_ptr,
    lane_noise_ptr,
    list_ptr,
    out_tokens_ptr,
    out_num_ptr,
    out_ok_ptr,
    V,
    Vd,
    num_blocks,
    num_draft_blocks,
    k,
    HAS_DRAFT_LOGITS: tl.constexpr,
    HAS_DRAFT_IDS: tl.constexpr,
    HAS_THRESHOLDS: tl.constexpr,
    HAS_SYNTHETIC: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DRAFT_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    THREADS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Judge the drafts of one request, draw the token behind those accepted, write the outputs."""
    release(OVERLAP)
    # First all that does not depend on the statistics, which may still be made.
    b = tl.program_id(0)
    num_drafts = tl.load(num_drafts_ptr + b)
    temperature_given = tl.load(temperature_ptr + b)
    seed = tl.load(seeds_ptr + b)
    first_position = tl.load(first_positions_ptr + b)
    sample = tl.load(sample_ptr + b)
    row = b * (k + 1)
    row_ptr = logits_ptr + b.to(tl.int64) * stride_row
    padding = num_drafts < 0
    num_drafts = tl.minimum(num_drafts, k)
    is_sampled = temperature_given >= _GREEDY
    temperature = tl.where(is_sampled, temperature_given, 1.0)
    has_probs = is_sampled
    if HAS_SYNTHETIC:
        has_probs = temperature > 0.0
    # All rows at once: [STEPS], of which 0 .. num_drafts count.
    steps = tl.arange(0, STEPS)
    is_row = steps <= num_drafts
    is_draft = steps < num_drafts
    has_p = steps < tl.where(has_probs, num_drafts, 0)
    threshold = 0.0
    if HAS_THRESHOLDS:
        thresholds = tl.load(thresholds_ptr + row + steps, mask=is_row, other=0.0)
    drafts = tl.full([STEPS], -1, tl.int32)
    logit = steps * 0.0
    draft_ptr = draft_logits_ptr
    if STEPS > 1:
        drafts = tl.load(draft_tokens_ptr + b * k + steps, mask=is_draft, other=-1)
        in_vocab = (drafts >= 0) & (drafts < V)
        x = tl.where(in_vocab, drafts, 0)
        logit = tl.load(row_ptr + steps.to(tl.int64) * stride_step + x, mask=is_draft, other=0.0)
        logit = logit.to(tl.float32)
        c2 = (steps << 8) | _ACCEPT
        w0, _w1, _w2, _w3 = address_words(seed, steps * 0, first_position + steps, c2, sample)
        u = word_uniform(w0)
        if HAS_SYNTHETIC:
            rate = tl.load(synthetic_rates_ptr + steps, mask=is_draft, other=0.0)
        if HAS_DRAFT_LOGITS:
            slot = tl.load(slot_ids_ptr + b).to(tl.int64)
            draft_ptr += slot * stride_slot
            draft_id = x
            if HAS_DRAFT_IDS:
                draft_id = tl.load(draft_ids_ptr + x)
            inside = (draft_id >= 0) & (draft_id < Vd)
            target = draft_ptr + steps.to(tl.int64) * stride_draft + draft_id
            draft_logit = tl.load(target, mask=is_draft & inside, other=0.0).to(tl.float32)

    wait(OVERLAP)
    block_max, block_sum = load_blocks(
        max_ptr, sum_ptr, row, steps, is_row, has_p, num_blocks, BLOCKS
    )
    if HAS_DRAFT_LOGITS:
        draft_block_max, draft_block_sum = load_blocks(
            draft_max_ptr, draft_sum_ptr, b * k, steps, has_p, has_p, num_draft_blocks, DRAFT_BLOCKS
        )
    row_max, total = combine_blocks(block_max, block_sum, temperature)
    argmax = steps * 0
    if temperature_given < _GREEDY:
        argmax = find_argmax(
            row_ptr,
            stride_step,
            steps,
            is_row,
            V,
            first_ptr,
            row,
            num_blocks,
            block_max,
            row_max,
            BLOCKS,
            GROUP,
        )
    good = (row_max > float("-inf")) & (row_max < float("inf"))
    draft_max = row_max
    draft_total = total
    tau = num_drafts * 0
    if STEPS > 1:
        p = tl.exp((logit - row_max) / temperature) / total
        if HAS_THRESHOLDS:
            p = tl.where(logit >= thresholds, p, 0.0)
        bound = u
        if HAS_DRAFT_LOGITS:
            draft_max, draft_total = combine_blocks(draft_block_max, draft_block_sum, temperature)
            q = tl.exp((draft_logit - draft_max) / temperature) / draft_total
            bound = bound * tl.where(inside, q, 0.0)
        is_argmax = drafts == argmax
        accept = tl.where(is_sampled, (bound < p).to(tl.int32), is_argmax.to(tl.int32)) != 0
        if HAS_SYNTHETIC:
            # The probabilities stay in the condition, or the compiler would drop their work.
            accept = (p >= 0.0) & (bound >= 0.0) & (u < rate)
        accept = accept & in_vocab & good & is_draft
        tau = tl.min(tl.where(accept, STEPS, steps), axis=0)

    # Row tau. A bad one accepted nothing: it ends the request.
    top = _pick(row_max, steps, tau)
    ok = (top > float("-inf")) & (top < float("inf"))
    token = _pick(tl.where(is_sampled, drafts, argmax), steps, tau)
    if ok & is_sampled:
        at = (row + tau).to(tl.int64) * num_blocks
        if HAS_THRESHOLDS:
            threshold = _pick(thresholds, steps, tau)
        # A rejection leaves the residual; without q, that is all tokens but the draft.
        HAS_RESIDUAL: tl.constexpr = HAS_DRAFT_LOGITS and not HAS_SYNTHETIC
        rejected = tau < num_drafts
        if HAS_SYNTHETIC:
            rejected = tau < 0
        banned = tau * 0 - 1
        kept_banned = banned
        q_max = top
        q_sum = top
        sum_exp = top
        if HAS_RESIDUAL:
            draft_ptr += tau.to(tl.int64) * stride_draft
            q_max = _pick(draft_max, steps, tau)
            q_sum = _pick(draft_total, steps, tau)
            sum_exp = _pick(total, steps, tau)
        else:
            banned = tl.where(rejected, token, -1)
            kept_banned = banned
            if HAS_THRESHOLDS:
                kept_banned = tl.where(_pick(logit, steps, tau) >= threshold, banned, -1)
        best = top * 0.0
        drawn = token
        of_residual = rejected
        remains = tau * 0 + 1
        while remains > 0:
            best, drawn = draw_token(
                (
                    row_ptr + tau.to(tl.int64) * stride_step,
                    V,
                    top,
                    temperature,
                    threshold,
                    banned,
                    of_residual,
                    sum_exp,
                ),
                (draft_ptr, draft_ids_ptr, Vd, q_max, q_sum, temperature),
                (seed, first_position + tau, _TARGET, sample),
                lane_max_ptr + at * LANES,
                lane_noise_ptr + at * (2 * LANES),
                list_ptr + b * (BLOCKS * LANES),
                num_blocks,
                HAS_THRESHOLDS=HAS_THRESHOLDS,
                HAS_RESIDUAL=HAS_RESIDUAL,
                HAS_DRAFT_IDS=HAS_DRAFT_IDS,
                BLOCK=BLOCK,
                BLOCKS=BLOCKS,
                GROUP=GROUP,
                LANES=LANES,
                THREADS=THREADS,
                WIDTH=WIDTH,
            )
            # No weight of the residual is left: p of that row.
            remains = 0
            if HAS_RESIDUAL:
                remains = (of_residual & (best == float("-inf"))).to(tl.int32)
            of_residual = tau < 0
        # Without a score only a banned token is kept, or (a filter of no use) nothing.
        token = tl.where(best > float("-inf"), drawn, tl.maximum(kept_banned, 0))
    num_sampled = tl.where(ok, tau + 1, 0)
    tokens = tl.where(steps == tau, token, drafts)
    tokens = tl.where(steps < num_sampled, tokens, -1)
    tl.store(out_tokens_ptr + row + steps, tokens, mask=steps <= k)
    tl.store(out_num_ptr + b, num_sampled)
    tl.store(out_ok_ptr + b, (ok | padding).to(tl.int8))


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
    lane_noise: Tensor | None = None,
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
    draft_vocab = 0
    draft_strides = (0, 0)
    if draft_logits is not None:
        if draft_logits.stride(-1) != 1:
            draft_logits = draft_logits.contiguous()
        draft_vocab = draft_logits.shape[-1]
        draft_strides = (draft_logits.stride(0), draft_logits.stride(1))
    num_draft_tokens = num_draft_tokens.contiguous()
    slot_ids = slot_ids.contiguous()
    temperature = temperature.contiguous()
    if thresholds is not None:
        thresholds = thresholds.contiguous()
    if synthetic_rates is not None:
        synthetic_rates = synthetic_rates.contiguous()
    row_arguments = (temperature, seeds, first_positions, sample_index)
    if lane_noise is None:
        lane_noise = largest_noise(num_draft_tokens, *row_arguments, num_steps, vocab_size)
    num_blocks = triton.cdiv(vocab_size, VOCAB_BLOCK)
    num_draft_blocks = triton.cdiv(draft_vocab, VOCAB_BLOCK)
    shape = (batch, num_steps, num_blocks, NUM_LOUDEST, NUM_LANES)
    assert lane_noise.shape == shape, lane_noise.shape
    num_row_blocks = triton.next_power_of_2(num_blocks)
    # Entries of a list have a lane above 16 bits of noise: vocabularies below 2**21.
    assert num_row_blocks * NUM_LANES <= 1 << 15, vocab_size
    lists = torch.empty((batch, num_row_blocks * NUM_LANES), dtype=torch.int32, device=device)
    options = overlap_options(target_logits)
    statistics = step_statistics(
        target_logits,
        draft_logits,
        slot_ids,
        num_draft_tokens,
        temperature,
        thresholds,
        has_synthetic=synthetic_rates is not None,
        options=options,
    )
    _judge_kernel[(batch,)](
        target_logits,
        target_logits.stride(0),
        target_logits.stride(1),
        draft_tokens.contiguous(),
        num_draft_tokens,
        # A tuple in a kernel holds no None: what is not there is some other tensor, never read.
        target_logits if draft_logits is None else draft_logits,
        *draft_strides,
        slot_ids,
        slot_ids if draft_ids is None else draft_ids,
        temperature,
        seeds.contiguous(),
        first_positions.contiguous(),
        sample_index.contiguous(),
        thresholds,
        synthetic_rates,
        *statistics,
        lane_noise,
        lists,
        tokens,
        num_sampled,
        ok,
        vocab_size,
        draft_vocab,
        num_blocks,
        num_draft_blocks,
        k,
        HAS_DRAFT_LOGITS=draft_logits is not None,
        HAS_DRAFT_IDS=draft_ids is not None,
        HAS_THRESHOLDS=thresholds is not None,
        HAS_SYNTHETIC=synthetic_rates is not None,
        STEPS=triton.next_power_of_2(num_steps),
        BLOCKS=num_row_blocks,
        DRAFT_BLOCKS=triton.next_power_of_2(max(num_draft_blocks, 1)),
        GROUP=LANE_GROUP,
        BLOCK=VOCAB_BLOCK,
        LANES=NUM_LANES,
        THREADS=32 * _JUDGE_WARPS,
        WIDTH=_JUDGE_LANES,
        num_warps=_JUDGE_WARPS,
        **options,
    )
    return tokens, num_sampled, ok.view(torch.bool)

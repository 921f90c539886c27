"""Verification of draft tokens in Triton: the ``standard`` and ``synthetic`` rules.

1. Statistics of every vocabulary block of every row that may be judged, of the target and of the
   draft: the only pass over all the logits.
2. Programs of a request: combine them into softmaxes and judge the drafts, each for itself. Where a
   token is drawn they share the vocabulary of row tau, and the last to finish picks and writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.draw import draw_token, log_residual
from specgen.kernels.overlap import enter, overlap_options
from specgen.kernels.rng import address_words, id_gumbel, word_uniform
from specgen.kernels.row_statistics import (
    NO_ID,
    combine_blocks,
    find_argmax,
    find_runner_up,
    store_block,
)
from specgen.kernels.streams import ACCEPT, GREEDY_TEMPERATURE, TARGET

_STATS_BLOCK = 4096
_STATS_WARPS = 2
_GROUP = 8  # logits of one wide load
_DRAW_BLOCK = 512  # divides the block of the statistics
_DRAW_WARPS = 1  # nobody waits for another warp
# Programs that draw: enough to fill a GPU, and few enough that most look at several blocks, with a
# score to beat from the first on.
_DRAW_PROGRAMS = 4096
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_ACCEPT = tl.constexpr(ACCEPT)
_TARGET = tl.constexpr(TARGET)


@triton.jit
def _statistics_kernel(
    logits_ptr,
    stride_row,
    stride_step,
    draft_logits_ptr,
    stride_slot,
    stride_draft,
    slot_ids_ptr,
    num_drafts_ptr,
    temperature_ptr,
    thresholds_ptr,
    max_ptr,
    sum_ptr,
    first_ptr,
    draft_max_ptr,
    draft_sum_ptr,
    finished_ptr,
    V,
    Vd,
    num_blocks,
    num_draft_blocks,
    K: tl.constexpr,
    HAS_DRAFT_LOGITS: tl.constexpr,
    HAS_THRESHOLDS: tl.constexpr,
    HAS_SYNTHETIC: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Statistics of one block: steps 0 .. K are rows of the target, those behind of the draft."""
    enter(OVERLAP)
    b = tl.program_id(0)
    step = tl.program_id(1)
    block = tl.program_id(2)
    if (step == 0) & (block == 0):
        tl.store(finished_ptr + b, 0)
    num_drafts = tl.minimum(tl.load(num_drafts_ptr + b), K)
    temperature = tl.load(temperature_ptr + b)
    is_sampled = temperature >= _GREEDY
    temperature = tl.where(is_sampled, temperature, 1.0)
    # Greedy rows are judged by their argmax. (Synthetic rates measure the time of real ones.)
    has_probs = is_sampled
    if HAS_SYNTHETIC:
        has_probs = temperature > 0.0
    if step <= K:
        if (step <= num_drafts) & (block < num_blocks):
            row = b * (K + 1) + step
            threshold = 0.0
            if HAS_THRESHOLDS:
                threshold = tl.load(thresholds_ptr + row)
            store_block(
                logits_ptr + b.to(tl.int64) * stride_row + step.to(tl.int64) * stride_step,
                block * BLOCK,
                V,
                temperature,
                threshold,
                has_probs & (step < num_drafts),
                max_ptr,
                sum_ptr,
                first_ptr,
                row.to(tl.int64) * num_blocks + block,
                HAS_THRESHOLDS=HAS_THRESHOLDS,
                HAS_FIRST=True,
                BLOCK=BLOCK,
                GROUP=GROUP,
            )
    elif HAS_DRAFT_LOGITS:
        i = step - (K + 1)
        if has_probs & (i < num_drafts) & (block < num_draft_blocks):
            slot = tl.load(slot_ids_ptr + b).to(tl.int64)
            store_block(
                draft_logits_ptr + slot * stride_slot + i.to(tl.int64) * stride_draft,
                block * BLOCK,
                Vd,
                temperature,
                0.0,
                True,
                draft_max_ptr,
                draft_sum_ptr,
                None,
                (b * K + i).to(tl.int64) * num_draft_blocks + block,
                HAS_THRESHOLDS=False,
                HAS_FIRST=False,
                BLOCK=BLOCK,
                GROUP=GROUP,
            )


@triton.jit
def _pick(values, steps, step):
    """Return ``values[step]``."""
    return tl.sum(tl.where(steps == step, values, 0), axis=0)


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
    first_ptr,
    draft_max_ptr,
    draft_sum_ptr,
    finished_ptr,
    score_ptr,
    token_ptr,
    out_tokens_ptr,
    out_num_ptr,
    out_ok_ptr,
    V,
    Vd,
    num_blocks,
    num_draft_blocks,
    K: tl.constexpr,
    HAS_DRAFT_LOGITS: tl.constexpr,
    HAS_DRAFT_IDS: tl.constexpr,
    HAS_THRESHOLDS: tl.constexpr,
    HAS_SYNTHETIC: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DRAFT_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    STATS_BLOCK: tl.constexpr,
    DRAW_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Judge the drafts of one request, draw the token behind those accepted, write the outputs."""
    enter(OVERLAP)
    b = tl.program_id(0)
    part = tl.program_id(1)
    num_drafts = tl.load(num_drafts_ptr + b)
    padding = num_drafts < 0
    temperature = tl.load(temperature_ptr + b)
    is_sampled = temperature >= _GREEDY
    if (part > 0) & (padding | (temperature < _GREEDY)):
        return
    num_drafts = tl.minimum(num_drafts, K)
    temperature = tl.where(is_sampled, temperature, 1.0)
    has_probs = is_sampled
    if HAS_SYNTHETIC:
        has_probs = temperature > 0.0
    row_ptr = logits_ptr + b.to(tl.int64) * stride_row

    # All rows at once: [STEPS], of which 0 .. num_drafts count.
    steps = tl.arange(0, STEPS)
    is_row = steps <= num_drafts
    is_draft = steps < num_drafts
    has_p = steps < tl.where(has_probs, num_drafts, 0)
    row = b * (K + 1)
    block_max, row_max, total = combine_blocks(
        max_ptr,
        sum_ptr,
        row,
        steps,
        is_row,
        has_p,
        num_blocks,
        temperature,
        BLOCKS,
    )
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
    threshold = 0.0
    if HAS_THRESHOLDS:
        thresholds = tl.load(thresholds_ptr + row + steps, mask=is_row, other=0.0)
    seed = tl.load(seeds_ptr + b)
    first_position = tl.load(first_positions_ptr + b)
    sample = tl.load(sample_ptr + b)
    draft_ptr = draft_logits_ptr
    draft_max = row_max
    draft_total = total

    drafts = tl.full([STEPS], -1, tl.int32)
    tau = num_drafts * 0
    if K > 0:
        drafts = tl.load(draft_tokens_ptr + b * K + steps, mask=is_draft, other=-1)
        in_vocab = (drafts >= 0) & (drafts < V)
        x = tl.where(in_vocab, drafts, 0)
        logit = tl.load(row_ptr + steps.to(tl.int64) * stride_step + x, mask=is_draft, other=0.0)
        logit = logit.to(tl.float32)
        p = tl.exp((logit - row_max) / temperature) / total
        if HAS_THRESHOLDS:
            p = tl.where(logit >= thresholds, p, 0.0)
        c2 = (steps << 8) | _ACCEPT
        w0, _w1, _w2, _w3 = address_words(seed, steps * 0, first_position + steps, c2, sample)
        u = word_uniform(w0)
        bound = u
        if HAS_DRAFT_LOGITS:
            slot = tl.load(slot_ids_ptr + b).to(tl.int64)
            draft_ptr += slot * stride_slot
            _, draft_max, draft_total = combine_blocks(
                draft_max_ptr,
                draft_sum_ptr,
                b * K,
                steps,
                has_p,
                has_p,
                num_draft_blocks,
                temperature,
                DRAFT_BLOCKS,
            )
            draft_id = x
            if HAS_DRAFT_IDS:
                draft_id = tl.load(draft_ids_ptr + x)
            inside = (draft_id >= 0) & (draft_id < Vd)
            target = draft_ptr + steps.to(tl.int64) * stride_draft + draft_id
            draft_logit = tl.load(target, mask=is_draft & inside, other=0.0).to(tl.float32)
            q = tl.exp((draft_logit - draft_max) / temperature) / draft_total
            bound = bound * tl.where(inside, q, 0.0)
        is_argmax = drafts == argmax
        accept = tl.where(is_sampled, (bound < p).to(tl.int32), is_argmax.to(tl.int32)) != 0
        if HAS_SYNTHETIC:
            # The probabilities stay in the condition, or the compiler would drop their work.
            rate = tl.load(synthetic_rates_ptr + steps, mask=is_draft, other=0.0)
            accept = (p >= 0.0) & (bound >= 0.0) & (u < rate)
        accept = accept & in_vocab & good & is_draft
        tau = tl.min(tl.where(accept, STEPS, steps), axis=0)

    # Row tau. A bad one accepted nothing: it ends the request.
    ok = _pick(good.to(tl.int32), steps, tau) > 0
    token = _pick(argmax, steps, tau)
    writes = part == 0
    if ok & is_sampled:
        top = _pick(row_max, steps, tau)
        position = first_position + tau
        x_ptr = row_ptr + tau.to(tl.int64) * stride_step
        block_max_ptr = max_ptr + (row + tau).to(tl.int64) * num_blocks
        argmax_kept = top == top
        if HAS_THRESHOLDS:
            threshold = _pick(thresholds, steps, tau)
            argmax_kept = top >= threshold
        # A rejection leaves the residual; without q, that is all tokens but the draft.
        HAS_RESIDUAL: tl.constexpr = HAS_DRAFT_LOGITS and not HAS_SYNTHETIC
        rejected = tau < num_drafts
        if HAS_SYNTHETIC:
            rejected = tau < 0
        banned = -1
        q_max = top
        q_sum = top
        sum_exp = top
        log_weight = top * 0.0
        if HAS_RESIDUAL:
            draft_ptr += tau.to(tl.int64) * stride_draft
            q_max = _pick(draft_max, steps, tau)
            q_sum = _pick(draft_total, steps, tau)
            sum_exp = _pick(total, steps, tau)
            if rejected:
                log_weight = log_residual(
                    log_weight,
                    sum_exp,
                    token,
                    V,
                    draft_ptr,
                    draft_ids_ptr,
                    Vd,
                    q_max,
                    q_sum,
                    temperature,
                    HAS_DRAFT_IDS,
                )
        else:
            banned = tl.where(rejected, _pick(drafts, steps, tau), -1)
        # The score to beat: that of the argmax, or where it may not be drawn of another large one.
        first_token = token
        best = log_weight + id_gumbel(seed, token, position, _TARGET, sample)
        best = tl.where(argmax_kept & (token != banned), best, float("-inf"))
        if best == float("-inf"):
            largest, first_token = find_runner_up(
                x_ptr,
                V,
                max_ptr,
                first_ptr,
                (row + tau).to(tl.int64) * num_blocks,
                token,
                num_blocks,
                BLOCKS,
                GROUP,
                STATS_BLOCK,
            )
            kept = (largest > float("-inf")) & (first_token != banned)
            if HAS_THRESHOLDS:
                kept = kept & (largest >= threshold)
            score = (largest - top) / temperature
            if HAS_RESIDUAL:  # noqa: SIM102 (compiled only where it holds)
                if rejected:
                    score = log_residual(
                        score,
                        sum_exp,
                        first_token,
                        V,
                        draft_ptr,
                        draft_ids_ptr,
                        Vd,
                        q_max,
                        q_sum,
                        temperature,
                        HAS_DRAFT_IDS,
                    )
            score += id_gumbel(seed, first_token, position, _TARGET, sample)
            best = tl.where(kept, score, float("-inf"))
        drawn = tl.where(best > float("-inf"), first_token, NO_ID)
        at = b * tl.num_programs(1)
        first, step, of_residual = part, tl.num_programs(1), rejected
        passes = part * 0 + 1
        n = part * 0
        while n < passes:
            best, drawn = draw_token(
                x_ptr,
                V,
                block_max_ptr,
                top,
                temperature,
                threshold,
                seed,
                position,
                _TARGET,
                sample,
                banned,
                of_residual,
                sum_exp,
                draft_ptr,
                draft_ids_ptr,
                Vd,
                q_max,
                q_sum,
                best,
                drawn,
                first,
                step,
                HAS_THRESHOLDS=HAS_THRESHOLDS,
                HAS_RESIDUAL=HAS_RESIDUAL,
                HAS_DRAFT_IDS=HAS_DRAFT_IDS,
                BLOCK=DRAW_BLOCK,
                STATS_BLOCK=STATS_BLOCK,
            )
            n += 1
            if passes == 1:
                tl.store(score_ptr + at + part, best)
                tl.store(token_ptr + at + part, drawn)
                tl.debug_barrier()  # whichever threads stored
                # Releases these two to the last program to come, which so acquires those of all.
                num_before = tl.atomic_add(finished_ptr + b, 1, sem="acq_rel")
                writes = num_before == tl.num_programs(1) - 1
                if writes:
                    parts = tl.arange(0, PARTS)
                    is_part = parts < tl.num_programs(1)
                    scores = tl.load(score_ptr + at + parts, mask=is_part, other=float("-inf"))
                    tokens = tl.load(token_ptr + at + parts, mask=is_part, other=NO_ID)
                    best = tl.max(scores, axis=0)
                    drawn = tl.min(tl.where(scores == best, tokens, NO_ID), axis=0)
                    if HAS_RESIDUAL:  # noqa: SIM102 (compiled only where it holds)
                        if rejected & (best == float("-inf")):
                            # No weight is left: p of that row, all of it by this program.
                            best = id_gumbel(seed, token, position, _TARGET, sample)
                            best = tl.where(argmax_kept, best, float("-inf"))
                            drawn = tl.where(best > float("-inf"), token, NO_ID)
                            first, step, of_residual = part * 0, part * 0 + 1, tau < 0
                            passes = part * 0 + 2
        if writes:
            # Without a score only a banned argmax is kept, or (a filter of no use) nothing.
            token = tl.where(argmax_kept, token, 0)
            token = tl.where(best > float("-inf"), drawn, token)
    if writes:
        num_sampled = tl.where(ok, tau + 1, 0)
        tokens = tl.where(steps == tau, token, drafts)
        tokens = tl.where(steps < num_sampled, tokens, -1)
        tl.store(out_tokens_ptr + row + steps, tokens, mask=steps <= K)
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

    num_blocks = triton.cdiv(vocab_size, _STATS_BLOCK)
    num_draft_blocks = triton.cdiv(draft_vocab, _STATS_BLOCK)
    shape, draft_shape = (batch, num_steps, num_blocks), (batch, k, num_draft_blocks)
    block_max = torch.empty(shape, dtype=torch.float32, device=device)
    block_sum = torch.empty(shape, dtype=torch.float32, device=device)
    block_first = torch.empty(shape, dtype=torch.int32, device=device)
    draft_max = torch.empty(draft_shape, dtype=torch.float32, device=device)
    draft_sum = torch.empty(draft_shape, dtype=torch.float32, device=device)
    num_finished = torch.empty((batch,), dtype=torch.int32, device=device)
    branches = {
        "K": k,
        "HAS_DRAFT_LOGITS": draft_logits is not None,
        "HAS_THRESHOLDS": thresholds is not None,
        "HAS_SYNTHETIC": synthetic_rates is not None,
        "GROUP": _GROUP,
        **overlap_options(target_logits),
    }
    all_steps = num_steps if draft_logits is None else num_steps + k
    _statistics_kernel[(batch, all_steps, max(num_blocks, num_draft_blocks))](
        target_logits,
        target_logits.stride(0),
        target_logits.stride(1),
        draft_logits,
        *draft_strides,
        slot_ids,
        num_draft_tokens,
        temperature,
        thresholds,
        block_max,
        block_sum,
        block_first,
        draft_max,
        draft_sum,
        num_finished,
        vocab_size,
        draft_vocab,
        num_blocks,
        num_draft_blocks,
        BLOCK=_STATS_BLOCK,
        num_warps=_STATS_WARPS,
        **branches,
    )
    num_draw_blocks = triton.cdiv(vocab_size, _DRAW_BLOCK)
    num_parts = min(num_draw_blocks, triton.cdiv(_DRAW_PROGRAMS, batch))
    part_score = torch.empty((batch, num_parts), dtype=torch.float32, device=device)
    part_token = torch.empty((batch, num_parts), dtype=torch.int32, device=device)
    _judge_kernel[(batch, num_parts)](
        target_logits,
        target_logits.stride(0),
        target_logits.stride(1),
        draft_tokens.contiguous(),
        num_draft_tokens,
        draft_logits,
        *draft_strides,
        slot_ids,
        draft_ids,
        temperature,
        seeds.contiguous(),
        first_positions.contiguous(),
        sample_index.contiguous(),
        thresholds,
        synthetic_rates,
        block_max,
        block_sum,
        block_first,
        draft_max,
        draft_sum,
        num_finished,
        part_score,
        part_token,
        tokens,
        num_sampled,
        ok,
        vocab_size,
        draft_vocab,
        num_blocks,
        num_draft_blocks,
        HAS_DRAFT_IDS=draft_ids is not None,
        STEPS=triton.next_power_of_2(num_steps),
        BLOCKS=triton.next_power_of_2(num_blocks),
        DRAFT_BLOCKS=triton.next_power_of_2(max(num_draft_blocks, 1)),
        STATS_BLOCK=_STATS_BLOCK,
        DRAW_BLOCK=_DRAW_BLOCK,
        PARTS=triton.next_power_of_2(num_draw_blocks),
        num_warps=_DRAW_WARPS,
        **branches,
    )
    return tokens, num_sampled, ok.view(torch.bool)

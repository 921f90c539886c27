"""A draw from a row of logits that reads and scores only what could win.

The token drawn is the one of the best score, ``(logit - row max) / T + noise``, and every token has
noise of its own. What costs least comes first: the words that noise is made of say for most blocks
of the vocabulary that no token of them reaches the best score so far; else their logits are read
and every score is bounded, without a logarithm; what is left is scored exactly. Only what is
*strictly* worse is dropped, so the result is that of scoring all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specgen.kernels.lanes import LANE_IDS, lane_id, lane_logits, lane_words, least_word
from specgen.kernels.rng import (
    LARGEST_GUMBEL,
    gumbel_word_bound,
    word_gumbel,
    word_gumbel_bound,
)
from specgen.kernels.row_statistics import NO_ID

# Divisions and fused operations round scaled logits (all <= 0) by less than this share of them.
_ROUND_UP = tl.constexpr(1.0 - 2.0**-20)
# Below this score a probability might have been so small that its logarithm says nothing.
_LOWEST_SCORE = tl.constexpr(-50.0)


@triton.jit
def log_residual(
    scaled,
    total,
    ids,
    V,
    draft_ptr,
    draft_ids_ptr,
    Vd,
    draft_max,
    draft_total,
    temperature,
    HAS_DRAFT_IDS: tl.constexpr,
):
    """Return ``log(p - q)``, -inf where it is not positive, of ids with scaled logits."""
    p = tl.exp(scaled) / total
    draft_ids = ids
    inside = ids < V
    if HAS_DRAFT_IDS:
        draft_ids = tl.load(draft_ids_ptr + ids, mask=inside, other=-1)
    inside = inside & (draft_ids >= 0) & (draft_ids < Vd)
    x = tl.load(draft_ptr + draft_ids, mask=inside, other=float("-inf")).to(tl.float32)
    q = tl.exp((x - draft_max) / temperature) / draft_total
    weight = p - tl.where(inside, q, 0.0)
    positive = weight > 0.0
    return tl.where(positive, tl.log(tl.where(positive, weight, 1.0)), float("-inf"))


@triton.jit
def _bound_scores(
    x,
    words,
    ids,
    row_max,
    cold,
    threshold,
    banned,
    HAS_THRESHOLDS: tl.constexpr,
):
    """Return what the scores of tokens do not exceed, -inf of those that are not kept."""
    kept = ids != banned
    if HAS_THRESHOLDS:
        kept = kept & (x >= threshold)
    return tl.where(kept, (x - row_max) * cold + word_gumbel_bound(words), float("-inf"))


@triton.jit
def _may_win(bound, bar):
    """Whether a score that ``bound`` is not exceeded by may be the best; -inf is no score."""
    return (bound >= bar) & (bound > float("-inf"))


@triton.jit
def _next_slot(bounds, words, top, slot):
    """Return what follows ``top`` at ``slot`` where slots are sorted by their bounds, the largest
    first and equal ones as they come: of every lane ``top, slot, word``; -inf at the end.
    """
    next_top = tl.full(top.shape, float("-inf"), tl.float32)
    next_slot = slot * 0 + LANE_IDS
    word = words[0]
    for i in tl.static_range(LANE_IDS):
        x = bounds[i]
        is_next = (x < top) | ((x == top) & (i > slot))
        is_next = is_next & (x > next_top)
        next_top = tl.where(is_next, x, next_top)
        next_slot = tl.where(is_next, i, next_slot)
        word = tl.where(is_next, words[i], word)
    return next_top, next_slot, word


@triton.jit
def _score_tokens(
    ids,
    words,
    mask,
    row_ptr,
    V,
    row_max,
    temperature,
    use_residual,
    total,
    draft_ptr,
    draft_ids_ptr,
    Vd,
    draft_max,
    draft_total,
    best,
    token,
    HAS_RESIDUAL: tl.constexpr,
    HAS_DRAFT_IDS: tl.constexpr,
):
    """Return ``best, token`` or what is better among ``ids`` inside ``mask``, given their words."""
    x = tl.load(row_ptr + ids, mask=mask, other=float("-inf")).to(tl.float32)
    y = (x - row_max) / temperature
    if HAS_RESIDUAL:  # noqa: SIM102 (compiled only where it holds)
        if use_residual:
            y = log_residual(
                y,
                total,
                ids,
                V,
                draft_ptr,
                draft_ids_ptr,
                Vd,
                draft_max,
                draft_total,
                temperature,
                HAS_DRAFT_IDS,
            )
    score = tl.where(mask, y + word_gumbel(words), float("-inf"))
    top = tl.max(score)
    lowest = tl.min(tl.where((score == top) & (score > float("-inf")), ids, NO_ID))
    better = (top > best) | ((top == best) & (lowest < token))
    return tl.where(better, top, best), tl.where(better, lowest, token)


@triton.jit
def draw_token(
    row_ptr,
    V,
    block_max_ptr,
    row_max,
    temperature,
    threshold,
    seed,
    position,
    c2,
    sample,
    banned,
    use_residual,
    total,
    draft_ptr,
    draft_ids_ptr,
    Vd,
    draft_max,
    draft_total,
    best,
    token,
    first,
    step,
    HAS_THRESHOLDS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_DRAFT_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    STATS_BLOCK: tl.constexpr,
):
    """Return the best score and its token: ``best, token``, or of the blocks ``first + n * step``.

    ``banned`` is a token that is not drawn, or -1. With ``use_residual`` scores are those of the
    residual, ``log(p - q) + noise``, which are at most ``scaled logit - log(total) + noise``.
    """
    # A token wins only with scaled logit + noise >= best + log_total.
    log_total = 0.0
    if HAS_RESIDUAL:
        log_total = tl.where(use_residual, tl.log(total), 0.0)
    LANES: tl.constexpr = BLOCK // LANE_IDS
    lanes = tl.arange(0, LANES)
    cold = _ROUND_UP / temperature
    for block in range(first, tl.cdiv(V, BLOCK), step):
        start = block * BLOCK
        block_max = tl.load(block_max_ptr + start // STATS_BLOCK)
        possible = block_max > float("-inf")
        if HAS_THRESHOLDS:
            possible = possible & (block_max >= threshold)
        bar = tl.where(best > _LOWEST_SCORE, best + log_total, float("-inf"))
        # The noise without which no token of the block wins.
        needed = bar - (block_max - row_max) * cold
        if possible & (needed <= LARGEST_GUMBEL):
            words = lane_words(seed, start, position, c2, sample, LANES)
            # Large noise comes from small words.
            if tl.min(least_word(words)) <= gumbel_word_bound(needed):
                x = lane_logits(row_ptr, start, V, LANES)
                bounds = ()
                top = tl.full([LANES], float("-inf"), tl.float32)
                for i in tl.static_range(LANE_IDS):
                    bound = _bound_scores(
                        x[i],
                        words[i],
                        start + lane_id(lanes, i, LANES),
                        row_max,
                        cold,
                        threshold,
                        banned,
                        HAS_THRESHOLDS,
                    )
                    bounds = bounds + (bound,)  # type: ignore[assignment]  # noqa: RUF005
                    top = tl.maximum(top, bound)
                # Those that may be better than the best, of each lane the likeliest first.
                slot = lanes * 0 - 1
                remains = tl.max(_may_win(top, bar).to(tl.int32)) > 0
                top = tl.full([LANES], float("inf"), tl.float32)
                while remains:
                    top, slot, word = _next_slot(bounds, words, top, slot)
                    may_win = _may_win(top, bar)
                    best, token = _score_tokens(
                        start + lane_id(lanes, slot, LANES),
                        word,
                        may_win,
                        row_ptr,
                        V,
                        row_max,
                        temperature,
                        use_residual,
                        total,
                        draft_ptr,
                        draft_ids_ptr,
                        Vd,
                        draft_max,
                        draft_total,
                        best,
                        token,
                        HAS_RESIDUAL,
                        HAS_DRAFT_IDS,
                    )
                    bar = tl.where(best > _LOWEST_SCORE, best + log_total, float("-inf"))
                    remains = tl.max(may_win.to(tl.int32)) > 0
    return best, token

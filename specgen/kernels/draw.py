"""A draw from a row of logits that looks only at tokens that could win.

The token drawn is the one of the best score, ``(logit - row max) / T + noise``, and every token has
noise of its own. Of every lane of the vocabulary the largest logit is known, and the two largest
noises, with the token of the first (:mod:`specgen.kernels.lane_noise`). So of each lane that token
is scored where the largest logit and the largest noise could win together; then the lanes are read
where the largest logit could win with the second noise, and those of their tokens are scored whose
logits could. Only what is *strictly* worse than the best so far is left out: the result is that of
scoring all (Fagin's threshold algorithm, PODS 2001).
"""

from __future__ import annotations

import triton
import triton.language as tl

from specgen.kernels.rng import id_gumbel, word_gumbel_bound
from specgen.kernels.row_statistics import NO_ID

# Divisions and fused operations round scaled logits (all <= 0) by less than this share of them.
_ROUND_UP = tl.constexpr(1.0 - 2.0**-20)
# Below this score a probability might have been so small that its logarithm says nothing.
_LOWEST_SCORE = tl.constexpr(-50.0)


@triton.jit
def _log_residual(
    scaled,
    total,
    ids,
    mask,
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
    if HAS_DRAFT_IDS:
        draft_ids = tl.load(draft_ids_ptr + ids, mask=mask, other=-1)
    inside = mask & (draft_ids >= 0) & (draft_ids < Vd)
    x = tl.load(draft_ptr + draft_ids, mask=inside, other=float("-inf")).to(tl.float32)
    q = tl.exp((x - draft_max) / temperature) / draft_total
    weight = p - tl.where(inside, q, 0.0)
    positive = weight > 0.0
    return tl.where(positive, tl.log(tl.where(positive, weight, 1.0)), float("-inf"))


@triton.jit
def _may_win(bound, bar):
    """Whether a score that ``bound`` is not exceeded by may be the best; -inf is no score."""
    return (bound >= bar) & (bound > float("-inf"))


@triton.jit
def _any_may_win(bounds, bar):
    return tl.max(_may_win(bounds, bar).to(tl.int32), axis=0)


@triton.jit
def _pack_key(score, token):
    """Return an int64 that is the larger the better the score, and then the lower the token."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # no negative zero
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (token ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _unpack_key(key):
    """Return score and token of a key."""
    order = (key >> 32).to(tl.int32)
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), (key & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF


@triton.jit
def _score_tokens(
    ids,
    noise,
    mask,
    row_ptr,
    row_max,
    temperature,
    threshold,
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
    HAS_THRESHOLDS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_DRAFT_IDS: tl.constexpr,
):
    """Return ``best, token`` or what is better among ``ids``, of given noise, inside ``mask``."""
    x = tl.load(row_ptr + ids, mask=mask, other=float("-inf")).to(tl.float32)
    kept = mask & (ids != banned) & (x > float("-inf"))
    if HAS_THRESHOLDS:
        kept = kept & (x >= threshold)
    y = (x - row_max) / temperature
    if HAS_RESIDUAL:  # noqa: SIM102 (compiled only where it holds)
        if use_residual:
            y = _log_residual(
                y,
                total,
                ids,
                kept,
                draft_ptr,
                draft_ids_ptr,
                Vd,
                draft_max,
                draft_total,
                temperature,
                HAS_DRAFT_IDS,
            )
    score = tl.where(kept, y + noise, float("-inf"))
    key = tl.max(_pack_key(score, tl.where(score > float("-inf"), ids, NO_ID)))
    return _unpack_key(tl.maximum(key, _pack_key(best, token)))


@triton.jit
def _noise_bound(words, LANE_IDS: tl.constexpr):
    """Return what the noise of tokens does not exceed, by their words with a place in the lane."""
    return word_gumbel_bound(words & (0x100000000 - LANE_IDS))


@triton.jit
def _load_words(lane_words_ptr, lanes, offset, mask, LANES: tl.constexpr):
    """Return words of lanes: ``offset`` is 0 for the least, LANES for the second."""
    at = lanes // LANES * (2 * LANES) + lanes % LANES + offset
    return tl.load(lane_words_ptr + at, mask=mask, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _lanes_in_rows(NUM_ROWS: tl.constexpr, NUM_LANES: tl.constexpr):
    """Return lanes 0, 1, ... in rows ``[NUM_ROWS, NUM_LANES / NUM_ROWS]``, at least one each."""
    COLUMNS: tl.constexpr = triton.cdiv(NUM_LANES, NUM_ROWS)
    return tl.arange(0, NUM_ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _bound_lanes(
    lanes,
    offset,
    lane_max_ptr,
    lane_words_ptr,
    num_blocks,
    row_max,
    cold,
    threshold,
    HAS_THRESHOLDS: tl.constexpr,
    LANES: tl.constexpr,
    LANE_IDS: tl.constexpr,
):
    """Return bounds of the scores in lanes, with the noise at ``offset``."""
    in_row = lanes < num_blocks * LANES
    lane_max = tl.load(lane_max_ptr + lanes, mask=in_row, other=float("-inf")).to(tl.float32)
    if HAS_THRESHOLDS:
        lane_max = tl.where(lane_max >= threshold, lane_max, float("-inf"))
    words = _load_words(lane_words_ptr, lanes, offset, in_row, LANES)
    return (lane_max - row_max) * cold + _noise_bound(words, LANE_IDS)


@triton.jit
def _bar(best, lowest, log_total):
    """Return what scaled logit and noise of a token must reach together to win; see draw_token."""
    return tl.where(best > lowest, best + log_total, float("-inf"))


@triton.jit
def draw_token(
    row_ptr,
    V,
    lane_max_ptr,
    num_blocks,
    row_max,
    temperature,
    threshold,
    lane_words_ptr,
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
    HAS_THRESHOLDS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_DRAFT_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the best score and its token; -inf and NO_ID where no token may be drawn.

    ``lane_max_ptr`` has the largest logits of the row's lanes, ``lane_words_ptr`` the words of
    their largest noises. WIDTH lanes are read at a time, and NUM_TOKENS tokens of largest noise
    scored. ``banned`` is a token that is not drawn, or -1. With ``use_residual`` scores are those
    of the residual, ``log(p - q) + noise``, which are at most ``scaled logit - log(total) +
    noise``.
    """
    LANE_IDS: tl.constexpr = BLOCK // LANES
    columns = tl.arange(0, LANE_IDS)
    columns = columns // GROUP * (LANES * GROUP) + columns % GROUP
    cold = _ROUND_UP / temperature
    # A token wins only with scaled logit + noise >= best + log_total.
    log_total = 0.0
    lowest = float("-inf")
    if HAS_RESIDUAL:
        log_total = tl.where(use_residual, tl.log(total), 0.0)
        lowest = tl.where(use_residual, _LOWEST_SCORE, float("-inf"))
    best = row_max * 0.0 + float("-inf")
    token = position * 0 + NO_ID
    bar = _bar(best, lowest, log_total)

    # Lanes to read, and lanes whose token of the largest noise is to be scored: in rows, of each
    # of which the likeliest goes first.
    lanes = _lanes_in_rows(WIDTH, BLOCKS * LANES)
    bounds = _bound_lanes(
        lanes,
        LANES,
        lane_max_ptr,
        lane_words_ptr,
        num_blocks,
        row_max,
        cold,
        threshold,
        HAS_THRESHOLDS,
        LANES,
        LANE_IDS,
    )
    top = tl.max(bounds, axis=1)
    noisy_lanes = _lanes_in_rows(NUM_TOKENS, BLOCKS * LANES)
    noisy_bounds = _bound_lanes(
        noisy_lanes,
        0,
        lane_max_ptr,
        lane_words_ptr,
        num_blocks,
        row_max,
        cold,
        threshold,
        HAS_THRESHOLDS,
        LANES,
        LANE_IDS,
    )
    noisy_top = tl.max(noisy_bounds, axis=1)
    remains = 1
    while remains > 0:
        if _any_may_win(noisy_top, bar) > 0:
            is_noisy = _may_win(noisy_top, bar)
            noisy_lane = tl.min(
                tl.where(noisy_bounds == noisy_top[:, None], noisy_lanes, NO_ID), axis=1
            )
            noisy_bounds = tl.where(noisy_lanes == noisy_lane[:, None], float("-inf"), noisy_bounds)
            noisy_top = tl.max(noisy_bounds, axis=1)
            noisy_word = _load_words(lane_words_ptr, noisy_lane, 0, is_noisy, LANES)
            place = (noisy_word & (LANE_IDS - 1)).to(tl.int32)
            noisy_ids = noisy_lane // LANES * BLOCK + noisy_lane % LANES * GROUP
            noisy_ids += place // GROUP * (LANES * GROUP) + place % GROUP
            best, token = _score_tokens(
                noisy_ids,
                id_gumbel(seed, noisy_ids, position, c2, sample),
                is_noisy & (noisy_ids < V),
                row_ptr,
                row_max,
                temperature,
                threshold,
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
                HAS_THRESHOLDS,
                HAS_RESIDUAL,
                HAS_DRAFT_IDS,
            )
            bar = _bar(best, lowest, log_total)
        if _any_may_win(top, bar) > 0:
            is_open = _may_win(top, bar)
            lane = tl.min(tl.where(bounds == top[:, None], lanes, NO_ID), axis=1)
            bounds = tl.where(lanes == lane[:, None], float("-inf"), bounds)
            top = tl.max(bounds, axis=1)
            lane = tl.where(is_open, lane, 0)
            first = tl.multiple_of(lane // LANES * BLOCK + lane % LANES * GROUP, GROUP)
            ids = first[:, None] + columns[None, :]
            is_read = is_open[:, None] & (ids < V)
            x = tl.load(row_ptr + ids, mask=is_read, other=float("-inf")).to(tl.float32)
            y = (x - row_max) * cold
            if HAS_RESIDUAL:  # noqa: SIM102 (compiled only where it holds)
                if use_residual:
                    y = log_total + _log_residual(
                        (x - row_max) / temperature,
                        total,
                        ids,
                        is_read,
                        draft_ptr,
                        draft_ids_ptr,
                        Vd,
                        draft_max,
                        draft_total,
                        temperature,
                        HAS_DRAFT_IDS,
                    )
            word = _load_words(lane_words_ptr, lane, LANES, is_open, LANES)
            y += _noise_bound(word, LANE_IDS)[:, None]
            is_kept = ids != banned
            if HAS_THRESHOLDS:
                is_kept = is_kept & (x >= threshold)
            y = tl.where(is_kept, y, float("-inf"))
            highest = tl.max(y, axis=1)
            lane_remains = _any_may_win(highest, bar)
            while lane_remains > 0:
                chosen = tl.min(tl.where(y == highest[:, None], ids, NO_ID), axis=1)
                best, token = _score_tokens(
                    chosen,
                    id_gumbel(seed, chosen, position, c2, sample),
                    _may_win(highest, bar),
                    row_ptr,
                    row_max,
                    temperature,
                    threshold,
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
                    HAS_THRESHOLDS,
                    HAS_RESIDUAL,
                    HAS_DRAFT_IDS,
                )
                bar = _bar(best, lowest, log_total)
                y = tl.where(ids == chosen[:, None], float("-inf"), y)
                highest = tl.max(y, axis=1)
                lane_remains = _any_may_win(highest, bar)
        remains = tl.maximum(_any_may_win(top, bar), _any_may_win(noisy_top, bar))
    return best, token

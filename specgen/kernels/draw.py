"""A draw from a row of logits that looks only at tokens that could win.

The token drawn is the one of the best score, ``(logit - row max) / T + noise``, and every token has
noise of its own. Of every lane of the vocabulary the largest logit is known, and the two largest
noises, with the token of the first, the lane's loudest (:mod:`specgen.kernels.lane_noise`). So the
loudest tokens are scored of those lanes where the largest logit and the largest noise could win
together; then the lanes are read where the largest logit could win with the second noise, and those
of their tokens are scored whose logits could. Only what is *strictly* worse than the best so far is
left out: the result is that of scoring all (Fagin's threshold algorithm, PODS 2001).

Threads agree on what remains by lists in memory, since few lanes remain and any may.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specgen.kernels.lane_noise import unpack_noise
from specgen.kernels.rng import id_gumbel
from specgen.kernels.row_statistics import NO_ID

# Divisions and fused operations round scaled logits (all <= 0) by less than this share of them.
_ROUND_UP = tl.constexpr(1.0 - 2.0**-20)
# Below this score a probability might have been so small that its logarithm says nothing.
_LOWEST_SCORE = tl.constexpr(-50.0)
_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
# By so much, as a binary logarithm, p and q are taken too large and too small where a bound is
# wanted: above what rounding does to those that are not 0.
_SHARE_SLACK = tl.constexpr(2.0**-13)


@triton.jit
def _log_residual(scaled, total, ids, mask, draft, HAS_DRAFT_IDS: tl.constexpr):
    """Return ``log(p - q)``, -inf where it is not positive, of ids with scaled logits."""
    draft_ptr, draft_ids_ptr, Vd, draft_max, draft_total, temperature = draft
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
def _bound_log_residual(
    scaled, ids, mask, log2_total, log2_draft_total, draft, HAS_DRAFT_IDS: tl.constexpr
):
    """Return what ``log(p - q)`` does not exceed, in few operations."""
    draft_ptr, draft_ids_ptr, Vd, draft_max, _draft_total, temperature = draft
    p = tl.exp2(scaled * _LOG2E + (_SHARE_SLACK - log2_total))
    draft_ids = ids
    if HAS_DRAFT_IDS:
        draft_ids = tl.load(draft_ids_ptr + ids, mask=mask, other=-1)
    inside = mask & (draft_ids >= 0) & (draft_ids < Vd)
    x = tl.load(draft_ptr + draft_ids, mask=inside, other=float("-inf")).to(tl.float32)
    q = tl.exp2((x - draft_max) * (_LOG2E / temperature) - (_SHARE_SLACK + log2_draft_total))
    return tl.log2(tl.maximum(p - q, 0.0)) * _LN2


@triton.jit
def _may_win(bound, bar):
    """Whether a score that ``bound`` is not exceeded by may be the best; -inf is no score."""
    return (bound >= bar) & (bound > float("-inf"))


@triton.jit
def _any_may_win(bounds, bar):
    return tl.max(_may_win(bounds, bar).to(tl.int32)) > 0


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
def _is_kept(x, ids, row, HAS_THRESHOLDS: tl.constexpr):
    """Whether tokens with logits ``x`` may be drawn at all."""
    _row_ptr, _V, _row_max, _temperature, threshold, banned, _use_residual, _total = row
    kept = (ids != banned) & (x > float("-inf"))
    if HAS_THRESHOLDS:
        kept = kept & (x >= threshold)
    return kept


@triton.jit
def _score_tokens(
    ids,
    mask,
    best,
    token,
    row,
    draft,
    address,
    HAS_THRESHOLDS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_DRAFT_IDS: tl.constexpr,
):
    """Return ``best, token`` or what is better among ``ids`` inside ``mask``."""
    row_ptr, V, row_max, temperature, _threshold, _banned, use_residual, total = row
    seed, position, c2, sample = address
    mask = mask & (ids < V)
    x = tl.load(row_ptr + ids, mask=mask, other=float("-inf")).to(tl.float32)
    noise = id_gumbel(seed, ids, position, c2, sample)
    y = (x - row_max) / temperature
    if HAS_RESIDUAL:  # noqa: SIM102 (compiled only where it holds)
        if use_residual:
            y = _log_residual(y, total, ids, mask, draft, HAS_DRAFT_IDS)
    kept = mask & _is_kept(x, ids, row, HAS_THRESHOLDS)
    score = tl.where(kept, y + noise, float("-inf"))
    key = tl.max(_pack_key(score, tl.where(score > float("-inf"), ids, NO_ID)))
    return _unpack_key(tl.maximum(key, _pack_key(best, token)))


@triton.jit
def _bound_tokens(
    x,
    ids,
    noise,
    mask,
    log_total,
    row,
    draft,
    HAS_THRESHOLDS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_DRAFT_IDS: tl.constexpr,
):
    """Return bounds of the scores of tokens with logits ``x`` and ``noise`` at most."""
    _row_ptr, _V, row_max, temperature, _threshold, _banned, use_residual, total = row
    y = (x - row_max) * (_ROUND_UP / temperature)
    if HAS_RESIDUAL:  # noqa: SIM102 (compiled only where it holds)
        if use_residual:
            _draft_ptr, _draft_ids_ptr, _Vd, _draft_max, draft_total, _temperature = draft
            y = log_total + _bound_log_residual(
                y, ids, mask, tl.log2(total), tl.log2(draft_total), draft, HAS_DRAFT_IDS
            )
    return tl.where(mask & _is_kept(x, ids, row, HAS_THRESHOLDS), y + noise, float("-inf"))


@triton.jit
def _all_lanes(NUM_LANES: tl.constexpr, THREADS: tl.constexpr):
    """Return all lanes, ``[repeats, THREADS, 4]``: the first and the last axis are a thread's."""
    repeats = tl.arange(0, NUM_LANES // (4 * THREADS))[:, None, None] * (4 * THREADS)
    return repeats + tl.arange(0, THREADS)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]


@triton.jit
def _of_threads(values):
    """Return the largest value of every thread, ``[THREADS]``."""
    return tl.max(tl.max(values, axis=2), axis=0)


@triton.jit
def _store_as_held(pointers, values, mask):
    """Store int32 values; `tl.store` would first rearrange them among the threads."""
    if _IS_COMPILED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [pointers, values, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def _list(entries, mask, list_ptr):
    """Write the entries inside ``mask`` behind each other; return their number."""
    REPEATS: tl.constexpr = mask.shape[0]
    tl.debug_barrier()  # what was listed before has been read
    # Counts of up to 16 entries of a thread, four bits for each place.
    place = tl.arange(0, REPEATS)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    ones = mask.to(tl.int32)
    of_thread = tl.sum(tl.sum(ones, axis=2), axis=0)
    up_to_thread = tl.cumsum(of_thread, axis=0)
    bits = tl.sum(tl.sum(mask.to(tl.int64) << (place * 4), axis=2), axis=0)
    before = (bits * 0x1111111111111110)[None, :, None] >> (place * 4)
    at = (up_to_thread - of_thread)[None, :, None] + (before & 15).to(tl.int32)
    _store_as_held(list_ptr + at, entries, mask)
    tl.debug_barrier()
    return tl.max(up_to_thread, axis=0)


@triton.jit
def _lane_ids(lanes, places, BLOCK: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr):
    """Return the ids at places of lanes."""
    first = (lanes // LANES * (BLOCK // GROUP) + lanes % LANES) * GROUP
    return first + (places // GROUP * (LANES * GROUP) + places % GROUP)


@triton.jit
def _of_groups(tops, entries, GROUPS: tl.constexpr):
    """Return the largest of ``tops`` of every group of threads, and its entry: `[GROUPS]` each."""
    shape: tl.constexpr = [GROUPS, tops.shape[0] // GROUPS]
    tops, entries = tl.reshape(tops, shape), tl.reshape(entries, shape)
    group_tops = tl.max(tops, axis=1)
    return group_tops, tl.max(tl.where(tops == group_tops[:, None], entries, -1), axis=1)


@triton.jit
def _of_group(values, THREADS: tl.constexpr):
    """Return for every thread the value of its group."""
    shape: tl.constexpr = [values.shape[0], THREADS // values.shape[0]]
    return tl.reshape(tl.broadcast_to(values[:, None], shape), [THREADS])


@triton.jit
def _bar(best, lowest, log_total):
    """Return what scaled logit and noise of a token must reach together to win; see draw_token."""
    return tl.where(best > lowest, best + log_total, float("-inf"))


@triton.jit
def _draw_in_lanes(
    entries,
    mask,
    best,
    token,
    lowest,
    log_total,
    row,
    draft,
    address,
    HAS_THRESHOLDS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_DRAFT_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return ``best, token`` or what is better in lanes of ``entries`` inside ``mask``."""
    row_ptr, V, _row_max, _temperature, _threshold, _banned, _use_residual, _total = row
    LANE_IDS: tl.constexpr = BLOCK // LANES
    groups = tl.arange(0, LANE_IDS // GROUP)[None, :, None] * (LANES * GROUP)
    starts = _lane_ids(entries >> 16, 0, BLOCK, LANES, GROUP)[:, None, None]
    ids = starts + groups + tl.arange(0, GROUP)[None, None, :]
    is_read = mask[:, None, None] & (ids < V)
    x = tl.load(row_ptr + ids, mask=is_read, other=float("-inf")).to(tl.float32)
    bounds = _bound_tokens(
        x,
        ids,
        unpack_noise(entries & 0xFFFF, LANE_IDS)[:, None, None],
        is_read,
        log_total,
        row,
        draft,
        HAS_THRESHOLDS,
        HAS_RESIDUAL,
        HAS_DRAFT_IDS,
    )
    bar = _bar(best, lowest, log_total)
    # Of every group of ids, which a thread holds, the likeliest first.
    tops = tl.max(bounds, axis=2)
    while _any_may_win(tops, bar):
        chosen = tl.min(tl.where(bounds == tops[:, :, None], ids, NO_ID), axis=2)
        best, token = _score_tokens(
            chosen,
            _may_win(tops, bar),
            best,
            token,
            row,
            draft,
            address,
            HAS_THRESHOLDS,
            HAS_RESIDUAL,
            HAS_DRAFT_IDS,
        )
        bar = _bar(best, lowest, log_total)
        bounds = tl.where(ids == chosen[:, :, None], float("-inf"), bounds)
        tops = tl.max(bounds, axis=2)
    return best, token


@triton.jit
def draw_token(
    row,
    draft,
    address,
    lane_max_ptr,
    lane_noise_ptr,
    list_ptr,
    num_blocks,
    HAS_THRESHOLDS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_DRAFT_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    THREADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the best score and its token; -inf and NO_ID where no token may be drawn.

    Args:
        row: Pointer to the logits, V, their maximum, temperature, threshold, a token that is not
            drawn (or -1), whether scores are those of the residual, ``log(p - q) + noise``, and the
            sum of exponentials behind p.
        draft: Pointer to the draft's logits, pointer to draft ids, Vd, maximum, sum of exponentials
            and temperature.
        address: Seed, position, c2 and sample of the noise.
        lane_max_ptr: Largest logits of the row's lanes.
        lane_noise_ptr: What :mod:`specgen.kernels.lane_noise` says of them.
        list_ptr: Room for an int32 of every lane.
        THREADS: Of the program.
        WIDTH: Lanes that are read at a time.
    """
    _row_ptr, V, row_max, temperature, threshold, _banned, use_residual, total = row
    LANE_IDS: tl.constexpr = BLOCK // LANES
    # A residual's score is at most scaled logit - log(total) + noise, so that a token wins only
    # with scaled logit + noise >= best + log(total).
    log_total = 0.0
    lowest = float("-inf")
    if HAS_RESIDUAL:
        log_total = tl.where(use_residual, tl.log(total), 0.0)
        lowest = tl.where(use_residual, _LOWEST_SCORE, float("-inf"))
    best = row_max * 0.0 + float("-inf")
    token = V * 0 + NO_ID

    NUM_LANES: tl.constexpr = BLOCKS * LANES
    SETS: tl.constexpr = max(min(THREADS, NUM_LANES // 4), NUM_LANES // 16)
    lanes = _all_lanes(NUM_LANES, SETS)
    in_row = lanes < num_blocks * LANES
    room = tl.load(lane_max_ptr + lanes, mask=in_row, other=float("-inf")).to(tl.float32)
    if HAS_THRESHOLDS:
        room = tl.where(room >= threshold, room, float("-inf"))
    room = (room - row_max) * (_ROUND_UP / temperature)
    at = lanes // LANES * (2 * LANES) + lanes % LANES
    loudest = tl.load(lane_noise_ptr + at, mask=in_row, other=0).to(tl.int32) & 0xFFFF
    # Volatile, or the compiler would put this load off until it has to be waited for.
    second = tl.load(lane_noise_ptr + LANES + at, mask=in_row, other=0, volatile=True)
    second = second.to(tl.int32) & 0xFFFF
    loud_bounds = room + unpack_noise(loudest, LANE_IDS)
    rest_bounds = room + unpack_noise(second, LANE_IDS)
    loud = (lanes << 16) | loudest
    rest = (lanes << 16) | second

    # The likeliest of every thread's loudest tokens.
    tops = _of_threads(loud_bounds)
    entry = _of_threads(tl.where(loud_bounds == tops[None, :, None], loud, -1))
    loud_bounds = tl.where(loud == entry[None, :, None], float("-inf"), loud_bounds)
    best, token = _score_tokens(
        _lane_ids(entry >> 16, entry & (LANE_IDS - 1), BLOCK, LANES, GROUP),
        tops > float("-inf"),
        best,
        token,
        row,
        draft,
        address,
        HAS_THRESHOLDS,
        HAS_RESIDUAL,
        HAS_DRAFT_IDS,
    )
    bar = _bar(best, lowest, log_total)

    # The likeliest lane of every group of threads: where logits decide, it has the winner.
    if _any_may_win(rest_bounds, bar):
        tops = _of_threads(rest_bounds)
        entry = _of_threads(tl.where(rest_bounds == tops[None, :, None], rest, -1))
        lane_tops, lane_entry = _of_groups(tops, entry, min(WIDTH, SETS // 4))
        is_first = rest == _of_group(lane_entry, SETS)[None, :, None]
        rest_bounds = tl.where(is_first, float("-inf"), rest_bounds)
        best, token = _draw_in_lanes(
            lane_entry,
            _may_win(lane_tops, bar),
            best,
            token,
            lowest,
            log_total,
            row,
            draft,
            address,
            HAS_THRESHOLDS,
            HAS_RESIDUAL,
            HAS_DRAFT_IDS,
            BLOCK,
            LANES,
            GROUP,
        )
        bar = _bar(best, lowest, log_total)

    # All others that could win: loudest tokens, then lanes.
    if _any_may_win(loud_bounds, bar):
        num_loud = _list(loud, _may_win(loud_bounds, bar), list_ptr)
        for start in range(0, num_loud, 2 * THREADS):
            number = start + tl.arange(0, 2 * THREADS)
            listed = tl.load(list_ptr + number, mask=number < num_loud, other=0)
            best, token = _score_tokens(
                _lane_ids(listed >> 16, listed & (LANE_IDS - 1), BLOCK, LANES, GROUP),
                number < num_loud,
                best,
                token,
                row,
                draft,
                address,
                HAS_THRESHOLDS,
                HAS_RESIDUAL,
                HAS_DRAFT_IDS,
            )
    bar = _bar(best, lowest, log_total)
    if _any_may_win(rest_bounds, bar):
        num_lanes = _list(rest, _may_win(rest_bounds, bar), list_ptr)
        for start in range(0, num_lanes, WIDTH):
            number = start + tl.arange(0, WIDTH)
            best, token = _draw_in_lanes(
                tl.load(list_ptr + number, mask=number < num_lanes, other=0),
                number < num_lanes,
                best,
                token,
                lowest,
                log_total,
                row,
                draft,
                address,
                HAS_THRESHOLDS,
                HAS_RESIDUAL,
                HAS_DRAFT_IDS,
                BLOCK,
                LANES,
                GROUP,
            )
    return best, token

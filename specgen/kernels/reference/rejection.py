"""Verification of draft tokens: the ``standard`` and ``synthetic`` rules."""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.kernels.reference.rng import accept_uniform, vocab_gumbel
from specgen.kernels.streams import GREEDY_TEMPERATURE, TARGET


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
    """Judge the drafts of every row and draw the token that follows the accepted ones.

    With ``p`` the target's distribution (temperature and thresholds applied) and ``q`` the one the
    drafts were drawn from, draft x at index i is accepted iff ``u * q(x) < p(x)``; at the first
    rejection a token is drawn from ``max(p - q, 0)``, after d acceptances from ``p`` of row d
    (Leviathan et al. 2211.17192, Chen et al. 2302.01318). Without ``draft_logits`` the drafts are
    the draft model's argmax: q is one-hot, the test is ``u < p(x)``. Where no residual weight is
    left the token is drawn from that row's p. Below T = 1e-5 a draft is accepted iff it is the
    argmax of the row, and argmaxes are emitted. Row i is the token at ``first_positions + i``;
    uniforms are on stream ACCEPT with j = i, emitted tokens on stream TARGET with j = 0.

    With ``synthetic_rates`` all of that is computed too, but draft i is accepted iff ``u`` is below
    rate i, at any temperature, and the token after the accepted ones is always the target's own
    draw: speed at a known acceptance, and **not** the target's distribution.

    Args:
        target_logits: ``[B, k + 1, V]`` fp32, bf16 or fp16.
        draft_tokens: ``[B, k]`` int32 target ids.
        num_draft_tokens: ``[B]`` int32, d in 0..k; -1 = padding row.
        draft_logits: ``[S, >= k, Vd]`` of the persistent rows, or None for greedy drafts.
        slot_ids: ``[B]`` int32 row of ``draft_logits`` (any value on padding rows).
        draft_ids: ``[V]`` int32 draft id of every target id, -1 where it has none; or None where
            ids are the same.
        temperature: ``[B]`` fp32.
        seeds: ``[B]`` int64.
        first_positions: ``[B]`` int32 absolute position of the first token to emit.
        sample_index: ``[B]`` int32.
        thresholds: ``[B, k + 1]`` fp32, or None.
        synthetic_rates: ``[>= k]`` fp32, the rate at which draft i is accepted once those before it
            were; or None for the ``standard`` rule.
        lane_noise: what :func:`.lane_noise.largest_noise` says of these rows and steps, where it is
            known. It changes nothing but the time.

    Returns:
        ``(tokens, num_sampled, ok)``: ``[B, k + 1]`` int32 padded with -1, ``[B]`` int32 accepted
        drafts + 1, and ``[B]`` bool. Padding rows give 0 and True. A judged target row with NaN or
        +inf, or with -inf only, gives 0 and False; rows that were never judged do not matter.
    """
    batch, num_rows, vocab_size = target_logits.shape
    k = num_rows - 1
    device = target_logits.device
    rows = torch.arange(batch, device=device)
    steps = torch.arange(num_rows, device=device)
    num_drafts = num_draft_tokens.clamp(max=k)
    drafts = draft_tokens.to(torch.int64)
    greedy = temperature < GREEDY_TEMPERATURE
    safe_temperature = torch.where(greedy, 1.0, temperature)

    logits = target_logits.to(torch.float32)
    row_max = logits.amax(-1)  # [B, k + 1]; NaN where the row holds NaN
    argmax = logits.argmax(-1)
    good = row_max.isfinite()
    # Without drafts nothing is judged: one pass over the vocabulary less.
    judged = slice(0, num_rows if k > 0 else 0)
    weights = _weights(logits[:, judged], row_max[:, judged], safe_temperature, thresholds)
    total = weights.sum(-1)

    # Acceptance, position by position; a bad row accepts nothing, so judging stops there.
    in_vocab = (drafts >= 0) & (drafts < vocab_size)
    x = drafts.clamp(0, vocab_size - 1)
    p_x = weights[:, :k].gather(-1, x[..., None])[..., 0] / total[:, :k]
    u = _uniforms(seeds, first_positions, sample_index, k)
    q: Tensor | None = None
    q_x: Tensor | float = 1.0
    if draft_logits is not None:
        slots = slot_ids.to(torch.int64).clamp(min=0)
        q = _draft_probs(draft_logits[slots, :k].to(torch.float32), safe_temperature)  # [B, k, Vd]
        q_x = _gather_draft(q, x[..., None], draft_ids)[..., 0]
    accept = torch.where(greedy[:, None], x == argmax[:, :k], u * q_x < p_x)
    if synthetic_rates is not None:
        accept = (p_x >= 0) & (u * q_x >= 0) & (u < synthetic_rates[:k])
    accept &= in_vocab & good[:, :k] & (steps[:k] < num_drafts[:, None])
    tau = accept.to(torch.int64).cumprod(-1).sum(-1)  # [B]
    rejected = tau < num_drafts

    # The token at index tau; noise is made for this one row only.
    row_logits = logits[rows, tau]  # [B, V]
    scores = (row_logits - row_max[rows, tau][:, None]) / safe_temperature[:, None]
    kept = scores > float("-inf")
    if thresholds is not None:
        kept &= row_logits >= thresholds[rows, tau][:, None]
    noise = vocab_gumbel(
        seeds, vocab_size, first_positions + tau, TARGET, torch.zeros_like(slot_ids), sample_index
    )
    target_scores = torch.where(kept, scores + noise, float("-inf"))
    token = target_scores.argmax(-1)
    if k > 0 and synthetic_rates is None:
        at = tau.clamp(max=k - 1)
        if q is not None:
            p = weights[rows, tau] / total[rows, tau][:, None]
            everything = torch.arange(vocab_size, device=device).expand(batch, vocab_size)
            residual = (p - _gather_draft(q[rows, at], everything, draft_ids)).clamp(min=0.0)
            residual_scores = torch.where(residual > 0, residual.log() + noise, float("-inf"))
        else:
            ids = torch.arange(vocab_size, device=device)
            residual_scores = torch.where(
                ids == drafts[rows, at][:, None], -torch.inf, target_scores
            )
        best = residual_scores.amax(-1)
        token = torch.where(rejected & (best > float("-inf")), residual_scores.argmax(-1), token)
    token = torch.where(greedy, argmax[rows, tau], token)

    padding = num_draft_tokens < 0
    ok = good[rows, tau] | padding
    num_sampled = torch.where(ok & ~padding, tau + 1, 0).to(torch.int32)
    padded_drafts = torch.nn.functional.pad(drafts, (0, 1), value=-1)
    tokens = torch.where(steps == tau[:, None], token[:, None], padded_drafts)
    tokens = torch.where(steps < num_sampled[:, None], tokens, -1).to(torch.int32)
    return tokens, num_sampled, ok


def _weights(
    logits: Tensor, row_max: Tensor, temperature: Tensor, thresholds: Tensor | None
) -> Tensor:
    """Return ``exp((logit - row max) / T)``, 0 where a logit is below its row's threshold."""
    scaled = (logits - row_max[..., None]).div_(temperature[:, None, None])
    weights = scaled.exp_()
    if thresholds is None:
        return weights
    return torch.where(logits >= thresholds[..., None], weights, 0.0)


def _draft_probs(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return q, ``softmax(logits / T)`` as the drafts were drawn."""
    weights = _weights(logits, logits.amax(-1), temperature, None)
    return weights / weights.sum(-1, keepdim=True)


def _uniforms(seeds: Tensor, first_positions: Tensor, sample_index: Tensor, k: int) -> Tensor:
    """Return the acceptance uniforms ``[B, k]``."""
    steps = torch.arange(k, device=seeds.device, dtype=torch.int32)
    shape = (seeds.shape[0], k)
    return accept_uniform(
        seeds[:, None].expand(shape).reshape(-1),
        (first_positions[:, None] + steps).reshape(-1),
        steps.expand(shape).reshape(-1),
        sample_index[:, None].expand(shape).reshape(-1),
    ).view(shape)


def _gather_draft(values: Tensor, target_ids: Tensor, draft_ids: Tensor | None) -> Tensor:
    """Gather ``values[..., Vd]`` at target ids ``[..., N]``; 0 outside the draft's vocabulary."""
    draft_vocab = values.shape[-1]
    ids = target_ids if draft_ids is None else draft_ids.to(torch.int64)[target_ids]
    inside = (ids >= 0) & (ids < draft_vocab)
    return torch.where(inside, values.gather(-1, ids.clamp(0, draft_vocab - 1)), 0.0)

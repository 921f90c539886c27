"""Sampling by the Gumbel-max trick, keyed by seed, position and stream."""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.kernels.reference.rng import token_gumbel, vocab_gumbel
from specgen.kernels.streams import GREEDY_TEMPERATURE


def _argmax_lowest_id(scores: Tensor, target_ids: Tensor | None) -> Tensor:
    """Return the (target) id of the largest score in the last dimension, ties to the lowest."""
    if target_ids is None:
        return scores.argmax(-1)  # argmax returns the first of equal values
    best = scores.amax(-1, keepdim=True)
    none = torch.iinfo(torch.int32).max
    return torch.where(scores == best, target_ids, none).amin(-1)


def greedy_sample(
    logits: Tensor, positions: Tensor, target_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the argmax of every row: :func:`gumbel_sample` at temperature 0, without its noise.

    Args:
        logits: ``[B, Q, V]`` fp32, bf16 or fp16.
        positions: ``[B, Q]`` int32; -1 = inert row, others are not looked at.
        target_ids: ``[V]`` int32 target id of every column, or None where they are the same.

    Returns:
        ``(tokens, ok)`` as :func:`gumbel_sample`.
    """
    finite = logits.amax(-1).isfinite()
    inert = positions < 0
    token = _argmax_lowest_id(logits, target_ids)
    return torch.where(finite & ~inert, token, -1).to(torch.int32), finite | inert


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
    """Draw one token a row from ``softmax(logits / temperature)``.

    The token is the argmax of ``(logit - row max) / T + gumbel noise``; below T = 1e-5 it is the
    argmax of the logits. Noise is keyed by *target* ids, so a reduced vocabulary sees the same
    noise as the full one. Ties go to the lowest target id.

    Args:
        logits: ``[B, Q, V]`` fp32, bf16 or fp16.
        temperature: ``[B]`` fp32.
        seeds: ``[B]`` int64.
        positions: ``[B, Q]`` int32 absolute positions of the tokens drawn; -1 = inert row.
        sample_index: ``[B]`` int32.
        stream: one of :mod:`specgen.kernels.streams`.
        block_index: index of the draft in its block (0 on TARGET).
        thresholds: ``[B, Q]`` fp32 of :func:`~specgen.kernels.reference.logits.filter_thresholds`,
            or None.
        target_ids: ``[V]`` int32 target id of every column, or None where they are the same.
        slot_ids: ``[B]`` int32, rows of ``kept_logits``; -1 only where the row is inert.
        kept_logits: ``[S + 1, V]`` in the dtype of the logits, or None: takes the logits of each
            row that is not inert, Q being 1. The last row is a spare one of any content.

    Returns:
        ``(tokens, ok)``: ``[B, Q]`` int32 target ids and ``[B, Q]`` bool. Inert rows give -1 and
        True; rows with NaN or +inf, or with -inf only, give -1 and False.
    """
    batch, num_queries, vocab_size = logits.shape
    if kept_logits is not None:
        assert slot_ids is not None
        spare = kept_logits.shape[0] - 1
        kept_logits[torch.where(positions[:, 0] < 0, spare, slot_ids).long()] = logits[:, 0]
    logits = logits.to(torch.float32)
    row_max = logits.amax(-1)  # NaN where the row holds NaN
    finite = row_max.isfinite()
    greedy = temperature < GREEDY_TEMPERATURE
    safe_temperature = torch.where(greedy, 1.0, temperature)

    def per_query(values: Tensor) -> Tensor:
        return values[:, None].expand(batch, num_queries).reshape(-1)

    address = (
        positions.reshape(-1),
        stream,
        torch.full_like(positions, block_index).reshape(-1),
        per_query(sample_index),
    )
    if target_ids is None:
        noise = vocab_gumbel(per_query(seeds), vocab_size, *address)
    else:
        ids = target_ids[None, :].expand(batch * num_queries, vocab_size)
        noise = token_gumbel(per_query(seeds), ids, *address)
    scores = (logits - row_max[..., None]) / safe_temperature[:, None, None]
    scores = scores + noise.view(batch, num_queries, vocab_size)
    if thresholds is not None:
        scores = torch.where(logits >= thresholds[..., None], scores, float("-inf"))
    scores = torch.where(greedy[:, None, None], logits, scores)
    token = _argmax_lowest_id(scores, target_ids)

    inert = positions < 0
    token = torch.where(finite & ~inert, token, -1).to(torch.int32)
    return token, finite | inert

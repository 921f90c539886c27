"""Thresholds of top-k and top-p."""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.kernels.streams import GREEDY_TEMPERATURE


def filter_thresholds(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the raw logit from which on tokens are kept by top-k, then top-p.

    A token is kept iff its logit (in fp32) is >= the threshold. Top-k keeps the k largest logits
    and every tie of the k-th. Top-p works on what top-k left, renormalised, at the row's
    temperature: the smallest set of the most probable tokens whose mass reaches ``top_p``, with
    every tie of its last value and never fewer than one token. Logits of -inf never count.

    Args:
        logits: ``[B, Q, V]`` fp32, bf16 or fp16.
        temperature: ``[B]`` fp32. Rows below 1e-5 are greedy and not filtered.
        top_k: ``[B]`` int32, 0 = off.
        top_p: ``[B]`` fp32, >= 1 = off.

    Returns:
        ``[B, Q]`` fp32, -inf where nothing is filtered; any value in rows that hold NaN.
    """
    vocab_size = logits.shape[-1]
    ordered = logits.to(torch.float32).sort(dim=-1, descending=True).values
    greedy = (temperature < GREEDY_TEMPERATURE)[:, None]
    minus_inf = torch.full_like(ordered[..., 0], float("-inf"))

    kth = (top_k.to(torch.int64) - 1).clamp(0, vocab_size - 1)
    kth_logit = ordered.gather(-1, kth[:, None, None].expand(*ordered.shape[:2], 1))[..., 0]
    k_off = (top_k <= 0)[:, None]
    threshold = torch.where(k_off, minus_inf, kth_logit)

    safe_temperature = torch.where(temperature < GREEDY_TEMPERATURE, 1.0, temperature)
    weights = torch.exp((ordered - ordered[..., :1]) / safe_temperature[:, None, None])
    weights = torch.where(ordered >= threshold[..., None], weights, 0.0)
    mass = weights.to(torch.float64).cumsum(-1)
    needed = top_p.to(torch.float64)[:, None] * mass[..., -1]
    last = (mass < needed[..., None]).sum(-1, keepdim=True).clamp(max=vocab_size - 1)
    p_logit = ordered.gather(-1, last)[..., 0]
    p_off = (top_p >= 1.0)[:, None]
    threshold = torch.where(p_off, threshold, torch.maximum(threshold, p_logit))
    return torch.where(greedy, minus_inf, threshold)

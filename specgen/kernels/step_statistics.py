"""Statistics of the logits of a decode step: the only pass of verification over all of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.block_statistics import store_block
from specgen.kernels.lanes import LANE_GROUP, NUM_LANES, VOCAB_BLOCK
from specgen.kernels.overlap import register_options, release, wait
from specgen.kernels.streams import GREEDY_TEMPERATURE

_WARPS = NUM_LANES // 32
_MAX_REGISTERS = 48
"""Of a thread whose logits have 16 bits: fewer would read fewer of them at a time, and with more
fewer programs run. Logits of 32 bits do not fit."""
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)


class StepStatistics(NamedTuple):
    """What :mod:`specgen.kernels.block_statistics` says of the N (or Nd) blocks of all rows."""

    max: Tensor
    """fp32 `[B, k+1, N]`."""
    sum: Tensor
    """fp32 `[B, k+1, N]`."""
    first: Tensor
    """int32 `[B, k+1, N]`, of greedy rows."""
    lane_max: Tensor
    """`[B, k+1, N, NUM_LANES]` in the type of the logits, of rows that are sampled."""
    draft_max: Tensor
    """fp32 `[B, k, Nd]`."""
    draft_sum: Tensor
    """fp32 `[B, k, Nd]`."""


@triton.jit(do_not_specialize=["k"])
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
    lane_max_ptr,
    draft_max_ptr,
    draft_sum_ptr,
    V,
    Vd,
    num_blocks,
    num_draft_blocks,
    k,
    HAS_DRAFT_LOGITS: tl.constexpr,
    HAS_THRESHOLDS: tl.constexpr,
    HAS_SYNTHETIC: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Statistics of one block: steps 0 .. k are rows of the target, those behind of the draft."""
    # In this order: what judges reads drafts and logits while statistics are made.
    wait(OVERLAP)
    release(OVERLAP)
    b = tl.program_id(0)
    step = tl.program_id(1)
    block = tl.program_id(2)
    num_drafts = tl.minimum(tl.load(num_drafts_ptr + b), k)
    temperature = tl.load(temperature_ptr + b)
    is_sampled = temperature >= _GREEDY
    temperature = tl.where(is_sampled, temperature, 1.0)
    # Greedy rows are judged by their argmax. (Synthetic rates measure the time of real ones.)
    has_probs = is_sampled
    if HAS_SYNTHETIC:
        has_probs = temperature > 0.0
    if step <= k:
        if (step <= num_drafts) & (block < num_blocks):
            row = b * (k + 1) + step
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
                is_sampled,
                max_ptr,
                sum_ptr,
                first_ptr,
                lane_max_ptr,
                row.to(tl.int64) * num_blocks + block,
                HAS_THRESHOLDS=HAS_THRESHOLDS,
                HAS_ROW=True,
                BLOCK=BLOCK,
                GROUP=GROUP,
                LANES=LANES,
            )
    elif HAS_DRAFT_LOGITS:
        i = step - (k + 1)
        if has_probs & (i < num_drafts) & (block < num_draft_blocks):
            slot = tl.load(slot_ids_ptr + b).to(tl.int64)
            store_block(
                draft_logits_ptr + slot * stride_slot + i.to(tl.int64) * stride_draft,
                block * BLOCK,
                Vd,
                temperature,
                0.0,
                True,
                True,
                draft_max_ptr,
                draft_sum_ptr,
                None,
                None,
                (b * k + i).to(tl.int64) * num_draft_blocks + block,
                HAS_THRESHOLDS=False,
                HAS_ROW=False,
                BLOCK=BLOCK,
                GROUP=GROUP,
                LANES=LANES,
            )


def step_statistics(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    slot_ids: Tensor,
    num_draft_tokens: Tensor,
    temperature: Tensor,
    thresholds: Tensor | None,
    *,
    has_synthetic: bool,
    options: dict[str, Any],
) -> StepStatistics:
    """Launch the pass over the rows of ``[B, k + 1, V]`` and ``[S, >= k, Vd]`` that may be judged.

    Args:
        has_synthetic: Whether greedy rows need sums too.
        options: Of the launch.
    """
    batch, num_steps, vocab_size = target_logits.shape
    k, device = num_steps - 1, target_logits.device
    draft_vocab, draft_strides = 0, (0, 0)
    if draft_logits is not None:
        draft_vocab = draft_logits.shape[-1]
        draft_strides = (draft_logits.stride(0), draft_logits.stride(1))
    num_blocks = triton.cdiv(vocab_size, VOCAB_BLOCK)
    num_draft_blocks = triton.cdiv(draft_vocab, VOCAB_BLOCK)
    shape, draft_shape = (batch, num_steps, num_blocks), (batch, k, num_draft_blocks)
    statistics = StepStatistics(
        max=torch.empty(shape, dtype=torch.float32, device=device),
        sum=torch.empty(shape, dtype=torch.float32, device=device),
        first=torch.empty(shape, dtype=torch.int32, device=device),
        lane_max=torch.empty((*shape, NUM_LANES), dtype=target_logits.dtype, device=device),
        draft_max=torch.empty(draft_shape, dtype=torch.float32, device=device),
        draft_sum=torch.empty(draft_shape, dtype=torch.float32, device=device),
    )
    all_steps = num_steps if draft_logits is None else num_steps + k
    element_sizes = {x.element_size() for x in (target_logits, draft_logits) if x is not None}
    max_registers = _MAX_REGISTERS if element_sizes == {2} else None
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
        *statistics,
        vocab_size,
        draft_vocab,
        num_blocks,
        num_draft_blocks,
        k,
        HAS_DRAFT_LOGITS=draft_logits is not None,
        HAS_THRESHOLDS=thresholds is not None,
        HAS_SYNTHETIC=has_synthetic,
        BLOCK=VOCAB_BLOCK,
        GROUP=LANE_GROUP,
        LANES=NUM_LANES,
        num_warps=_WARPS,
        **register_options(max_registers),
        **options,
    )
    return statistics

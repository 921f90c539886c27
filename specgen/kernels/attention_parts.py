"""Parts of an attention: what programs that read pieces of one context leave for one another.

A part is a sum of values weighted by exp2(score - largest score of the piece), that largest score
and the sum of the weights. Parts are joined by their log-sum-exps (Dao et al., "Flash-Decoding",
2023).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.overlap import enter, overlap_options


class Parts(NamedTuple):
    """Parts of every query head; their number is the second size of all three."""

    acc: Tensor
    """float32 `[B * Q * Hq, parts, D]`, weighted sums of values."""
    largest: Tensor
    """float32 `[B * Q * Hq, parts]`, largest scores, times log2(e); -inf where nothing is seen."""
    total: Tensor
    """float32 `[B * Q * Hq, parts]`, sums of weights; 0 where nothing is seen."""


class JoinCut(NamedTuple):
    """How the join is cut: query heads a program, and warps."""

    lines: int
    num_warps: int


def new_parts(num_lines: int, num_parts: int, head_dim: int, device: torch.device) -> Parts:
    """Room for parts, unwritten."""
    shape = (num_lines, num_parts)
    return Parts(
        acc=torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
        largest=torch.empty(shape, dtype=torch.float32, device=device),
        total=torch.empty(shape, dtype=torch.float32, device=device),
    )


@triton.jit
def merge(left_max, left_sum, left_acc, right_max, right_sum, right_acc):
    """Two parts of the same query heads in one. A NaN in either stays."""
    top = tl.maximum(left_max, right_max)
    # exp2(-inf - -inf) is NaN: heads that saw nothing yet use 0 as their reference.
    reference = tl.where(top == float("-inf"), 0.0, top)
    left_weight = tl.exp2(left_max - reference)
    right_weight = tl.exp2(right_max - reference)
    total = left_sum * left_weight + right_sum * right_weight
    acc = left_acc * left_weight[:, None] + right_acc * right_weight[:, None]
    return top, total, acc


@triton.jit
def load_parts(
    acc_ptr,
    largest_ptr,
    total_ptr,
    lines,
    mask,
    d,
    NUM_PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """All parts of some query heads, merged; every one of them has been written whole."""
    rows = lines * NUM_PARTS
    acc_mask = mask[:, None] & (d < HEAD_DIM)[None, :]
    offsets = rows[:, None] * HEAD_DIM + d[None, :]
    largest = tl.load(largest_ptr + rows, mask=mask, other=float("-inf"))
    total = tl.load(total_ptr + rows, mask=mask, other=0.0)
    acc = tl.load(acc_ptr + offsets, mask=acc_mask, other=0.0)
    for part in tl.static_range(1, NUM_PARTS):
        next_largest = tl.load(largest_ptr + rows + part, mask=mask, other=float("-inf"))
        next_total = tl.load(total_ptr + rows + part, mask=mask, other=0.0)
        next_acc = tl.load(acc_ptr + offsets + part * HEAD_DIM, mask=acc_mask, other=0.0)
        largest, total, acc = merge(largest, total, acc, next_largest, next_total, next_acc)
    return largest, total, acc


@triton.jit(do_not_specialize=["num_lines", "num_parts"])  # they change with the batch
def _join_kernel(
    part_acc_ptr,
    part_max_ptr,
    part_sum_ptr,
    out_ptr,
    num_lines,
    num_parts,
    HEAD_DIM: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    enter(OVERLAP)
    line = tl.program_id(0).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)  # of [B * Q * Hq]
    part = tl.arange(0, PARTS_PAD)
    d = tl.arange(0, BLOCK_D)
    mask = (line < num_lines)[:, None] & (part < num_parts)[None, :]
    part_rows = line[:, None] * num_parts + part[None, :]
    part_sum = tl.load(part_sum_ptr + part_rows, mask=mask, other=0.0)
    part_max = tl.load(part_max_ptr + part_rows, mask=mask, other=float("-inf"))
    used = part_sum != 0  # NaN counts: a broken row must not look like an empty one
    part_max = tl.where(used, part_max, float("-inf"))
    top = tl.max(part_max, axis=1)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.where(used, tl.exp2(part_max - top[:, None]), 0.0)
    acc_mask = used[:, :, None] & (d < HEAD_DIM)[None, None, :]
    offsets = part_rows[:, :, None] * HEAD_DIM + d[None, None, :]
    acc = tl.load(part_acc_ptr + offsets, mask=acc_mask, other=0.0)
    total = tl.sum(part_sum * weight, axis=1)
    result = tl.sum(acc * weight[:, :, None], axis=1) / tl.where(total != 0, total, 1.0)[:, None]
    target = out_ptr + line[:, None] * HEAD_DIM + d[None, :]
    out_mask = (line < num_lines)[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=out_mask)


def cut_join(num_lines: int, num_parts: int) -> JoinCut:
    """A program for each query head of few, for several of many."""
    if num_parts > 8:
        return JoinCut(lines=1, num_warps=4)
    return JoinCut(lines=4 if num_lines >= 4096 else 1, num_warps=1)


def join_parts(parts: Parts, out: Tensor, cut: JoinCut | None = None) -> None:
    """Write the attention that the parts amount to.

    A part's `acc` is not read where its `total` is 0.

    Args:
        parts: of every query head of `out`.
        out: `[B, Q, Hq, D]`, contiguous; zeros where no part saw anything.
        cut: how; None: chosen by the shape.
    """
    num_lines, num_parts, head_dim = parts.acc.shape
    cut = cut or cut_join(num_lines, num_parts)
    _join_kernel[(triton.cdiv(num_lines, cut.lines),)](
        parts.acc,
        parts.largest,
        parts.total,
        out,
        num_lines,
        num_parts,
        HEAD_DIM=head_dim,
        PARTS_PAD=triton.next_power_of_2(num_parts),
        BLOCK_L=cut.lines,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_warps=cut.num_warps,
        **overlap_options(out),
    )

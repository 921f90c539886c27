"""Products of few rows with large weight matrices, which are bound by reading the weights.

One row is a matrix-vector product: a program sums a few output columns over chunks of K. Up to
``_MOST_ROWS`` rows, a program keeps all rows for a tile of output columns in the accumulators of
matrix instructions and streams its weights past them; twice as many for gate and up together, which
need no kernel for the silu. Where tiles are too few to fill a GPU, K is cut into parts. Every sum
has one fixed order, so that a result does not depend on timing. More rows than that, and float32,
go to the vendor's library (`library_products.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.activation import silu_mul
from specgen.kernels.library_products import is_measured, library_linear, library_parts
from specgen.kernels.overlap import enter, overlap_options
from specgen.kernels.products import dot

_MOST_ROWS = 64
_MOST_GATED_ROWS = 128
_MANY_COLUMNS = 16384


class Plan(NamedTuple):
    """How a product is cut.

    ``block_n`` is the number of output columns of a program and ``block_k`` the piece of K it takes
    at a time; ``swapped`` has the weights on the left of the matrix instruction, and ``parts`` is
    the number of pieces of K that different programs sum.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swapped: bool = False
    parts: int = 1


@triton.jit
def _gated(gate, up, dtype: tl.constexpr):
    """silu(gate) * up with the roundings of `silu_mul`; both are rounded already."""
    gate = gate.to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (silu * up.to(tl.float32)).to(dtype)


@triton.jit
def _load_wide(pointers, k, K, EVEN_K: tl.constexpr):
    """Load along K in float32, zeros past its end."""
    values = tl.load(pointers) if EVEN_K else tl.load(pointers, mask=k < K, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _sum_columns(acc, bias_ptr, offset, n, N, HAS_BIAS: tl.constexpr):
    """Totals of the columns ``n``, the bias from ``offset`` on included."""
    total = tl.sum(acc, axis=1)
    if HAS_BIAS:
        total += tl.load(bias_ptr + offset + n, mask=n < N, other=0.0).to(tl.float32)
    return total


@triton.jit
def _line_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    N,
    K,
    up_offset,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    enter(OVERLAP)
    dtype = out_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = _load_wide(w_rows + k[None, :], k[None, :], K, EVEN_K)
        x = _load_wide(x_ptr + k, k, K, EVEN_K)[None, :]
        if GATED:
            acc_up += _load_wide(w_rows + up_offset + k[None, :], k[None, :], K, EVEN_K) * x
        acc += w * x
    result = _sum_columns(acc, bias_ptr, 0, n, N, HAS_BIAS).to(dtype)
    if GATED:
        up = _sum_columns(acc_up, bias_ptr, N, n, N, HAS_BIAS).to(dtype)
        result = _gated(result, up, dtype)
    tl.store(out_ptr + n, result, mask=n < N)


@triton.jit
def _multiply(x, w, acc, SWAPPED: tl.constexpr, WIDEN: tl.constexpr):
    acc = dot(w, tl.trans(x), acc, WIDEN) if SWAPPED else dot(x, tl.trans(w), acc, WIDEN)
    return acc


@triton.jit
def _tile_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    x_stride,
    up_offset,
    part_size,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IN_PARTS: tl.constexpr,
    SWAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    OVERLAP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    enter(OVERLAP)
    dtype = out_ptr.dtype.element_ty
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x_ptr + m[:, None].to(tl.int64) * x_stride
    w_rows = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    if SWAPPED:
        acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    acc_up = acc
    part = tl.program_id(1)
    first = 0
    end = K
    if IN_PARTS:
        first = part * part_size
        end = tl.minimum(first + part_size, K)
    for start in range(first, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        if EVEN_K:
            x = tl.load(x_rows + k, mask=m[:, None] < M, other=0.0)
            w = tl.load(w_rows + k)
        else:
            x = tl.load(x_rows + k, mask=(m[:, None] < M) & (k < K), other=0.0)
            w = tl.load(w_rows + k, mask=k < K, other=0.0)
        acc = _multiply(x, w, acc, SWAPPED, WIDEN)
        if GATED:
            if EVEN_K:
                up = tl.load(w_rows + up_offset + k)
            else:
                up = tl.load(w_rows + up_offset + k, mask=k < K, other=0.0)
            acc_up = _multiply(x, up, acc_up, SWAPPED, WIDEN)
    if SWAPPED:
        rows, columns = m[None, :], n[:, None]
    else:
        rows, columns = m[:, None], n[None, :]
    if HAS_BIAS:
        in_this_part = (columns < N) & (part == 0)
        acc += tl.load(bias_ptr + columns, mask=in_this_part, other=0.0).to(tl.float32)
    result = acc.to(dtype)
    if GATED:
        if HAS_BIAS:
            acc_up += tl.load(bias_ptr + N + columns, mask=columns < N, other=0.0).to(tl.float32)
        result = _gated(result, acc_up.to(dtype), dtype)
    mask = (rows < M) & (columns < N)
    tl.store(out_ptr + (part * M + rows).to(tl.int64) * N + columns, result, mask=mask)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows with a weight matrix: x W^T + b.

    Args:
        x: `[T, K]`.
        weight: `[N, K]`, in the dtype of x.
        bias: `[N]`.

    Returns:
        `[T, N]` in the dtype of x, summed in float32 and rounded once.
    """
    plan = choose_plan(x, weight, gated=False)
    if plan is None:
        return library_linear(x, weight, bias)
    return multiply(x, weight, bias, plan, gated=False)


def linear_parts(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, perhaps not summed up yet, for `rms_norm_residual`, which takes either.

    Returns:
        `[T, N]` in the dtype of x, or float32 `[P, T, N]`, P parts that add up to it.
    """
    plan = choose_plan(x, weight, gated=False, in_parts=True)
    if plan is not None:
        return multiply(x, weight, bias, plan, gated=False)
    return library_parts(x, weight, bias)


def linear_silu_mul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows with a gate and another matrix, then `silu_mul` of the two.

    Args:
        x: `[T, K]`.
        weight: `[2*I, K]`: the rows of the gate, then those of the other projection.
        bias: `[2*I]`.

    Returns:
        `[T, I]`; both products are rounded to the dtype of x before the silu.
    """
    plan = choose_plan(x, weight, gated=True)
    if plan is None:
        return silu_mul(library_linear(x, weight, bias))
    return multiply(x, weight, bias, plan, gated=True)


def choose_plan(x: Tensor, weight: Tensor, *, gated: bool, in_parts: bool = False) -> Plan | None:
    """The plan for x `[T, K]` and weight `[N, K]`; None leaves them to the library.

    The rules are frozen measurements on a GPU of capability 9.0 (``benchmarks/skinny_products.py``
    makes them); other GPUs are left to the library, as all of float32 is: tokens at temperature 0
    must not depend on which rows share a batch.

    Args:
        x: the rows.
        weight: the weights, of the gate and of the other projection where gated.
        gated: whether `linear_silu_mul` asks.
        in_parts: whether the result may come in parts.
    """
    num_rows, inner = x.shape
    width = weight.shape[0]
    most = _MOST_GATED_ROWS if gated else _MOST_ROWS
    if not 0 < num_rows <= most or not is_measured(x, weight):
        return None
    if num_rows == 1:
        return _plan_of_one_row(inner, gated)
    if gated and num_rows > _MOST_ROWS:
        return Plan(128, 64, 8, 4, swapped=True)
    if gated:
        return Plan(64, 64, 4, 8 if num_rows <= 16 else 6, swapped=True)
    if in_parts and width <= _MANY_COLUMNS:
        if num_rows > 16:
            return Plan(64, 128, 4, 5, swapped=True, parts=2)
        return Plan(64, 128, 4, 4, swapped=True, parts=4 if inner > 8192 else 2)
    if width >= _MANY_COLUMNS:
        return _plan_of_many_columns(num_rows)
    if num_rows <= 16:
        if width <= 4096:
            return Plan(64, 128, 4, 5, swapped=True)
        return Plan(32, 128, 2, 6)
    if inner <= 4096:
        return Plan(64, 128 if num_rows <= 32 else 64, 4, 5 if num_rows <= 32 else 8, swapped=True)
    return Plan(32, 256, 4, 4) if num_rows > 32 and width <= 4096 else None


def _plan_of_one_row(inner: int, gated: bool) -> Plan:
    if gated or inner > 8192:
        return Plan(1, 1024, 4, 1)
    return Plan(1, 2048, 8, 1)


def _plan_of_many_columns(num_rows: int) -> Plan:
    if num_rows <= 16:
        return Plan(64, 128, 4, 5, swapped=True)
    return Plan(64, 64, 4, 8, swapped=True) if num_rows <= 32 else Plan(128, 64, 4, 6, swapped=True)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, *, gated: bool) -> Tensor:
    """A product of few rows, all in one tile, in the way that ``plan`` says.

    Args:
        x: `[T, K]`.
        weight: `[N, K]`.
        bias: `[N]` or None.
        plan: how to cut it; a gated product and one of one row have one part.
        gated: whether to join the halves of the columns as `linear_silu_mul` does.

    Returns:
        `[T, N]` (gated: half as wide), or float32 `[parts, T, N]` where there are several.
    """
    num_rows, inner = x.shape
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    parts = 1 if gated or num_rows == 1 else plan.parts
    shape = (num_rows, width) if parts == 1 else (parts, num_rows, width)
    out_dtype = x.dtype if parts == 1 else torch.float32
    out = torch.empty(shape, dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    x = x if x.stride(-1) == 1 else x.contiguous()
    weight = weight.contiguous()
    up_offset = width * inner
    options = {
        "GATED": gated,
        "HAS_BIAS": bias is not None,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "EVEN_K": inner % plan.block_k == 0,
        "num_warps": plan.num_warps,
        "num_stages": plan.num_stages,
        **overlap_options(x),
    }
    tiles = triton.cdiv(width, plan.block_n)
    if num_rows == 1:
        _line_kernel[(tiles,)](x, weight, bias, out, width, inner, up_offset, **options)
        return out
    part_size = triton.cdiv(triton.cdiv(inner, parts), plan.block_k) * plan.block_k
    _tile_kernel[(tiles, parts)](
        x,
        weight,
        bias,
        out,
        num_rows,
        width,
        inner,
        x.stride(0),
        up_offset,
        part_size,
        IN_PARTS=parts > 1,
        SWAPPED=plan.swapped,
        BLOCK_M=max(16, triton.next_power_of_2(num_rows)),
        WIDEN=not x.is_cuda,
        **options,
    )
    return out

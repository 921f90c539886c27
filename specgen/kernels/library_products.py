"""Products by the vendor's library, in the pieces in which it is fastest.

The library cuts a product into tiles and computes one on each multiprocessor at a time. Where its
tiles are few it leaves a GPU idle, or cuts K and adds the parts with a kernel of its own; where the
last of them are few it leaves a GPU half idle. Each is known from measurements on a GPU of
capability 9.0 (``benchmarks/skinny_products.py`` makes them).
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor
from torch.nn import functional

_FEWEST_WEIGHTS = 1 << 22  # less than that has not been measured
_FEWEST_ROWS_IN_PARTS = 65
_TILE = 128
# With so many tiles or fewer, most multiprocessors of a large GPU wait for a few.
_FEW_TILES = 64
_PARTS = 2
# Rows that are two nearly full tiles. With fewer the library has tiles of other sizes.
_TWO_TILES = range(225, 2 * _TILE + 1)
_TILE_COLUMNS = 256
# How full a last wave is where two products were measured to be as fast or faster.
_HALF_IDLE = (0.4, 0.8)


def library_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, in two products of some columns each where that is faster.

    Args:
        x: `[T, K]`.
        weight: `[N, K]`, in the dtype of x.
        bias: `[N]`.

    Returns:
        `[T, N]` in the dtype of x.
    """
    if x.is_cuda and bias is None and x.shape[0] in _TWO_TILES and is_measured(x, weight):
        columns = columns_of_full_waves(weight.shape[0], _num_multiprocessors(x.device.index))
        if columns:
            return multiply_in_waves(x, weight, columns)
    return functional.linear(x, weight, bias)


def library_parts(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`library_linear`, or two sums over half of K each, for the norm behind to add.

    Returns:
        `[T, N]` in the dtype of x, or float32 `[2, T, N]`.
    """
    if x.is_cuda and bias is None and _pays_in_parts(x, weight):
        return multiply_halves(x, weight)
    return library_linear(x, weight, bias)


def _pays_in_parts(x: Tensor, weight: Tensor) -> bool:
    num_rows, inner = x.shape
    if num_rows < _FEWEST_ROWS_IN_PARTS or inner % (8 * _PARTS) or not is_measured(x, weight):
        return False
    num_tiles: int = triton.cdiv(weight.shape[0], _TILE) * triton.cdiv(num_rows, _TILE)
    return num_tiles <= _FEW_TILES


def columns_of_full_waves(num_columns: int, num_multiprocessors: int) -> int:
    """Columns of a product of two tiles of rows in whose tiles no multiprocessor is left out.

    The columns behind them, alone in a product, are cut into smaller tiles, which fill a GPU.

    Returns:
        0 where the last wave of tiles is the only one, nearly full or nearly empty.
    """
    wave = num_multiprocessors // 2 * _TILE_COLUMNS
    rest = num_columns % wave
    least, most = _HALF_IDLE
    return num_columns - rest if least * wave <= rest < most * wave else 0


def multiply_in_waves(x: Tensor, weight: Tensor, columns: int) -> Tensor:
    """A product in two: so many columns, then the others.

    Args:
        x: `[T, K]`.
        weight: `[N, K]`.
        columns: between 0 and N.

    Returns:
        `[T, N]` in the dtype of x.
    """
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    torch.mm(x, weight[:columns].t(), out=out[:, :columns])
    torch.mm(x, weight[columns:].t(), out=out[:, columns:])
    return out


def multiply_halves(x: Tensor, weight: Tensor) -> Tensor:
    """A product in two parts, on a GPU.

    Args:
        x: `[T, K]`, K even.
        weight: `[N, K]`.

    Returns:
        float32 `[2, T, N]`, the sums over either half of K.
    """
    halves = x.unflatten(1, (_PARTS, -1)).transpose(0, 1)
    weights = weight.unflatten(1, (_PARTS, -1)).permute(1, 2, 0)
    return torch.bmm(halves, weights, out_dtype=torch.float32)


def is_measured(x: Tensor, weight: Tensor) -> bool:
    """Whether measured rules are for this type, device and size of weights.

    float32 is left to the library as a whole: tokens at temperature 0 must not depend on which rows
    share a batch. A CPU stands for the GPU, in Triton's interpreter.
    """
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.numel() < _FEWEST_WEIGHTS:
        return False
    return x.device.type == "cpu" or _capability(x.device.index) == (9, 0)


@functools.cache
def _capability(device_index: int) -> tuple[int, int]:
    """A fact of the hardware."""
    return torch.cuda.get_device_capability(device_index)


@functools.cache
def _num_multiprocessors(device_index: int) -> int:
    """A fact of the hardware."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count

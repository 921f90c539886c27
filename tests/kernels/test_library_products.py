"""How products are cut for the vendor's library."""

from __future__ import annotations

import pytest
import torch

from specgen.kernels.library_products import columns_of_full_waves, multiply_in_waves


@pytest.mark.parametrize(
    ("num_columns", "num_multiprocessors", "columns"),
    [
        (28672, 132, 16896),  # 224 tiles: 132 and 92
        (24576, 132, 16896),
        (128256, 132, 118272),  # seven waves and a half
        (151936, 132, 0),  # the ninth is full
        (16896, 132, 0),  # one
        (33792, 132, 0),  # two
        (16384, 132, 0),  # less than one
        (18432, 132, 0),  # a few tiles behind the first
        (28672, 114, 0),  # two, nearly
        (28672, 84, 21504),
    ],
)
def test_waves_are_full(num_columns: int, num_multiprocessors: int, columns: int) -> None:
    assert columns_of_full_waves(num_columns, num_multiprocessors) == columns


@pytest.mark.parametrize(("rows", "columns", "inner", "cut"), [(5, 37, 12, 16), (1, 2, 3, 1)])
def test_two_products_are_one(rows: int, columns: int, inner: int, cut: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inner, generator=generator)
    weight = torch.randn(columns, inner, generator=generator)
    torch.testing.assert_close(multiply_in_waves(x, weight, cut), x @ weight.T)

"""Packed whole prompts against dense attention in float64, and the rotated keys that they take."""

from __future__ import annotations

import inspect

import pytest
import torch
from kernels.paged_rows import TOLERANCE, dense

from specgen.kernels import packed_attention as gpu_packed
from specgen.kernels import rotary as triton_rotary
from specgen.kernels.reference import packed_attention as reference_packed
from specgen.kernels.reference import rotary as reference_rotary


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("window", [0, 1, 7, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("poison")
def test_every_row_sees_itself_alone(device: str, dtype: torch.dtype, window: int) -> None:
    lengths, heads, kv_heads, head_dim = [9, 1, 33, 16], 4, 2, 32
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    total = int(starts[-1])
    q = torch.randn(total, heads, head_dim).to(dtype)
    k = torch.randn(total, kv_heads, head_dim).to(dtype)
    # Values are a part of a wider tensor, as the projection leaves them.
    v = torch.randn(total, 5, head_dim).to(dtype)[:, -kv_heads:]
    module = reference_packed
    if gpu_packed.applies(q.to(device), head_dim, 4096):
        module = gpu_packed
    arguments = (q.to(device), k.to(device), v.to(device), starts.to(device))
    out = module.packed_attention(*arguments, max(lengths), 0.2, window).cpu()
    assert out.dtype == dtype
    for row, length in enumerate(lengths):
        begin = int(starts[row])
        span = slice(begin, begin + length)
        for i in range(length):
            expected = dense(q[begin + i], k[span], v[span], i, 0.2, window)
            torch.testing.assert_close(
                out[begin + i].double(), expected, rtol=0, atol=TOLERANCE[dtype]
            )


def test_a_cpu_never_takes_the_path() -> None:
    for module in (gpu_packed, reference_packed):
        assert not module.applies(torch.zeros(1, dtype=torch.bfloat16), 128, 4096)


@pytest.mark.parametrize("module", [reference_rotary, triton_rotary])
@pytest.mark.usefixtures("poison")
def test_the_rotated_keys_come_out_in_token_order(module: object, device: str) -> None:
    tokens, heads, kv_heads, head_dim = 5, 3, 2, 6
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=device)
    angles = torch.randn(20, head_dim // 2, device=device)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([3, 19, 0, 7, 7], dtype=torch.int32, device=device)
    slots = torch.tensor([4, -1, 0, 9, 2], device=device)  # a token without a slot has keys too
    caches = torch.zeros(2, 4, 4, kv_heads, head_dim, device=device)
    keys = torch.empty(tokens, kv_heads, head_dim, device=device)
    module.rotary_write_cache(  # type: ignore[attr-defined]
        qkv, positions, table, slots, *caches, heads, kv_heads, keys
    )
    in_cache = caches[0].view(-1, kv_heads, head_dim)
    written = slots >= 0
    assert torch.equal(keys[written], in_cache[slots[written]])
    raw = qkv.view(tokens, -1, head_dim)[1, heads : heads + kv_heads]
    cos, sin = table[19].chunk(2)
    first, second = raw.chunk(2, dim=-1)
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    torch.testing.assert_close(keys[1], expected)


@pytest.mark.parametrize("name", ["applies", "packed_attention"])
def test_signatures_match(name: str) -> None:
    assert inspect.signature(getattr(gpu_packed, name)) == inspect.signature(
        getattr(reference_packed, name)
    )

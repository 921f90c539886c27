"""Rotary embedding and cache write against transformers' function, for Triton and its twin."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from specgen.kernels import rotary as triton_rotary
from specgen.kernels.reference import rotary as reference_rotary

MODULES = [pytest.param(reference_rotary, id="reference"), pytest.param(triton_rotary, id="triton")]
MAX_POS = 50
NUM_BLOCKS, BLOCK_SIZE = 4, 16  # the last block is the one that belongs to no request


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_table(head_dim: int) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(MAX_POS).double()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def oracle(
    qkv: torch.Tensor, positions: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated q, rotated k, v as [T, heads, D]."""
    heads = qkv.float().view(qkv.shape[0], -1, head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    cos, sin = make_table(head_dim)[positions.long()].chunk(2, dim=-1)
    cos, sin = torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None]
    q, k = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    return q[0], k[0], v


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("head_dim", "num_heads", "num_kv_heads", "dtype"),
    [
        (32, 10, 5, torch.float32),
        (64, 4, 4, torch.float32),
        (80, 3, 1, torch.float32),
        (96, 2, 1, torch.float32),
        (128, 5, 1, torch.bfloat16),
        (32, 4, 2, torch.float16),
        (64, 0, 3, torch.float32),
        (128, 0, 1, torch.bfloat16),
    ],
)
@pytest.mark.usefixtures("poison")
def test_rotation_and_cache_write(
    module: ModuleType,
    device: str,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
) -> None:
    positions = torch.tensor([0, 1, 7, 49, 3, 16], dtype=torch.int32)
    slots = torch.tensor([0, 15, -1, 33, 16, -1])
    qkv = torch.randn(6, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    shape = (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)
    k_cache, v_cache = torch.randn(2, *shape).to(dtype)
    k_new, v_new = k_cache.to(device, copy=True), v_cache.to(device, copy=True)
    q = module.rotary_write_cache(
        qkv.to(device),
        positions.to(device),
        make_table(head_dim).to(device),
        slots.to(device),
        k_new,
        v_new,
        num_heads,
        num_kv_heads,
    ).cpu()
    expected_q, expected_k, expected_v = oracle(qkv, positions, num_heads, num_kv_heads, head_dim)
    tolerance = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}[dtype]
    assert q.shape == (6, num_heads, head_dim)
    assert q.dtype == dtype
    torch.testing.assert_close(q.float(), expected_q, rtol=0, atol=tolerance)

    k_new, v_new = k_new.cpu(), v_new.cpu()
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, BLOCK_SIZE)
        torch.testing.assert_close(
            k_new[block, offset].float(), expected_k[token], rtol=0, atol=tolerance
        )
        assert torch.equal(v_new[block, offset].float(), expected_v[token])
        k_cache[block, offset], v_cache[block, offset] = k_new[block, offset], v_new[block, offset]
    # Everything else is untouched; the last token slot belongs to nobody.
    flat = NUM_BLOCKS * BLOCK_SIZE - 1
    assert torch.equal(k_new.flatten(0, 1)[:flat], k_cache.flatten(0, 1)[:flat])
    assert torch.equal(v_new.flatten(0, 1)[:flat], v_cache.flatten(0, 1)[:flat])


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("head_dim", "num_heads", "num_kv_heads", "dtype"),
    [
        (32, 3, 2, torch.float32),
        (80, 2, 1, torch.float32),
        (128, 4, 1, torch.bfloat16),
        (64, 0, 2, torch.float32),
    ],
)
@pytest.mark.usefixtures("poison")
def test_heads_are_normed_before_they_are_rotated(
    module: ModuleType,
    device: str,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
) -> None:
    """Queries and keys each by their own weight, values not at all, rows without a slot too."""
    positions = torch.tensor([0, 49, 7], dtype=torch.int32)
    slots = torch.tensor([17, -1, 3])
    # Heads of very different sizes: a norm over anything but one head would show.
    sizes = torch.tensor([10.0 ** (i % 4 - 1) for i in range(num_heads + 2 * num_kv_heads)])
    heads = (torch.randn(3, len(sizes), head_dim) * sizes[:, None]).to(dtype)
    q_norm, k_norm = (torch.rand(2, head_dim) + 0.5).to(dtype)
    eps = 0.1
    caches = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim, dtype=dtype)
    k_cache, v_cache = caches.to(device)
    q = module.rotary_write_cache(
        heads.flatten(1).to(device),
        positions.to(device),
        make_table(head_dim).to(device),
        slots.to(device),
        k_cache,
        v_cache,
        num_heads,
        num_kv_heads,
        q_norm.to(device),
        k_norm.to(device),
        eps,
    ).cpu()
    wide = heads.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    weights = torch.cat((q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1))).float()
    num_rotated = num_heads + num_kv_heads
    normed = torch.cat((normed[:, :num_rotated] * weights, wide[:, num_rotated:]), dim=1)
    expected_q, expected_k, expected_v = oracle(
        normed.flatten(1), positions, num_heads, num_kv_heads, head_dim
    )
    tolerance = 1e-5 if dtype == torch.float32 else 6e-2
    torch.testing.assert_close(q.float(), expected_q, rtol=0, atol=tolerance)
    for token, slot in ((0, 17), (2, 3)):
        block, offset = divmod(slot, BLOCK_SIZE)
        written = k_cache[block, offset].cpu().float()
        torch.testing.assert_close(written, expected_k[token], rtol=0, atol=tolerance)
        assert torch.equal(v_cache[block, offset].cpu().float(), expected_v[token])


@pytest.mark.usefixtures("poison")
def test_the_triton_kernel_leaves_the_spare_slot_alone(device: str) -> None:
    k_cache = torch.zeros(2, BLOCK_SIZE, 1, 16, device=device)
    v_cache = torch.zeros_like(k_cache)
    triton_rotary.rotary_write_cache(
        torch.randn(3, 48, device=device),
        torch.zeros(3, dtype=torch.int32, device=device),
        make_table(16).to(device),
        torch.full((3,), -1, device=device),
        k_cache,
        v_cache,
        1,
        1,
    )
    assert not k_cache.any()
    assert not v_cache.any()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.usefixtures("poison")
def test_positions_outside_the_table_are_clamped(module: ModuleType, device: str) -> None:
    qkv = torch.randn(1, 48).expand(4, -1).contiguous().to(device)
    caches = torch.zeros(2, 2, BLOCK_SIZE, 1, 16, device=device)
    q = module.rotary_write_cache(
        qkv,
        torch.tensor([-5, 0, MAX_POS - 1, MAX_POS + 7], dtype=torch.int32, device=device),
        make_table(16).to(device),
        torch.arange(4, device=device),
        caches[0],
        caches[1],
        1,
        1,
    )
    assert torch.equal(q[0], q[1])
    assert torch.equal(q[2], q[3])
    assert not torch.equal(q[1], q[2])


def test_signatures_match() -> None:
    assert inspect.signature(triton_rotary.rotary_write_cache) == inspect.signature(
        reference_rotary.rotary_write_cache
    )

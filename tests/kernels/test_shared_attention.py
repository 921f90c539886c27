"""Decode over blocks that rows share and read once, against dense attention in float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from kernels.paged_rows import TOLERANCE, Paged, dense, make_paged

from specgen.kernels import attention as triton_attention
from specgen.kernels import attention_parts
from specgen.kernels.attention_parts import JoinCut
from specgen.kernels.batch_types import SharedPrefix
from specgen.kernels.reference import attention as reference_attention
from specgen.kernels.row_attention import DecodeCut
from specgen.kernels.shared_attention import SharedCut

MODULES = [
    pytest.param(reference_attention, id="reference"),
    pytest.param(triton_attention, id="triton"),
]
BLOCK_SIZE = 16
NOT_A_BLOCK = 2**30


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def share(paged: Paged, num_blocks: int, members: list[int]) -> SharedPrefix:
    """Let ``members`` begin with the first member's blocks.

    Their own tables lose those blocks: whoever reads them there reads outside the cache.
    """
    length = num_blocks * BLOCK_SIZE
    columns = paged.block_tables.shape[1]
    block_ids = torch.full((columns,), NOT_A_BLOCK, dtype=torch.int32)
    is_member = torch.zeros(paged.block_tables.shape[0], dtype=torch.bool)
    if members:
        first = members[0]
        slot = int(paged.slot_ids[first])
        block_ids[:num_blocks] = paged.block_tables[slot, :num_blocks]
        for row in members:
            assert len(paged.keys[row]) >= length
            paged.keys[row][:length] = paged.keys[first][:length]
            paged.values[row][:length] = paged.values[first][:length]
            paged.block_tables[int(paged.slot_ids[row]), :num_blocks] = NOT_A_BLOCK
            is_member[int(paged.slot_ids[row])] = True
    return SharedPrefix(block_ids, torch.tensor([length], dtype=torch.int32), is_member)


def check(
    module: ModuleType,
    device: str,
    paged: Paged,
    shared: SharedPrefix,
    q: torch.Tensor,
    firsts: list[int],
    bound: int,
    softcap: float = 0.0,
) -> None:
    scale = q.shape[-1] ** -0.5
    out = module.decode_attention(
        q.to(device),
        paged.k_cache.to(device),
        paged.v_cache.to(device),
        paged.block_tables.to(device),
        paged.slot_ids.to(device),
        torch.tensor(firsts, dtype=torch.int32, device=device),
        paged.context_lens.to(device),
        scale,
        bound,
        0,
        softcap,
        SharedPrefix(*(tensor.to(device) for tensor in shared)),
    ).cpu()
    for row, first in enumerate(firsts):
        for i in range(q.shape[1]):
            expected = dense(
                q[row, i], paged.keys[row], paged.values[row], first + i, scale, softcap=softcap
            )
            if paged.slot_ids[row] < 0:
                expected = torch.zeros_like(expected)
            torch.testing.assert_close(
                out[row, i].double(), expected, rtol=0, atol=TOLERANCE[q.dtype]
            )


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("num_blocks", [1, 2, 5])
@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "group", "num_queries", "dtype"),
    [
        (32, 2, 2, 4, torch.float32),
        (80, 1, 1, 1, torch.float32),
        (64, 1, 5, 3, torch.float32),
        (128, 1, 4, 2, torch.bfloat16),
        (256, 1, 2, 1, torch.float32),
    ],
)
@pytest.mark.usefixtures("poison")
def test_members_and_others_in_one_batch(
    module: ModuleType,
    device: str,
    num_blocks: int,
    head_dim: int,
    num_kv_heads: int,
    group: int,
    num_queries: int,
    dtype: torch.dtype,
) -> None:
    # A member with nothing but the prefix and its own queries, long and short ones, strangers.
    length = num_blocks * BLOCK_SIZE
    contexts = [length + num_queries, length + 40, 23, length + 17, num_queries]
    paged = make_paged(contexts, num_kv_heads, head_dim, dtype)
    shared = share(paged, num_blocks, [1, 0, 3])
    q = torch.randn(len(contexts), num_queries, num_kv_heads * group, head_dim).to(dtype)
    check(module, device, paged, shared, q, [c - num_queries for c in contexts], 128)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("bound", [64, 1024])
@pytest.mark.usefixtures("poison")
def test_nothing_is_shared(module: ModuleType, device: str, bound: int) -> None:
    """Length 0 with members, and a length without members, in one split and in many."""
    for members_stay in (True, False):
        paged = make_paged([40, 33, 20], 2, 32)
        shared = share(paged, 0, [0, 1]) if members_stay else share(paged, 2, [])
        q = torch.randn(3, 2, 4, 32)
        check(module, device, paged, shared, q, [38, 31, 18], bound)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.usefixtures("poison")
def test_inert_rows_and_capped_scores(module: ModuleType, device: str) -> None:
    """Rows are inert by their slot, or keep it and have no context: both see nothing."""
    paged = make_paged([70, 50, 64, 60], 1, 32)
    shared = share(paged, 3, [0, 1, 2, 3])
    paged.slot_ids[1] = -1
    paged.context_lens[3] = 0
    paged.keys[3], paged.values[3] = paged.keys[3][:0], paged.values[3][:0]
    q = torch.randn(4, 2, 2, 32)
    check(module, device, paged, shared, q, [68, 48, 62, 0], 256, softcap=2.0)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.usefixtures("poison")
def test_more_rows_than_a_tile_holds(module: ModuleType, device: str) -> None:
    contexts = [16 + 1 + i % 3 for i in range(45)]
    paged = make_paged(contexts, 1, 16)
    shared = share(paged, 1, [row for row in range(45) if row % 4 != 3])
    q = torch.randn(45, 1, 4, 16)
    check(module, device, paged, shared, q, [c - 1 for c in contexts], 64)


@pytest.mark.parametrize("module", MODULES)
def test_a_broken_shared_block_breaks_its_members_only(module: ModuleType, device: str) -> None:
    paged = make_paged([40, 40, 40], 1, 32)
    shared = share(paged, 1, [0, 2])
    paged.k_cache[shared.block_ids[0]] = float("nan")
    out = module.decode_attention(
        torch.randn(3, 1, 2, 32, device=device),
        paged.k_cache.to(device),
        paged.v_cache.to(device),
        paged.block_tables.to(device),
        paged.slot_ids.to(device),
        torch.full((3,), 39, dtype=torch.int32, device=device),
        paged.context_lens.to(device),
        0.2,
        64,
        shared=SharedPrefix(*(tensor.to(device) for tensor in shared)),
    ).cpu()
    assert not torch.isfinite(out[[0, 2]]).any()
    assert torch.isfinite(out[1]).all()


SHARED_CUTS = [
    SharedCut(1, 16, 16, 4, 2),
    SharedCut(1, 128, 64, 8, 3, 128),
    SharedCut(2, 64, 32, 4, 3),
    SharedCut(16, 16, 32, 4, 3),  # most pieces are empty
]
OWN_CUTS = [DecodeCut(1, 32, 4, 4), DecodeCut(1, 16, 4, 2), DecodeCut(3, 16, 4, 2)]


@pytest.mark.parametrize("num_blocks", [0, 1, 3, 4, 7])
@pytest.mark.parametrize("own_cut", OWN_CUTS)
@pytest.mark.parametrize("shared_cut", SHARED_CUTS)
@pytest.mark.usefixtures("poison")
def test_every_cut_finds_the_same(
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    shared_cut: SharedCut,
    own_cut: DecodeCut,
    num_blocks: int,
) -> None:
    """Members, one with nothing of its own but its queries, strangers, and inert rows of garbage.

    The number of shared tokens is a multiple of a step or is not, and some pieces have none.
    """
    monkeypatch.setattr(triton_attention, "cut_shared", lambda *_: shared_cut)
    monkeypatch.setattr(triton_attention, "cut_decode", lambda *_: own_cut)
    length = num_blocks * BLOCK_SIZE
    contexts = [length + 2, length + 40, 23, length + 17, 2, length + 5, length + 9]
    paged = make_paged(contexts, 2, 16)
    shared = share(paged, num_blocks, [1, 0, 3, 5, 6])
    q = torch.randn(len(contexts), 2, 6, 16)
    paged.slot_ids[5] = -1
    paged.context_lens[6] = 0
    paged.keys[6], paged.values[6] = paged.keys[6][:0], paged.values[6][:0]
    q[5:] = float("nan")
    firsts = [context - 2 for context in contexts]
    check(triton_attention, device, paged, shared, q, firsts, 192)


@pytest.mark.parametrize("lines", [1, 4, 16])
@pytest.mark.parametrize("own_splits", [2, 5])
@pytest.mark.usefixtures("poison")
def test_a_join_of_several_lines_a_program(
    device: str, monkeypatch: pytest.MonkeyPatch, lines: int, own_splits: int
) -> None:
    """Their number is no multiple of what a program takes, nor the parts' a power of two."""
    monkeypatch.setattr(attention_parts, "cut_join", lambda *_: JoinCut(lines, 1))
    cut = DecodeCut(own_splits, 16, 4, 2)
    monkeypatch.setattr(triton_attention, "cut_decode", lambda *_: cut)
    paged = make_paged([70, 35, 64], 1, 16)
    shared = share(paged, 2, [0, 1])
    q = torch.randn(3, 1, 3, 16)
    check(triton_attention, device, paged, shared, q, [69, 34, 63], 96)

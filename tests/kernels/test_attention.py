"""Paged attention against dense attention in float64, for the Triton kernels and their twins."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch
from kernels.paged_rows import TOLERANCE, Paged, dense, make_paged

from specgen.kernels import attention as triton_attention
from specgen.kernels import prefill_attention as triton_prefill
from specgen.kernels.prefill_attention import PrefillCut
from specgen.kernels.reference import attention as reference_attention

MODULES = [
    pytest.param(reference_attention, id="reference"),
    pytest.param(triton_attention, id="triton"),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def check_decode(
    module: ModuleType,
    device: str,
    paged: Paged,
    q: torch.Tensor,
    first_positions: list[int],
    max_context_len: int,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    before = paged.k_cache.clone(), paged.v_cache.clone()
    out = module.decode_attention(
        q.to(device),
        paged.k_cache.to(device),
        paged.v_cache.to(device),
        paged.block_tables.to(device),
        paged.slot_ids.to(device),
        torch.tensor(first_positions, dtype=torch.int32, device=device),
        paged.context_lens.to(device),
        scale,
        max_context_len,
        window,
        softcap,
    ).cpu()
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    for row, first in enumerate(first_positions):
        for i in range(q.shape[1]):
            expected = dense(
                q[row, i],
                paged.keys[row],
                paged.values[row],
                first + i,
                scale,
                window,
                softcap,
            )
            if paged.slot_ids[row] < 0:
                expected = torch.zeros_like(expected)
            torch.testing.assert_close(
                out[row, i].double(), expected, rtol=0, atol=TOLERANCE[q.dtype]
            )
    torch.testing.assert_close(paged.k_cache, before[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(paged.v_cache, before[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "group", "num_queries", "dtype"),
    [
        (32, 2, 2, 4, torch.float32),
        (32, 5, 2, 4, torch.float32),
        (64, 1, 5, 3, torch.float32),
        (80, 2, 1, 1, torch.float32),
        (96, 1, 4, 2, torch.float32),
        (128, 1, 4, 5, torch.float32),
        (16, 1, 1, 1, torch.float32),
        (256, 1, 2, 2, torch.float32),
        (64, 2, 4, 4, torch.bfloat16),
        (80, 1, 5, 2, torch.bfloat16),
        (32, 1, 2, 3, torch.float16),
    ],
)
@pytest.mark.usefixtures("poison")
def test_decode_equals_dense_attention(
    module: ModuleType,
    device: str,
    head_dim: int,
    num_kv_heads: int,
    group: int,
    num_queries: int,
    dtype: torch.dtype,
) -> None:
    # On, before and behind the edges of blocks and of key tiles; a row that is all its own queries.
    contexts = [max(16, num_queries), 17, 70, num_queries]
    paged = make_paged(contexts, num_kv_heads, head_dim, dtype)
    q = torch.randn(len(contexts), num_queries, num_kv_heads * group, head_dim).to(dtype)
    firsts = [context - num_queries for context in contexts]
    check_decode(module, device, paged, q, firsts, max_context_len=128)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.usefixtures("poison")
def test_decode_with_inert_rows_empty_rows_and_fewer_drafts_than_queries(
    module: ModuleType, device: str
) -> None:
    contexts = [5, 0, 40, 33, 1]
    paged = make_paged(contexts, 2, 32, inert=(2,))
    q = torch.randn(len(contexts), 4, 4, 32)
    # Row 3 has one draft only: its queries 2 and 3 stand past its context and see all of it.
    # Row 4 begins before position 0: nothing to see for its first query.
    check_decode(module, device, paged, q, [2, 0, 36, 31, -1], max_context_len=48)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("bound", [300, 1024, 2048])
@pytest.mark.usefixtures("poison")
def test_decode_does_not_depend_on_the_split_of_the_context(
    module: ModuleType, device: str, bound: int
) -> None:
    """The bound sets the number of splits: 4, 16 and 32; short rows leave most of them empty."""
    contexts = [290, 3, 64, 65, 0]
    paged = make_paged(contexts, 1, 32)
    q = torch.randn(len(contexts), 2, 2, 32)
    firsts = [max(context - 2, 0) for context in contexts]
    check_decode(module, device, paged, q, firsts, max_context_len=bound)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.usefixtures("poison")
def test_decode_with_large_scores_stays_finite(module: ModuleType, device: str) -> None:
    paged = make_paged([40, 20], 1, 32)
    q = torch.randn(2, 2, 2, 32) * 300
    out = module.decode_attention(
        q.to(device),
        paged.k_cache.to(device),
        paged.v_cache.to(device),
        paged.block_tables.to(device),
        paged.slot_ids.to(device),
        torch.tensor([38, 18], dtype=torch.int32, device=device),
        paged.context_lens.to(device),
        1.0,
        512,
    )
    assert torch.isfinite(out).all()
    expected = dense(q[0, 1], paged.keys[0], paged.values[0], 39, 1.0)
    torch.testing.assert_close(out[0, 1].cpu().double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("bound", [64, 1024])
def test_a_broken_row_shows_and_stays_alone(module: ModuleType, device: str, bound: int) -> None:
    """NaN keys of one row must reach that row's output, so that it ends, and no other's."""
    paged = make_paged([40, 20], 1, 32)
    paged.k_cache[paged.block_tables[paged.slot_ids[0].long(), 1]] = float("nan")
    q = torch.randn(2, 2, 2, 32)
    out = module.decode_attention(
        q.to(device),
        paged.k_cache.to(device),
        paged.v_cache.to(device),
        paged.block_tables.to(device),
        paged.slot_ids.to(device),
        torch.tensor([38, 18], dtype=torch.int32, device=device),
        paged.context_lens.to(device),
        0.2,
        bound,
    ).cpu()
    assert not torch.isfinite(out[0]).any()
    assert torch.isfinite(out[1]).all()


def check_prefill(
    module: ModuleType,
    device: str,
    paged: Paged,
    query_lens: list[int],
    firsts: list[int],
    num_heads: int,
    padding: int = 0,
    bound: int | None = None,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    head_dim, dtype = paged.k_cache.shape[-1], paged.k_cache.dtype
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    q = torch.randn(starts[-1] + padding, num_heads, head_dim).to(dtype)
    scale = head_dim**-0.5 if scale is None else scale
    out = module.prefill_attention(
        q.to(device),
        paged.k_cache.to(device),
        paged.v_cache.to(device),
        paged.block_tables.to(device),
        paged.slot_ids.to(device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(firsts, dtype=torch.int32, device=device),
        paged.context_lens.to(device),
        scale,
        max(query_lens) if bound is None else bound,
        int(paged.context_lens.max()),
        window,
        softcap,
    ).cpu()
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    expected = torch.zeros(q.shape, dtype=torch.float64)
    for row, length in enumerate(query_lens):
        if paged.slot_ids[row] < 0:
            continue
        for i in range(length):
            token = starts[row] + i
            expected[token] = dense(
                q[token],
                paged.keys[row],
                paged.values[row],
                firsts[row] + i,
                scale,
                window,
                softcap,
            )
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "group", "dtype"),
    [
        (32, 2, 2, torch.float32),
        (64, 1, 5, torch.float32),
        (80, 1, 1, torch.float32),
        (96, 1, 2, torch.float32),
        (128, 1, 4, torch.float32),
        (256, 1, 1, torch.float32),
        (64, 1, 4, torch.bfloat16),
        (80, 2, 1, torch.bfloat16),
    ],
)
@pytest.mark.usefixtures("poison")
def test_prefill_equals_dense_attention(
    module: ModuleType,
    device: str,
    head_dim: int,
    num_kv_heads: int,
    group: int,
    dtype: torch.dtype,
) -> None:
    # Whole prompts, later chunks of prompts, and a single token at the end of a context.
    query_lens = [37, 16, 1, 5]
    firsts = [0, 30, 64, 0]
    contexts = [first + length for first, length in zip(firsts, query_lens, strict=True)]
    paged = make_paged(contexts, num_kv_heads, head_dim, dtype)
    check_prefill(module, device, paged, query_lens, firsts, num_kv_heads * group, padding=3)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.usefixtures("poison")
def test_prefill_with_empty_and_inert_rows_and_much_padding(
    module: ModuleType, device: str
) -> None:
    query_lens = [0, 6, 0, 9, 4, 0]
    firsts = [0, 0, 3, 2, 0, 0]
    paged = make_paged([0, 6, 3, 11, 4, 0], 1, 32, inert=(4,))
    # More padding tokens than one row may have queries.
    check_prefill(module, device, paged, query_lens, firsts, 2, padding=75, bound=9)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.usefixtures("poison")
def test_prefill_context_may_end_before_the_queries(module: ModuleType, device: str) -> None:
    paged = make_paged([7, 0], 1, 32)
    check_prefill(module, device, paged, [10, 5], [0, 0], 2)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.usefixtures("poison")
def test_prefill_longer_than_every_tile(module: ModuleType, device: str) -> None:
    paged = make_paged([300, 140], 1, 16)
    check_prefill(module, device, paged, [290, 139], [10, 1], 1)


@pytest.mark.parametrize("cut", [PrefillCut(16, 16, 4, 1), PrefillCut(32, 64, 4, 1)])
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.usefixtures("poison")
def test_prefill_tiles_that_end_anywhere(
    monkeypatch: pytest.MonkeyPatch, device: str, group: int, cut: PrefillCut
) -> None:
    """Short chunks behind long prefixes: keys that all see, then some that only a few do."""
    monkeypatch.setattr(triton_prefill, "cut_prefill", lambda *_: cut)
    query_lens = [5, 1, 33, 16, 2, 7]
    firsts = [128, 127, 63, 64, 65, 0]
    contexts = [first + length for first, length in zip(firsts, query_lens, strict=True)]
    contexts[3] -= 4  # ends before its queries
    paged = make_paged(contexts, 2, 16)
    check_prefill(triton_attention, device, paged, query_lens, firsts, 2 * group, padding=37)


# Windows below, on and above the sizes of blocks and key tiles, and one that reaches over all.
WINDOWS = [1, 5, 16, 64, 100, 1000]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("bound", [300, 2048])
@pytest.mark.usefixtures("poison")
def test_decode_with_a_window(module: ModuleType, device: str, window: int, bound: int) -> None:
    # The last row's queries 1 and 2 stand past its context: a short window shows them nothing.
    contexts = [290, 3, 64, 129, 0, 40]
    paged = make_paged(contexts, 1, 16)
    q = torch.randn(len(contexts), 3, 2, 16)
    firsts = [max(context - 3, 0) for context in contexts[:-1]] + [39]
    check_decode(module, device, paged, q, firsts, max_context_len=bound, window=window)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.usefixtures("poison")
def test_prefill_with_a_window(module: ModuleType, device: str, window: int) -> None:
    query_lens, firsts = [150, 20, 1, 10], [0, 130, 64, 0]
    paged = make_paged([150, 150, 65, 7], 1, 16)
    check_prefill(module, device, paged, query_lens, firsts, 2, padding=2, window=window)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.usefixtures("poison")
def test_capped_scores(module: ModuleType, device: str, window: int) -> None:
    """Scores far past the cap, where its two ends matter, beside rows with nothing to see."""
    paged = make_paged([40, 20, 0], 1, 32)
    q = torch.randn(3, 2, 2, 32)
    options = {"scale": 2.0, "window": window, "softcap": 3.0}
    check_decode(module, device, paged, q, [38, 18, 0], max_context_len=512, **options)
    paged = make_paged([40, 20, 0], 1, 32)
    check_prefill(module, device, paged, [33, 20, 1], [7, 0, 0], 2, padding=1, **options)


@pytest.mark.parametrize("module", MODULES)
def test_prefill_of_one_step_equals_decode(module: ModuleType, device: str) -> None:
    paged = make_paged([20, 33], 2, 32)
    q = torch.randn(2, 3, 4, 32, device=device)
    caches = paged.k_cache.to(device), paged.v_cache.to(device)
    tables, slots = paged.block_tables.to(device), paged.slot_ids.to(device)
    firsts = torch.tensor([17, 30], dtype=torch.int32, device=device)
    lens = paged.context_lens.to(device)
    starts = torch.tensor([0, 3, 6], dtype=torch.int32, device=device)
    decode = module.decode_attention(q, *caches, tables, slots, firsts, lens, 0.2, 64)
    prefill = module.prefill_attention(
        q.view(6, 4, 32), *caches, tables, slots, starts, firsts, lens, 0.2, 3, 64
    )
    torch.testing.assert_close(decode.view(6, 4, 32), prefill, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["decode_attention", "prefill_attention"])
def test_signatures_match(name: str) -> None:
    assert inspect.signature(getattr(triton_attention, name)) == inspect.signature(
        getattr(reference_attention, name)
    )

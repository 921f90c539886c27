"""Products of few rows, kernels that overlap and shared blocks, at working sizes on a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import pytest
import torch

from specgen.kernels import (
    KERNEL_MODULES,
    Kernels,
    attention_parts,
    row_attention,
    select_kernels,
)
from specgen.kernels.batch_types import SharedPrefix
from specgen.kernels.linear import choose_plan

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BLOCK_SIZE = 16
HIDDEN, INNER = 4096, 14336
# Of a row of results relative to its length: one rounding to eight bits, or three where gated.
LARGEST_ERROR = 1e-2


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return select_kernels(DEVICE, "triton")


@pytest.fixture(scope="module")
def twins() -> Kernels:
    return select_kernels(DEVICE, "reference")


def bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) * scale


@pytest.mark.parametrize("num_rows", [1, 2, 8, 16, 17, 32, 33, 64, 65, 128, 129, 225, 256, 257])
@pytest.mark.parametrize(
    ("width", "inner"),
    [(6144, HIDDEN), (HIDDEN, INNER), (2 * INNER, HIDDEN), (32000, HIDDEN), (20008, 4104)],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_equal_float32(
    kernels: Kernels, twins: Kernels, num_rows: int, width: int, inner: int, with_bias: bool
) -> None:
    x, weight = bf16(num_rows, inner), bf16(width, inner, scale=inner**-0.5)
    bias = bf16(width) if with_bias else None
    wide = [None if t is None else t.float() for t in (x, weight, bias)]
    for name in ("linear", "linear_parts", "linear_silu_mul"):
        out = getattr(kernels.linear, name)(x, weight, bias)
        again = getattr(kernels.linear, name)(x, weight, bias)
        assert torch.equal(out, again)
        out = out.sum(0) if out.ndim == 3 else out.float()
        expected = getattr(twins.linear, name)(*wide)
        error = (out - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max().item() < LARGEST_ERROR, name


def test_float32_and_many_rows_are_left_to_the_library() -> None:
    weight = torch.randn(HIDDEN, HIDDEN, device=DEVICE)
    assert choose_plan(weight[:8], weight, gated=False) is None
    weight = weight.bfloat16()
    assert choose_plan(weight[:65], weight, gated=False) is None
    is_measured = torch.cuda.get_device_capability() == (9, 0)
    assert (choose_plan(weight[:8], weight, gated=False) is not None) == is_measured


def layers(kernels: Kernels, x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """A feed-forward stack: every kernel reads what the one before has just written."""
    gate_up, down, norm = weights
    stream, out = x, torch.zeros_like(x)
    for _ in range(24):
        normed, stream = kernels.norm.rms_norm_residual(out, stream, norm, 1e-5)
        out = kernels.linear.linear_parts(kernels.linear.linear_silu_mul(normed, gate_up), down)
    return kernels.norm.rms_norm_residual(out, stream, norm, 1e-5)[1]


def check_overlap(
    run: Callable[[], torch.Tensor], monkeypatch: pytest.MonkeyPatch, others: Sequence[ModuleType]
) -> None:
    """Bit for bit what kernels compute one after the other, eagerly and in a graph, many times."""
    names = [importlib.import_module(f"specgen.kernels.{name}") for name in KERNEL_MODULES]
    with monkeypatch.context() as patch:
        for module in [*names, *others]:
            if hasattr(module, "overlap_options"):
                patch.setattr(module, "overlap_options", lambda _: {"OVERLAP": False})
        expected = run()
    assert torch.isfinite(expected).all()
    graph = torch.cuda.CUDAGraph()
    assert torch.equal(run(), expected)
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(20):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, expected)
        assert torch.equal(run(), expected)


@pytest.mark.parametrize("num_rows", [1, 8, 64, 192, 256])
def test_kernels_that_overlap_read_nothing_too_early(
    kernels: Kernels, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = bf16(num_rows, HIDDEN)
    weights = [
        bf16(2 * INNER, HIDDEN, scale=HIDDEN**-0.5),
        bf16(HIDDEN, INNER, scale=INNER**-0.5),
        bf16(HIDDEN),
    ]
    check_overlap(lambda: layers(kernels, x, weights), monkeypatch, ())


@pytest.mark.parametrize(
    ("num_rows", "num_queries", "context"),
    # Contexts of which every key is fetched ahead, contexts that are split, and long ones.
    [(1, 1, 20), (1, 4, 700), (8, 4, 40), (64, 1, 90), (64, 4, 300), (256, 1, 50)],
)
def test_keys_fetched_ahead_are_those_just_written(
    kernels: Kernels,
    num_rows: int,
    num_queries: int,
    context: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One place in the cache for all layers: what a layer fetches was another's a moment before."""
    heads, kv_heads, head_dim = 32, 8, 128
    columns = -(-context // BLOCK_SIZE)
    tables = torch.randperm(num_rows * columns, device=DEVICE).int().view(num_rows, columns)
    shape = (num_rows * columns, BLOCK_SIZE, kv_heads, head_dim)
    start = [bf16(*shape), bf16(*shape)]
    slots = torch.arange(num_rows, device=DEVICE).int()
    context_lens = torch.randint(num_queries, context + 1, (num_rows,), device=DEVICE).int()
    first = context_lens - num_queries
    positions = (first[:, None] + torch.arange(num_queries, device=DEVICE)).int()
    blocks = tables.gather(1, positions.long() // BLOCK_SIZE).long()
    places = (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).flatten()
    cos_sin = torch.randn(context, head_dim, device=DEVICE)
    qkv, weight = bf16(num_rows * num_queries, 6144), bf16(6144, HIDDEN, scale=HIDDEN**-0.5)
    norm = torch.ones(HIDDEN, device=DEVICE, dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        caches, x = [cache.clone() for cache in start], qkv
        for _ in range(24):
            q = kernels.rotary.rotary_write_cache(
                x, positions.flatten(), cos_sin, places, *caches, heads, kv_heads
            )
            out = kernels.attention.decode_attention(
                q.view(num_rows, num_queries, heads, head_dim),
                *caches,
                tables,
                slots,
                first,
                context_lens,
                head_dim**-0.5,
                context,
            )
            x = kernels.linear.linear(
                kernels.norm.rms_norm(out.view(-1, HIDDEN), norm, 1e-5), weight
            )
        return x

    check_overlap(run, monkeypatch, (attention_parts, row_attention))


@pytest.mark.parametrize(("num_rows", "num_queries"), [(256, 1), (256, 4), (40, 4), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shared_blocks_in_a_graph_that_follows_their_changes(
    kernels: Kernels, twins: Kernels, num_rows: int, num_queries: int, dtype: torch.dtype
) -> None:
    columns, shared_columns, heads, kv_heads, head_dim = 40, 32, 32, 8, 128
    order = torch.randperm(num_rows * columns + 1, device=DEVICE).int()
    tables = order[: num_rows * columns].view(num_rows, columns)
    tables[:, :shared_columns] = tables[0, :shared_columns].clone()
    shape = (order.numel(), BLOCK_SIZE, kv_heads, head_dim)
    k_cache, v_cache = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    contexts = torch.randint(
        shared_columns * BLOCK_SIZE + num_queries, columns * BLOCK_SIZE, (num_rows,), device=DEVICE
    ).int()
    arguments = (
        torch.randn(num_rows, num_queries, heads, head_dim, device=DEVICE).to(dtype),
        k_cache,
        v_cache,
        tables,
        torch.arange(num_rows, device=DEVICE).int(),
        contexts - num_queries,
        contexts,
        head_dim**-0.5,
        columns * BLOCK_SIZE,
    )
    shared = SharedPrefix(
        tables[0].clone(),
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
        torch.zeros(num_rows, dtype=torch.bool, device=DEVICE),
    )
    expected = twins.attention.decode_attention(*arguments).float()
    kernels.attention.decode_attention(*arguments, shared=shared)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.attention.decode_attention(*arguments, shared=shared)
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for blocks, every in ((0, 1), (shared_columns, 1), (7, 1), (shared_columns, 3), (1, 2)):
        shared.length.fill_(blocks * BLOCK_SIZE)
        shared.members.zero_()
        shared.members[::every] = True
        out.fill_(float("nan"))
        graph.replay()
        error = (out.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max().item() < limit, (blocks, every)

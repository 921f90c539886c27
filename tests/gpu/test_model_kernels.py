"""The model and batch kernels at working sizes on a GPU: against twins, and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from specgen.kernels import Kernels, select_kernels
from specgen.models.config import ExpertsConfig
from specgen.models.experts import RoutedMLP
from specgen.models.qwen3_moe import QWEN3_MOE

pytestmark = pytest.mark.gpu

assert QWEN3_MOE.experts is not None
RULES = QWEN3_MOE.experts
BLOCK_SIZE = 16
DEVICE = "cuda"
# Error of a head's output vector relative to its length, against float32 on the same rounded
# inputs. In bfloat16 the weights and the output are rounded to eight bits; one key too many or too
# few among 4096 moves the output by more than this.
RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def triton_set() -> Kernels:
    return select_kernels(DEVICE, "triton")


@pytest.fixture(scope="module")
def reference_set() -> Kernels:
    return select_kernels(DEVICE, "reference")


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


def i32(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


def make_cache(
    rows: int, max_context: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Caches, shuffled tables with spare slots, and shuffled slot ids."""
    columns = -(-max_context // BLOCK_SIZE) + 1
    num_blocks = (rows + 2) * columns + 1
    shape = (num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
    order = torch.randperm(num_blocks - 1, device=DEVICE)
    return {
        "k_cache": torch.randn(shape, device=DEVICE).to(dtype),
        "v_cache": torch.randn(shape, device=DEVICE).to(dtype),
        "block_tables": order.view(rows + 2, columns).int(),
        "slot_ids": torch.randperm(rows + 2, device=DEVICE)[:rows].int(),
    }


def check_vectors(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare `[..., D]` vector by vector: their sizes differ with the context."""
    error = (out.float() - expected).norm(dim=-1)
    relative = error / expected.norm(dim=-1).clamp(min=1e-3)
    assert torch.isfinite(out).all()
    assert relative.max().item() < RELATIVE_ERROR[out.dtype]


def widened(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.float()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in arguments.items()
    }


def check_capture(call: Callable[[], Any], change: Callable[[], None]) -> None:
    """Replay on changed inputs must equal an eager call on them: nothing was frozen on the host."""

    def tensors(result: Any) -> list[torch.Tensor]:
        return [result] if isinstance(result, torch.Tensor) else list(result)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    change()
    graph.replay()
    torch.cuda.synchronize()
    replayed = [tensor.clone() for tensor in tensors(captured)]
    for got, expected in zip(replayed, tensors(call()), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_queries", [1, 4, 8])
@pytest.mark.parametrize(
    ("batch", "num_heads", "num_kv_heads", "head_dim", "max_context"),
    [(64, 32, 8, 128, 4096), (2, 32, 8, 128, 4096), (7, 40, 8, 80, 700), (5, 10, 5, 32, 512)],
)
def test_decode_attention(
    triton_set: Kernels,
    reference_set: Kernels,
    batch: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_context: int,
    num_queries: int,
    dtype: torch.dtype,
) -> None:
    cache = make_cache(batch, max_context, num_kv_heads, head_dim, dtype)
    contexts = torch.randint(num_queries, max_context + 1, (batch,), device=DEVICE).int()
    contexts[0] = max_context
    first_positions = contexts - num_queries
    cache["slot_ids"][1] = -1
    q = torch.randn(batch, num_queries, num_heads, head_dim, device=DEVICE).to(dtype)
    arguments = {
        "q": q,
        **cache,
        "first_positions": first_positions,
        "context_lens": contexts,
        "scale": head_dim**-0.5,
        "max_context_len": max_context,
    }
    out = triton_set.attention.decode_attention(**arguments)
    expected = reference_set.attention.decode_attention(**widened(arguments))
    check_vectors(out, expected)
    assert not out[1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (8, 8, 96), (4, 1, 256), (10, 5, 32)]
)
def test_prefill_attention(
    triton_set: Kernels,
    reference_set: Kernels,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    query_lens = torch.tensor([1000, 1, 129, 0, 640, 77])
    firsts = torch.tensor([0, 800, 257, 12, 15, 0])
    starts = torch.cat((torch.zeros(1, dtype=torch.long), query_lens.cumsum(0)))
    cache = make_cache(6, 1024, num_kv_heads, head_dim, dtype)
    arguments = {
        "q": torch.randn(int(starts[-1]) + 50, num_heads, head_dim, device=DEVICE).to(dtype),
        **cache,
        "query_start_loc": i32(starts),
        "first_positions": i32(firsts),
        "context_lens": i32(firsts + query_lens),
        "scale": head_dim**-0.5,
        "max_query_len": 1000,
        "max_context_len": 1000,
    }
    out = triton_set.attention.prefill_attention(**arguments)
    expected = reference_set.attention.prefill_attention(**widened(arguments))
    check_vectors(out, expected)
    assert not out[int(starts[-1]) :].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("window", "softcap", "scale"), [(1000, 0.0, 0.09), (0, 2.0, 1.0), (300, 2.0, 1.0)]
)
@pytest.mark.parametrize(("batch", "head_dim"), [(2, 128), (64, 64)])
def test_attention_with_a_window_and_capped_scores(
    triton_set: Kernels,
    reference_set: Kernels,
    batch: int,
    head_dim: int,
    window: int,
    softcap: float,
    scale: float,
    dtype: torch.dtype,
) -> None:
    """Windows that leave most of a long context unread, in one split and in many."""
    cache = make_cache(batch, 4096, 2, head_dim, dtype)
    contexts = torch.randint(4, 4097, (batch,), device=DEVICE).int()
    contexts[0] = 4096
    options = {"scale": scale, "window": window, "softcap": softcap}
    decode = {
        "q": torch.randn(batch, 4, 8, head_dim, device=DEVICE).to(dtype),
        **cache,
        "first_positions": contexts - 4,
        "context_lens": contexts,
        "max_context_len": 4096,
        **options,
    }
    out = triton_set.attention.decode_attention(**decode)
    check_vectors(out, reference_set.attention.decode_attention(**widened(decode)))
    query_lens = torch.tensor([700, 1])
    firsts = torch.tensor([1500, 2000])
    prefill = {
        "q": torch.randn(701, 8, head_dim, device=DEVICE).to(dtype),
        **{name: value[:2] if name == "slot_ids" else value for name, value in cache.items()},
        "query_start_loc": i32([0, 700, 701]),
        "first_positions": i32(firsts),
        "context_lens": i32(firsts + query_lens),
        "max_query_len": 700,
        "max_context_len": 2200,
        **options,
    }
    out = triton_set.attention.prefill_attention(**prefill)
    check_vectors(out, reference_set.attention.prefill_attention(**widened(prefill)))


def make_routed(
    kernels: Kernels, dtype: torch.dtype, num_experts: int = 128, chosen: int = 8
) -> RoutedMLP:
    """The routed MLP of Qwen3-30B-A3B, or a part of it, with random weights."""
    config = ExpertsConfig(
        num_experts=num_experts,
        num_chosen=chosen,
        intermediate_size=768,
        normed=True,
        layers=frozenset(),
        rules=RULES,
    )
    mlp = RoutedMLP(2048, config, kernels, device=DEVICE, dtype=dtype)
    for weight in mlp.parameters():
        weight.normal_(0.0, weight.shape[-1] ** -0.5)
    return mlp


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 40, 1500])
def test_routed_mlp(
    triton_set: Kernels, reference_set: Kernels, num_tokens: int, dtype: torch.dtype
) -> None:
    mlp = make_routed(triton_set, dtype, num_experts=32, chosen=4)
    twin = make_routed(reference_set, torch.float32, num_experts=32, chosen=4)
    for ours, theirs in zip(mlp.parameters(), twin.parameters(), strict=True):
        theirs.copy_(ours)
    x = torch.randn(num_tokens, 2048, device=DEVICE).to(dtype)
    # The same choice of experts: in bfloat16 a near tie may fall otherwise.
    logits = torch.nn.functional.linear(x, mlp.router_weight)
    top = logits.float().sort(dim=-1, descending=True).values
    clear = top[:, 3] - top[:, 4] > 0.05
    error = (mlp(x).float() - twin(x.float())).norm(dim=-1) / twin(x.float()).norm(dim=-1)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    assert (error[clear] < limit).all()
    assert clear.float().mean() > 0.5 or num_tokens == 1


def test_routed_mlp_in_a_graph(triton_set: Kernels) -> None:
    mlp = make_routed(triton_set, torch.bfloat16)
    x = torch.randn(64, 2048, device=DEVICE, dtype=torch.bfloat16)
    check_capture(lambda: mlp(x), lambda: x.normal_())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [320, 4096, 5120, 8192])
def test_rms_norm(
    triton_set: Kernels, reference_set: Kernels, hidden: int, dtype: torch.dtype
) -> None:
    x, residual = torch.randn(2, 1000, hidden, device=DEVICE).to(dtype)
    weight = torch.rand(hidden, device=DEVICE).to(dtype)
    out, total = triton_set.norm.rms_norm_residual(x, residual, weight, 1e-5)
    expected, expected_total = reference_set.norm.rms_norm_residual(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (1.6e-2, 1e-3)
    torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)
    alone = triton_set.norm.rms_norm(total, weight, 1e-5)
    assert torch.equal(alone, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [864, 14336])
def test_silu_mul(
    triton_set: Kernels, reference_set: Kernels, width: int, dtype: torch.dtype
) -> None:
    gate_up = (torch.randn(1000, 2 * width, device=DEVICE) * 3).to(dtype)
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (1.6e-2, 1e-3)
    torch.testing.assert_close(
        triton_set.activation.silu_mul(gate_up),
        reference_set.activation.silu_mul(gate_up),
        rtol=rtol,
        atol=atol,
    )


def make_rotary(
    tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> dict[str, Any]:
    num_blocks = tokens // BLOCK_SIZE + 3
    width = (num_heads + 2 * num_kv_heads) * head_dim
    slots = torch.randperm((num_blocks - 1) * BLOCK_SIZE, device=DEVICE)[:tokens]
    slots[::7] = -1
    angles = torch.rand(5000, head_dim // 2, device=DEVICE) * 6.28
    shape = (num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
    return {
        "qkv": torch.randn(tokens, width, device=DEVICE).to(dtype),
        "positions": torch.randint(0, 5000, (tokens,), device=DEVICE).int(),
        "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=-1),
        "slot_mapping": slots,
        "k_cache": torch.zeros(shape, device=DEVICE, dtype=dtype),
        "v_cache": torch.zeros(shape, device=DEVICE, dtype=dtype),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (64, 8, 80), (10, 5, 32)]
)
def test_rotary_write_cache(
    triton_set: Kernels,
    reference_set: Kernels,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    arguments = make_rotary(777, num_heads, num_kv_heads, head_dim, dtype)
    other = {**arguments, "k_cache": arguments["k_cache"].clone()}
    other["v_cache"] = arguments["v_cache"].clone()
    q = triton_set.rotary.rotary_write_cache(**arguments)
    expected = reference_set.rotary.rotary_write_cache(**other)
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (1.6e-2, 1e-2)
    torch.testing.assert_close(q, expected, rtol=rtol, atol=atol)
    last = -1  # the twin's spare slot
    for name in ("k_cache", "v_cache"):
        got, want = arguments[name].flatten(0, 1)[:last], other[name].flatten(0, 1)[:last]
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


def make_state(num_slots: int, batch: int, k: int) -> dict[str, torch.Tensor]:
    columns = 300
    slot_ids = torch.randperm(num_slots, device=DEVICE)[:batch].int()
    slot_ids[::5] = -1
    return {
        "slot_ids": slot_ids,
        "last_tokens": torch.randint(0, 1000, (num_slots,), device=DEVICE).int(),
        "draft_tokens": torch.randint(0, 1000, (num_slots, k), device=DEVICE).int(),
        "num_draft_tokens": torch.randint(0, k + 1, (num_slots,), device=DEVICE).int(),
        "seq_lens": torch.randint(1, columns * BLOCK_SIZE + 1, (num_slots,), device=DEVICE).int(),
        "active": torch.rand(num_slots, device=DEVICE) < 0.8,
        "block_tables": torch.randint(0, 2**27, (num_slots, columns), device=DEVICE).int(),
    }


def make_commit(num_slots: int, batch: int, k: int) -> dict[str, torch.Tensor]:
    state = make_state(num_slots, batch, k)
    return {
        "slot_ids": state["slot_ids"],
        "tokens": torch.randint(0, 20, (batch, k + 1), device=DEVICE).int(),
        "num_sampled": torch.randint(0, k + 2, (batch,), device=DEVICE).int(),
        "ok": torch.rand(batch, device=DEVICE) < 0.9,
        "num_draft_tokens": torch.randint(-1, k + 1, (batch,), device=DEVICE).int(),
        "stop_ids": torch.randint(-1, 20, (num_slots, 3), device=DEVICE).int(),
        "max_lens": state["seq_lens"] + torch.randint(0, 6, (num_slots,), device=DEVICE).int(),
        "seq_lens": state["seq_lens"],
        "last_tokens": state["last_tokens"],
        "active": state["active"],
    }


@pytest.mark.parametrize(("num_slots", "batch", "k"), [(256, 256, 3), (512, 100, 7), (8, 1, 1)])
def test_batch_kernels(
    triton_set: Kernels, reference_set: Kernels, num_slots: int, batch: int, k: int
) -> None:
    state = make_state(num_slots, batch, k)
    decode = [
        kernels.batch_inputs.decode_inputs(**state, k=k, block_size=BLOCK_SIZE)
        for kernels in (triton_set, reference_set)
    ]
    for got, want in zip(*decode, strict=True):
        assert torch.equal(got, want)
    tokens = torch.randint(0, 1000, (batch, k + 1), device=DEVICE).int()
    committed = torch.randint(0, k + 2, (batch,), device=DEVICE).int()
    extend = [
        kernels.batch_inputs.extend_inputs(
            state["slot_ids"],
            tokens,
            committed,
            decode[0].first_positions,
            state["active"],
            state["block_tables"],
            BLOCK_SIZE,
        )
        for kernels in (triton_set, reference_set)
    ]
    for got, want in zip(*extend, strict=True):
        assert torch.equal(got, want)
    names = ("slot_ids", "seq_lens", "active", "block_tables")
    draft = [
        kernels.batch_inputs.draft_inputs(*(state[n] for n in names), 2, BLOCK_SIZE)
        for kernels in (triton_set, reference_set)
    ]
    for got, want in zip(*draft, strict=True):
        assert torch.equal(got, want)
    rows = (
        torch.rand(num_slots, device=DEVICE),
        torch.randint(-(1 << 62), 1 << 62, (num_slots,), device=DEVICE),
        torch.randint(0, 9, (num_slots,), device=DEVICE).int(),
        state["seq_lens"],
    )
    gathered = [
        kernels.batch_inputs.sampling_rows(state["slot_ids"], *rows)
        for kernels in (triton_set, reference_set)
    ]
    for got, want in zip(*gathered, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("num_slots", "batch", "k"), [(256, 256, 3), (512, 100, 7), (8, 1, 1)])
@pytest.mark.parametrize("position_limit", [None, 100])
def test_commit_drafts(
    triton_set: Kernels,
    reference_set: Kernels,
    num_slots: int,
    batch: int,
    k: int,
    position_limit: int | None,
) -> None:
    state = make_state(num_slots, batch, k)
    tokens = torch.randint(0, 1000, (k, batch), device=DEVICE).int()
    ok = torch.rand(k, batch, device=DEVICE) < 0.9
    limits = torch.randint(0, k + 1, (num_slots,), device=DEVICE).int()
    left = []
    for kernels in (triton_set, reference_set):
        drafts, counts = state["draft_tokens"].clone(), state["num_draft_tokens"].clone()
        kernels.commit.commit_drafts(
            state["slot_ids"],
            tokens,
            ok,
            state["seq_lens"],
            state["active"],
            limits,
            position_limit,
            drafts,
            counts,
        )
        left.append((drafts, counts))
    for got, want in zip(*left, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_pairs(triton_set: Kernels, reference_set: Kernels, dtype: torch.dtype) -> None:
    ids = torch.randint(-1, 1000, (37,), device=DEVICE).int()
    table, hidden = (torch.randn(n, 4096, device=DEVICE, dtype=dtype) for n in (1000, 37))
    norms = torch.randn(2, 4096, device=DEVICE, dtype=dtype)
    got, want = (
        kernels.pairs.norm_pairs(ids, table, norms[0], hidden, norms[1], 1e-5)
        for kernels in (triton_set, reference_set)
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("num_slots", "batch", "k"), [(256, 256, 3), (512, 100, 7), (8, 1, 1)])
def test_commit_tokens(
    triton_set: Kernels, reference_set: Kernels, num_slots: int, batch: int, k: int
) -> None:
    one = make_commit(num_slots, batch, k)
    two = {name: tensor.clone() for name, tensor in one.items()}
    got = triton_set.commit.commit_tokens(**one)
    want = reference_set.commit.commit_tokens(**two)
    for left, right in zip((*got, *one.values()), (*want, *two.values()), strict=True):
        assert torch.equal(left, right)


def test_decode_attention_in_a_graph(triton_set: Kernels) -> None:
    cache = make_cache(8, 2048, 8, 128, torch.bfloat16)
    q = torch.randn(8, 4, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    contexts = i32([100] * 8)
    firsts = contexts - 4

    def change() -> None:
        contexts.copy_(i32([2048, 5, 777, 0, 16, 17, 1024, 300]))
        firsts.copy_((contexts - 4).clamp(min=0))
        cache["slot_ids"][2] = -1
        cache["block_tables"].copy_(cache["block_tables"].flip(0))
        q.normal_()

    check_capture(
        lambda: triton_set.attention.decode_attention(
            q,
            **cache,
            first_positions=firsts,
            context_lens=contexts,
            scale=0.1,
            max_context_len=2048,
        ),
        change,
    )


def test_prefill_attention_in_a_graph(triton_set: Kernels) -> None:
    cache = make_cache(3, 512, 8, 128, torch.bfloat16)
    q = torch.randn(512, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    starts, firsts, contexts = i32([0, 100, 200, 300]), i32([0, 0, 0]), i32([100] * 3)

    def change() -> None:
        starts.copy_(i32([0, 256, 256, 300]))
        firsts.copy_(i32([256, 5, 0]))
        contexts.copy_(i32([512, 5, 44]))

    check_capture(
        lambda: triton_set.attention.prefill_attention(
            q,
            **cache,
            query_start_loc=starts,
            first_positions=firsts,
            context_lens=contexts,
            scale=0.1,
            max_query_len=256,
            max_context_len=512,
        ),
        change,
    )


def test_norm_and_activation_in_a_graph(triton_set: Kernels) -> None:
    x, residual = torch.randn(2, 64, 4096, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.rand(4096, device=DEVICE, dtype=torch.bfloat16)

    def call() -> tuple[torch.Tensor, ...]:
        normed, total = triton_set.norm.rms_norm_residual(x, residual, weight, 1e-5)
        again = triton_set.norm.rms_norm(total, weight, 1e-5)
        return normed, total, again, triton_set.activation.silu_mul(normed)

    check_capture(call, lambda: x.normal_())


def test_rotary_in_a_graph(triton_set: Kernels) -> None:
    arguments = make_rotary(64, 32, 8, 128, torch.bfloat16)

    def call() -> tuple[torch.Tensor, ...]:
        arguments["k_cache"].zero_()
        arguments["v_cache"].zero_()
        q = triton_set.rotary.rotary_write_cache(**arguments)
        return q, arguments["k_cache"].clone(), arguments["v_cache"].clone()

    def change() -> None:
        arguments["qkv"].normal_()
        arguments["slot_mapping"].copy_(arguments["slot_mapping"].flip(0))
        arguments["positions"].add_(1)

    check_capture(call, change)


def test_batch_kernels_and_commit_in_a_graph(triton_set: Kernels) -> None:
    """The row-keeping of one whole step, from the inputs of the target to those of the draft."""
    k = 3
    state = make_state(64, 32, k)
    ends = make_commit(64, 32, k)
    start = {name: state[name].clone() for name in ("seq_lens", "last_tokens", "active")}

    def call() -> list[torch.Tensor]:
        for name, tensor in start.items():
            state[name].copy_(tensor)
        inputs = triton_set.batch_inputs.decode_inputs(**state, k=k, block_size=BLOCK_SIZE)
        result = triton_set.commit.commit_tokens(
            state["slot_ids"],
            ends["tokens"],
            ends["num_sampled"],
            ends["ok"],
            inputs.num_draft_tokens,
            ends["stop_ids"],
            ends["max_lens"],
            state["seq_lens"],
            state["last_tokens"],
            state["active"],
        )
        tables = state["block_tables"]
        extend = triton_set.batch_inputs.extend_inputs(
            state["slot_ids"],
            ends["tokens"],
            result.num_committed,
            inputs.first_positions,
            state["active"],
            tables,
            BLOCK_SIZE,
        )
        draft = triton_set.batch_inputs.draft_inputs(
            state["slot_ids"], state["seq_lens"], state["active"], tables, 1, BLOCK_SIZE
        )
        rows = [state[name].clone() for name in start]
        return [*inputs, *result, *extend, *draft, *rows]

    def change() -> None:
        for name, tensor in make_commit(64, 32, k).items():
            if name in ("tokens", "num_sampled", "ok"):
                ends[name].copy_(tensor)
        start["seq_lens"].sub_(1).clamp_(min=1)
        state["slot_ids"].copy_(state["slot_ids"].flip(0))

    check_capture(call, change)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_nothing_waits_for_the_host(backend: str) -> None:
    kernels = select_kernels(DEVICE, backend)
    cache = make_cache(4, 64, 2, 32, torch.float32)
    q = torch.randn(4, 4, 4, 32, device=DEVICE)
    firsts, contexts, starts = i32([10, 0, 20, 3]), i32([14, 0, 24, 5]), i32([0, 4, 4, 8, 12])
    rotary = make_rotary(20, 4, 2, 32, torch.float32)
    state, ends = make_state(16, 8, 3), make_commit(16, 8, 3)
    x, weight = torch.randn(4, 64, device=DEVICE), torch.rand(64, device=DEVICE)

    def run_all() -> None:
        attention, batch = kernels.attention, kernels.batch_inputs
        attention.decode_attention(
            q, **cache, first_positions=firsts, context_lens=contexts, scale=0.1, max_context_len=64
        )
        attention.prefill_attention(
            q.view(16, 4, 32),
            **cache,
            query_start_loc=starts,
            first_positions=firsts,
            context_lens=contexts,
            scale=0.1,
            max_query_len=4,
            max_context_len=64,
        )
        kernels.norm.rms_norm_residual(x, x, weight, 1e-5)
        kernels.activation.silu_mul(x)
        kernels.rotary.rotary_write_cache(**rotary)
        inputs = batch.decode_inputs(**state, k=3, block_size=BLOCK_SIZE)
        result = kernels.commit.commit_tokens(**ends)
        slots, active, tables = state["slot_ids"], state["active"], state["block_tables"]
        batch.extend_inputs(
            slots,
            ends["tokens"],
            result.num_committed,
            inputs.first_positions,
            active,
            tables,
            BLOCK_SIZE,
        )
        batch.draft_inputs(slots, state["seq_lens"], active, tables, 1, BLOCK_SIZE)

    run_all()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_all()
    finally:
        torch.cuda.set_sync_debug_mode("default")

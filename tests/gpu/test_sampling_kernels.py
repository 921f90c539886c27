"""The compiled sampling kernels: the law of what they emit, and equality with the torch twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from sampling_law import (
    ACCEPTED,
    BONUS,
    FIRST,
    KIND_NAMES,
    RECOVERED,
    decode,
    joint_p_value,
    kind_p_value,
    lengths_from_discarded_drafts,
    make_toy,
)
from torch import Tensor

from specgen.kernels import gumbel, logits, rejection, rng
from specgen.kernels.reference import gumbel as twin_gumbel
from specgen.kernels.reference import logits as twin_logits
from specgen.kernels.reference import rejection as twin_rejection
from specgen.kernels.reference import rng as twin_rng
from specgen.kernels.streams import ACCEPT, DRAFT, TARGET

pytestmark = pytest.mark.gpu

NUM_ROWS = 1_000_000
SMALLEST_P = 1e-4


@dataclass(frozen=True)
class Triton:
    gumbel: ModuleType = gumbel
    logits: ModuleType = logits
    rejection: ModuleType = rejection


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, device="cuda")


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("draft_sample", ["greedy", "gumbel"])
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({}, id="plain"),
        pytest.param({"temperature": 0.6}, id="cold"),
        pytest.param({"temperature": 1.4, "top_k": 3}, id="top-k"),
        pytest.param({"top_p": 0.8}, id="top-p"),
        pytest.param({"temperature": 0.8, "top_k": 4, "top_p": 0.9}, id="both"),
    ],
)
def test_tokens_follow_the_target(draft_sample: str, sampling: dict[str, float]) -> None:
    k = 3
    toy = make_toy(5, seed=1, **sampling)
    emitted = decode(
        Triton(),
        toy,
        draft_sample=draft_sample,
        num_rows=NUM_ROWS,
        num_tokens=k + 2,
        k=k,
        lengths=lengths_from_discarded_drafts(k),
        device="cuda",
    )
    assert joint_p_value(emitted.tokens, toy) > SMALLEST_P
    for kind in (FIRST, ACCEPTED, RECOVERED, BONUS):
        p_value, num = kind_p_value(emitted, toy, kind, draft_sample)
        assert num > 10_000, KIND_NAMES[kind]
        assert p_value > SMALLEST_P, KIND_NAMES[kind]


def test_drafts_on_the_target_stream_are_seen() -> None:
    toy = make_toy(4)
    emitted = decode(
        Triton(),
        toy,
        draft_sample="gumbel",
        num_rows=NUM_ROWS,
        num_tokens=4,
        k=2,
        device="cuda",
        draft_stream=TARGET,
        use_block_index=False,
    )
    assert kind_p_value(emitted, toy, RECOVERED, "gumbel")[0] < 1e-12
    assert joint_p_value(emitted.tokens, toy) < 1e-12


def test_noise_equals_twin() -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    bounds = {"generator": generator, "device": "cuda"}
    seeds = torch.randint(-(2**63), 2**63 - 1, (100_003,), **bounds)  # type: ignore[call-overload]
    counters = [
        torch.randint(-(2**31), 2**31, (100_003,), **bounds).to(torch.int32)  # type: ignore[call-overload]
        for _ in range(4)
    ]
    words = rng.philox(seeds, *counters)
    assert torch.equal(words, twin_rng.philox(seeds, *counters))
    extremes = int32([0, 1, 2, 3, 2**31 - 1, -(2**31), -128, -129, -2, -1])
    words = torch.cat([words.flatten(), extremes])
    assert torch.equal(rng.uniform(words), twin_rng.uniform(words))
    noise = rng.gumbel_noise(words)
    assert bool(noise.isfinite().all())
    torch.testing.assert_close(noise, twin_rng.gumbel_noise(words), rtol=3e-6, atol=3e-6)
    positions = int32([0, 4095, 131_071])
    rows = (positions, TARGET, int32([0, 1, 9]), int32([0, 1, 2]))
    noise = rng.vocab_gumbel(seeds[:3], 128_256, *rows)
    expected = twin_rng.vocab_gumbel(seeds[:3], 128_256, *rows)
    torch.testing.assert_close(noise, expected, rtol=3e-6, atol=3e-6)
    c2 = ACCEPT | (rows[2] << 8)
    accept = rng.accept_uniform(seeds[:3], positions, rows[2], rows[3])
    expected = twin_rng.philox(seeds[:3], positions * 0, positions, c2, rows[3])
    assert torch.equal(accept, twin_rng.uniform(expected[:, 0]))


@pytest.mark.parametrize("vocab_size", [32_000, 32_003, 128_256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_thresholds_equal_twin(vocab_size: int, dtype: torch.dtype) -> None:
    batch, num_queries = 8, 3
    values = randn(batch, num_queries, vocab_size, scale=3.0).to(dtype)
    values[1, :, ::2] = float("-inf")
    temperature = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0, 1.0, 0.7, 1.0], device="cuda")
    top_k = int32([0, 20, 50, 3, 0, 1, 1000, 10**6])
    top_p = torch.tensor([0.9, 1.0, 0.7, 0.5, 1.0, 1.0, 0.95, 0.3], device="cuda")
    ours = logits.filter_thresholds(values, temperature, top_k, top_p)
    twin = twin_logits.filter_thresholds(values, temperature, top_k, top_p)
    exact = [1, 3, 4, 5]  # no mass involved
    assert torch.equal(ours[exact], twin[exact])
    # Where mass decides, the sets may differ by the tokens within rounding of the boundary.
    x = values.float()
    weights = torch.softmax(x.double() / temperature.clamp(min=1e-5)[:, None, None], -1)
    kept = [torch.where(x >= t[..., None], weights, 0.0).sum(-1) for t in (ours, twin)]
    torch.testing.assert_close(kept[0], kept[1], rtol=0, atol=2e-5)
    assert bool((ours == x.amax(-1)).logical_or(kept[0] > 0).all())


@pytest.mark.parametrize("vocab_size", [32_000, 128_257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduced", [False, True])
def test_gumbel_sample_equals_twin(vocab_size: int, dtype: torch.dtype, reduced: bool) -> None:
    batch, num_queries = 64, 2
    values = randn(batch, num_queries, vocab_size, scale=2.0).to(dtype)
    values[3, 0, 5] = float("nan")
    values[4, 1, vocab_size - 1] = float("inf")
    values[5] = float("-inf")
    rows = torch.arange(batch, device="cuda")
    temperature = torch.where(rows % 8 == 0, 0.0, 0.5 + rows / batch)
    positions = torch.arange(batch * num_queries, device="cuda", dtype=torch.int32)
    positions = positions.view(batch, num_queries) - 1  # the very first is inert
    target_ids = None
    if reduced:
        target_ids = torch.randperm(200_000, device="cuda")[:vocab_size].to(torch.int32)
    thresholds = values.float().nan_to_num(0.0, 0.0, 0.0).amax(-1) - 4.0
    for kept in (None, thresholds):
        arguments = (values, temperature, rows * 2**33, positions, (rows % 4).to(torch.int32))
        ours = gumbel.gumbel_sample(*arguments, DRAFT, 1, kept, target_ids)
        twin = twin_gumbel.gumbel_sample(*arguments, DRAFT, 1, kept, target_ids)
        assert torch.equal(ours[1], twin[1])
        assert int((ours[0] != twin[0]).sum()) <= 1
        greedy = gumbel.greedy_sample(values, positions, target_ids)
        expected = twin_gumbel.greedy_sample(values, positions, target_ids)
        assert torch.equal(greedy[0], expected[0])
        assert torch.equal(greedy[1], expected[1])


@dataclass(frozen=True)
class Batch:
    target: Tensor
    drafts: Tensor
    num_drafts: Tensor
    draft_logits: Tensor
    slot_ids: Tensor
    draft_ids: Tensor | None
    temperature: Tensor
    seeds: Tensor
    first_positions: Tensor
    sample_index: Tensor
    thresholds: Tensor | None

    def run(
        self, function: Callable[..., tuple[Tensor, Tensor, Tensor]], with_q: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        values = dict(vars(self))
        if not with_q:
            values["draft_logits"] = None
        return function(*values.values())


def big_batch(vocab_size: int, dtype: torch.dtype, reduced: bool, filtered: bool) -> Batch:
    batch, k, num_slots = 128, 4, 160
    draft_vocab = vocab_size // 4 if reduced else vocab_size
    draft_logits = randn(num_slots, k + 1, draft_vocab, seed=1, scale=4.0).to(dtype)
    slots = torch.randperm(num_slots, device="cuda")[:batch]
    target_ids = torch.randperm(vocab_size, device="cuda")[:draft_vocab].sort().values
    draft_ids = torch.full((vocab_size,), -1, dtype=torch.int32, device="cuda")
    draft_ids[target_ids] = torch.arange(draft_vocab, dtype=torch.int32, device="cuda")
    own = draft_logits[slots, :k]
    target = randn(batch, k + 1, vocab_size, seed=2, scale=0.5)
    target[:, :k, target_ids] += own.float()
    target[7, 2, 11] = float("nan")
    target = target.to(dtype)
    rows = torch.arange(batch, device="cuda")
    temperature = torch.where(rows % 10 == 9, 0.0, 0.5 + rows / batch)
    seeds = rows * 2**34 + 5
    first_positions = (rows * 31).to(torch.int32)
    sample_index = (rows % 3).to(torch.int32)
    drafts = []
    for i in range(k):
        tokens, _ = gumbel.gumbel_sample(
            own[:, i : i + 1],
            temperature,
            seeds,
            first_positions[:, None] + i,
            sample_index,
            DRAFT,
            i,
            None,
            target_ids.to(torch.int32) if reduced else None,
        )
        drafts.append(tokens)
    thresholds = None
    if filtered:
        top_k = torch.where(rows % 2 == 0, 0, 50).to(torch.int32)
        top_p = torch.where(rows % 3 == 0, 0.9, 1.0)
        thresholds = twin_logits.filter_thresholds(target, temperature, top_k, top_p)
    return Batch(
        target,
        torch.cat(drafts, 1),
        (rows % (k + 2) - 1).to(torch.int32),
        draft_logits,
        slots.to(torch.int32),
        draft_ids if reduced else None,
        temperature,
        seeds,
        first_positions,
        sample_index,
        thresholds,
    )


@pytest.mark.parametrize("vocab_size", [32_000, 32_003, 128_256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("filtered", [False, True])
def test_rejection_sample_equals_twin(
    vocab_size: int, dtype: torch.dtype, reduced: bool, filtered: bool
) -> None:
    batch = big_batch(vocab_size, dtype, reduced, filtered)
    for with_q in (True, False):
        ours = batch.run(rejection.rejection_sample, with_q)
        twin = batch.run(twin_rejection.rejection_sample, with_q)
        # A uniform may fall into the last bits of p: allow one row of the 128.
        for mine, theirs in zip(ours, twin, strict=True):
            assert int((mine != theirs).view(len(mine), -1).any(-1).sum()) <= 1
        assert len(set(twin[1].tolist())) >= 3


def test_kernels_run_inside_a_cuda_graph() -> None:
    """No host synchronisation and fixed grids: a replay on new data equals a direct call."""
    batch = big_batch(32_003, torch.bfloat16, True, True)
    top_k = torch.full_like(batch.num_drafts, 40)
    top_p = torch.full_like(batch.temperature, 0.9)

    def step() -> tuple[Tensor, ...]:
        thresholds = logits.filter_thresholds(batch.target, batch.temperature, top_k, top_p)
        values = dict(vars(batch), thresholds=thresholds)
        judged = rejection.rejection_sample(*values.values())
        address = (batch.seeds, batch.first_positions[:, None], batch.sample_index)
        drawn = gumbel.gumbel_sample(
            batch.target[:, :1], batch.temperature, *address, TARGET, 0, None, None
        )
        return (*judged, *drawn)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    batch.seeds.add_(99)
    batch.num_drafts.copy_(batch.num_drafts.flip(0))
    graph.replay()
    for replayed, direct in zip(captured, step(), strict=True):
        assert torch.equal(replayed, direct)

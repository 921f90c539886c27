"""Gumbel sampling: law, ties, bad rows, and the Triton kernels against the torch twin."""

from __future__ import annotations

import inspect
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from specgen.kernels import gumbel as triton_gumbel
from specgen.kernels.reference import gumbel
from specgen.kernels.reference.logits import filter_thresholds
from specgen.kernels.streams import DRAFT, TARGET

MODULES = [pytest.param(gumbel, id="reference"), pytest.param(triton_gumbel, id="triton")]


def sample_one(
    module: ModuleType,
    logits: torch.Tensor,
    temperature: float = 1.0,
    target_ids: torch.Tensor | None = None,
    thresholds: torch.Tensor | None = None,
    num: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ``num`` tokens from one row of logits ``[V]``, each with its own seed."""
    device = logits.device
    ones = torch.ones(num, dtype=torch.int32, device=device)
    tokens, ok = module.gumbel_sample(
        logits.expand(num, 1, -1),
        torch.full((num,), temperature, device=device),
        torch.arange(num, device=device) * 1_000_003,
        ones[:, None] * 11,
        ones,
        TARGET,
        0,
        None if thresholds is None else thresholds.expand(num, 1),
        target_ids,
    )
    return tokens[:, 0], ok[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_twin_draws_from_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, float("-inf"), 0.5])
    tokens, ok = sample_one(gumbel, logits, temperature, num=200_000)
    assert bool(ok.all())
    probs = torch.softmax(logits.double() / temperature, 0).numpy()
    observed = np.bincount(tokens.numpy(), minlength=6)
    assert observed[4] == 0
    possible = probs > 0
    assert chisquare(observed[possible], 200_000 * probs[possible]).pvalue > 1e-4


def test_twin_draws_only_kept_tokens() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0])
    tokens, _ = sample_one(gumbel, logits, thresholds=torch.tensor([[1.0]]), num=50_000)
    observed = np.bincount(tokens.numpy(), minlength=4)
    assert observed[[1, 3]].tolist() == [0, 0]
    kept = torch.softmax(logits[[0, 2]].double(), 0).numpy()
    assert chisquare(observed[[0, 2]], 50_000 * kept).pvalue > 1e-4


@pytest.mark.parametrize("module", MODULES)
def test_equal_logits_share_at_a_tiny_temperature(module: ModuleType, device: str) -> None:
    # Without subtracting the row's maximum, 30 / 1e-5 would swallow the noise.
    num = 4000 if module is gumbel or device == "cuda" else 100
    logits = torch.tensor([30.0, 30.0, 29.0], device=device)
    tokens, _ = sample_one(module, logits, temperature=1e-5, num=num)
    observed = np.bincount(tokens.cpu().numpy(), minlength=3)
    assert observed[2] == 0
    assert chisquare(observed[:2]).pvalue > 1e-4


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_ties_go_to_the_lowest_target_id(
    module: ModuleType, temperature: float, device: str
) -> None:
    logits = torch.zeros(1500, device=device)
    logits[[1030, 700, 1400]] = 4.0
    token, ok = sample_one(module, logits, temperature)
    assert (token.item(), ok.item()) == (700, True)
    ids = torch.arange(1500, 0, -1, dtype=torch.int32, device=device)
    token, _ = sample_one(module, logits, temperature, target_ids=ids)
    assert token.item() == 100
    positions = torch.zeros(1, 1, dtype=torch.int32, device=device)
    token, ok = module.greedy_sample(logits.view(1, 1, -1), positions, ids)
    assert (token.item(), ok.item()) == (100, True)


@pytest.mark.parametrize("module", MODULES)
def test_noise_is_keyed_by_target_id(module: ModuleType, device: str) -> None:
    """A reduced vocabulary draws what the full one draws with the other tokens banned."""
    num = 40 if device == "cpu" and module is triton_gumbel else 400
    ids = torch.tensor([3, 4, 9, 50, 51], dtype=torch.int32, device=device)
    full = torch.full((64,), float("-inf"), device=device)
    values = torch.tensor([0.3, -0.2, 1.0, 0.0, 0.5], device=device)
    full[ids.long()] = values
    reduced_tokens, _ = sample_one(module, values, target_ids=ids, num=num)
    full_tokens, _ = sample_one(module, full, num=num)
    assert torch.equal(reduced_tokens, full_tokens)
    assert len(set(full_tokens.tolist())) > 2


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_and_inert_rows(module: ModuleType, temperature: float, device: str) -> None:
    logits = torch.zeros(5, 1, 1100, device=device)
    logits[:, 0, 1099] = 50.0
    logits[0, 0, 3] = float("nan")
    logits[1, 0, 1098] = float("inf")
    logits[2] = float("-inf")
    logits[3] = float("nan")
    positions = torch.tensor([[0], [5], [9], [-1], [4]], dtype=torch.int32, device=device)
    tokens, ok = module.gumbel_sample(
        logits,
        torch.full((5,), temperature, device=device),
        torch.arange(5, device=device),
        positions,
        torch.zeros(5, dtype=torch.int32, device=device),
        DRAFT,
        1,
        None,
        None,
    )
    assert tokens[:, 0].tolist() == [-1, -1, -1, -1, 1099]
    assert ok[:, 0].tolist() == [False, False, False, True, True]
    assert (tokens.dtype, ok.dtype) == (torch.int32, torch.bool)
    tokens, ok = module.greedy_sample(logits, positions, None)
    assert tokens[:, 0].tolist() == [-1, -1, -1, -1, 1099]
    assert ok[:, 0].tolist() == [False, False, False, True, True]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [7, 1029, 2500])
@pytest.mark.parametrize("reduced", [False, True])
def test_triton_equals_twin(
    dtype: torch.dtype, vocab_size: int, reduced: bool, device: str
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    batch, num_queries = 3, 2
    logits = (2 * torch.randn(batch, num_queries, vocab_size, generator=generator)).to(dtype)
    logits[1, 0, ::2] = float("-inf")
    logits = logits.to(device)
    temperature = torch.tensor([1.0, 0.7, 0.0], device=device)
    top_k = torch.tensor([0, 3, 3], dtype=torch.int32, device=device)
    top_p = torch.tensor([0.9, 1.0, 1.0], device=device)
    thresholds = filter_thresholds(logits, temperature, top_k, top_p)
    positions = torch.tensor([[4, 5], [-1, 90], [7, 8]], dtype=torch.int32, device=device)
    sample_index = torch.tensor([0, 2, 1], dtype=torch.int32, device=device)
    target_ids = None
    if reduced:
        target_ids = torch.randperm(50_000, generator=generator)[:vocab_size]
        target_ids = target_ids.to(torch.int32).to(device)
    for kept in (None, thresholds):
        for seed in range(3):
            seeds = torch.arange(batch, device=device) * 2**40 - seed
            arguments = (logits, temperature, seeds, positions, sample_index)
            ours = triton_gumbel.gumbel_sample(*arguments, DRAFT, 2, kept, target_ids)
            twin = gumbel.gumbel_sample(*arguments, DRAFT, 2, kept, target_ids)
            assert torch.equal(ours[0], twin[0])
            assert torch.equal(ours[1], twin[1])
    ours = triton_gumbel.greedy_sample(logits, positions, target_ids)
    twin = gumbel.greedy_sample(logits, positions, target_ids)
    assert torch.equal(ours[0], twin[0])
    assert torch.equal(ours[1], twin[1])


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [7, 1029, 2500])
def test_what_is_sampled_is_kept_where_the_row_lives(
    module: ModuleType, dtype: torch.dtype, vocab_size: int, device: str
) -> None:
    """Bit for bit, NaN and infinities included, in a slice of wider rows; no other is touched."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(4, 1, vocab_size, generator=generator).to(dtype)
    logits[0, 0, ::2] = float("-inf")
    logits[1, 0, 3] = float("nan")
    held = torch.full((6, 3, vocab_size), 99.0, dtype=dtype, device=device)
    slot_ids = torch.tensor([4, 0, -1, 2], dtype=torch.int32, device=device)
    positions = torch.tensor([[3], [8], [-1], [1]], dtype=torch.int32, device=device)
    arguments = (
        logits.to(device),
        torch.tensor([1.0, 0.5, 1.0, 0.0], device=device),
        torch.arange(4, device=device),
        positions,
        torch.zeros(4, dtype=torch.int32, device=device),
        DRAFT,
        1,
        None,
        None,
    )
    kept = module.gumbel_sample(*arguments, slot_ids, held[:, 1])
    plain = module.gumbel_sample(*arguments)
    assert torch.equal(kept[0], plain[0])
    assert torch.equal(kept[1], plain[1])
    for slot, row in ((4, 0), (0, 1), (2, 3)):
        torch.testing.assert_close(
            held[slot, 1].cpu(), logits[row, 0], rtol=0, atol=0, equal_nan=True
        )
    assert (held[[1, 3], 1] == 99.0).all()
    assert (held[:, [0, 2]] == 99.0).all()


@pytest.mark.parametrize("module", MODULES)
def test_greedy_sample_is_temperature_zero(module: ModuleType, device: str) -> None:
    logits = torch.randn(4, 1, 30, generator=torch.Generator().manual_seed(1)).to(device)
    positions = torch.tensor([[1], [2], [-1], [3]], dtype=torch.int32, device=device)
    zeros = torch.zeros(4, device=device)
    integers = torch.zeros(4, dtype=torch.int32, device=device)
    sampled = module.gumbel_sample(
        logits, zeros, integers.long(), positions, integers, DRAFT, 0, None, None
    )
    greedy = module.greedy_sample(logits, positions, None)
    assert torch.equal(sampled[0], greedy[0])
    assert torch.equal(sampled[1], greedy[1])


@pytest.mark.parametrize("name", ["gumbel_sample", "greedy_sample"])
def test_signatures_equal(name: str) -> None:
    ours, twin = getattr(triton_gumbel, name), getattr(gumbel, name)
    assert inspect.signature(ours) == inspect.signature(twin)

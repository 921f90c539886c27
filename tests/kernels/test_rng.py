"""Random numbers: known answers, tails, and the Triton kernels against the torch twin."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from specgen.kernels import rng as triton_rng
from specgen.kernels.reference import rng
from specgen.kernels.streams import ACCEPT, DRAFT, TARGET

MASK = 0xFFFFFFFF
EXTREME_WORDS = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFF7F, 0xFFFFFF80, 0xFFFFFFFE, MASK]

# Published known-answer vectors of Philox4x32-10 (Salmon et al. 2011): key, counter, output.
KNOWN_ANSWERS = [
    (0x0, (0x0,) * 4, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        0xFFFFFFFFFFFFFFFF,
        (MASK,) * 4,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        0x299F31D0A4093822,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_python(key: int, counter: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 in Python integers, written from the paper."""
    c = list(counter)
    k0, k1 = key & MASK, (key >> 32) & MASK
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return tuple(c)


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >= 1 << (bits - 1) else value


def int32(values: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor([signed(v & MASK, 32) for v in values], dtype=torch.int32, device=device)


def random_counters(num: int, device: str = "cpu") -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num,), generator=generator)
    bounds = (-(2**31), 2**31)
    counters = [torch.randint(*bounds, (num,), generator=generator) for _ in range(4)]
    return seeds.to(device), [c.to(torch.int32).to(device) for c in counters]


def row_arguments(device: str) -> tuple[torch.Tensor, ...]:
    """Seeds, positions, block indices and sample indices of five rows, extremes included."""
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63), 123456789], device=device)
    positions = torch.tensor([0, 1, 4095, 131071, 2**31 - 1], dtype=torch.int32, device=device)
    block_index = torch.tensor([0, 1, 2, 3, 15], dtype=torch.int32, device=device)
    sample_index = torch.tensor([0, 1, 0, 7, 1000], dtype=torch.int32, device=device)
    return seeds, positions, block_index, sample_index


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN_ANSWERS)
def test_philox_known_answers(
    key: int, counter: tuple[int, ...], words: tuple[int, ...], device: str
) -> None:
    assert philox_python(key, counter) == words
    seeds = torch.tensor([signed(key, 64)])
    expected = int32(list(words))
    assert torch.equal(rng.philox(seeds, *(int32([c]) for c in counter))[0], expected)
    counters = (int32([c], device) for c in counter)
    assert torch.equal(triton_rng.philox(seeds.to(device), *counters)[0].cpu(), expected)


def test_philox_twin_equals_python_integers() -> None:
    seeds, counters = random_counters(200)
    words = rng.philox(seeds, *counters)
    for row in range(200):
        key = int(seeds[row]) & (2**64 - 1)
        expected = philox_python(key, tuple(int(c[row]) & MASK for c in counters))
        assert [int(w) & MASK for w in words[row]] == list(expected)


@pytest.mark.usefixtures("poison")
def test_philox_triton_equals_twin(device: str) -> None:
    seeds, counters = random_counters(1500, device)
    assert torch.equal(triton_rng.philox(seeds, *counters), rng.philox(seeds, *counters))


def test_uniform_lies_strictly_inside_the_unit_interval() -> None:
    u = rng.uniform(int32(EXTREME_WORDS))
    assert u[0].item() == 2.0**-33
    assert u[-1].item() == 1.0 - 2.0**-24
    assert bool(((u > 0) & (u < 1)).all())
    assert bool((u[1:] >= u[:-1]).all())


def test_gumbel_noise_is_finite_and_monotone_at_extremes() -> None:
    g = rng.gumbel_noise(int32(EXTREME_WORDS))
    assert bool(g.isfinite().all())
    assert g[0].item() == pytest.approx(33 * math.log(2), rel=1e-6)
    assert bool((g[1:] <= g[:-1]).all())


def test_gumbel_noise_keeps_the_precision_of_the_tail() -> None:
    words = list(range(3000)) + [2**n for n in range(12, 32)]
    noise = rng.gumbel_noise(int32(words)).double()
    w = torch.tensor(words, dtype=torch.float64).add(0.5).mul(2.0**-32)
    torch.testing.assert_close(noise, -torch.log(-torch.log1p(-w)), rtol=0, atol=3e-6)


@pytest.mark.parametrize("probability", [1e-6, 1e-8, 1e-9])
def test_a_rare_token_wins_its_share(probability: float) -> None:
    # P(win) = E[exp(-E / p')], E the token's exponential and p' its odds; only tiny E contribute.
    num_words = min(2**32, int(40 * probability * 2**32) + 64)
    noise = rng.gumbel_noise(torch.arange(num_words, dtype=torch.int32)).double()
    exponential = torch.exp(-noise)
    odds = probability / (1 - probability)
    wins = torch.exp(-exponential / odds).sum().item() * 2.0**-32
    assert wins == pytest.approx(probability, rel=0.01)


@pytest.mark.usefixtures("poison")
def test_word_maps_equal_twin(device: str) -> None:
    _, counters = random_counters(3000)
    words = torch.cat([int32(EXTREME_WORDS), counters[0]]).view(17, 177)
    u = triton_rng.uniform(words.to(device)).cpu()
    assert torch.equal(u, rng.uniform(words))
    noise = triton_rng.gumbel_noise(words.to(device)).cpu()
    torch.testing.assert_close(noise, rng.gumbel_noise(words), rtol=2e-6, atol=2e-6)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("stream", [DRAFT, ACCEPT, TARGET])
def test_token_gumbel_equals_twin(stream: int, device: str) -> None:
    seeds, positions, block_index, sample_index = row_arguments(device)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 2**31 - 1, (5, 1029), generator=generator).to(torch.int32).to(device)
    arguments = (seeds, ids, positions, stream, block_index, sample_index)
    noise = triton_rng.token_gumbel(*arguments)
    torch.testing.assert_close(noise, rng.token_gumbel(*arguments), rtol=2e-6, atol=2e-6)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("vocab_size", [1, 5, 1024, 1031])
def test_vocab_gumbel_is_token_gumbel_of_all_ids(vocab_size: int, device: str) -> None:
    seeds, positions, block_index, sample_index = row_arguments(device)
    ids = torch.arange(vocab_size, dtype=torch.int32, device=device).expand(5, vocab_size)
    expected = rng.token_gumbel(seeds, ids, positions, TARGET, block_index, sample_index)
    tail = (positions, TARGET, block_index, sample_index)
    assert torch.equal(rng.vocab_gumbel(seeds, vocab_size, *tail), expected)
    noise = triton_rng.vocab_gumbel(seeds, vocab_size, *tail)
    torch.testing.assert_close(noise, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.usefixtures("poison")
def test_accept_uniform_equals_twin_and_its_address(device: str) -> None:
    arguments = row_arguments(device)
    u = triton_rng.accept_uniform(*arguments)
    assert torch.equal(u, rng.accept_uniform(*arguments))
    seeds, positions, block_index, sample_index = arguments
    c2 = ACCEPT | (block_index << 8)
    words = rng.philox(seeds, torch.zeros_like(positions), positions, c2, sample_index)
    assert torch.equal(u, rng.uniform(words[:, 0]))


def test_token_noise_is_at_its_address() -> None:
    seeds, positions, block_index, sample_index = row_arguments("cpu")
    ids = torch.tensor([[0, 1, 2, 3, 4, 50_001]] * 5, dtype=torch.int32)
    noise = rng.token_gumbel(seeds, ids, positions, DRAFT, block_index, sample_index)
    for column, token in enumerate([0, 1, 2, 3, 4, 50_001]):
        c0 = torch.full((5,), token // 4, dtype=torch.int32)
        words = rng.philox(seeds, c0, positions, DRAFT | (block_index << 8), sample_index)
        assert torch.equal(noise[:, column], rng.gumbel_noise(words[:, token % 4]))


@pytest.mark.parametrize(
    "name", ["philox", "uniform", "gumbel_noise", "token_gumbel", "vocab_gumbel", "accept_uniform"]
)
def test_signatures_equal(name: str) -> None:
    ours, twin = getattr(triton_rng, name), getattr(rng, name)
    assert inspect.signature(ours) == inspect.signature(twin)

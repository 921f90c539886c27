"""Lanes and tokens that the draw leaves out could not have won, however near they come."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernels.test_lane_noise import lane_ids
from kernels.test_rejection import Case, make_case, to_device
from torch import Tensor

from specgen.kernels import rejection as triton_rejection
from specgen.kernels.reference import gumbel, rejection
from specgen.kernels.reference.logits import filter_thresholds
from specgen.kernels.reference.rng import vocab_gumbel
from specgen.kernels.streams import DRAFT, TARGET

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("poison"),
]
VOCAB_SIZE = 9_001  # three blocks of lanes, the last of them short


def assert_equals_twin(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    twin = case.run(rejection)
    ours = to_device(case, device).run(triton_rejection)
    for mine, theirs in zip(ours, twin, strict=True):
        assert torch.equal(mine.cpu(), theirs)
    return twin


def noise_of(case: Case) -> Tensor:
    """Noise of every row at its first position, ``[B, V]``."""
    zeros = torch.zeros_like(case.sample_index)
    address = (case.first_positions, TARGET, zeros, case.sample_index)
    return vocab_gumbel(case.seeds, case.target_logits.shape[-1], *address)


def rivals(temperature: float, hair: float, batch: int = 6) -> tuple[Case, Tensor, Tensor]:
    """One draft, impossible, and two tokens whose scores are ``hair`` apart: the argmax, and in a
    block of nothing else the token of the row's largest noise, better where the row is even.

    Returns the case and the two tokens, ``[B]``.
    """
    logits = torch.full((batch, 2, VOCAB_SIZE), -1e5)
    logits[:, :, 4096:6144] = float("-inf")  # lanes with and without anything
    case = make_case(logits, torch.full((batch, 1), VOCAB_SIZE - 2), temperature=temperature)
    case = replace(case, seeds=torch.arange(batch) // 2 * 7_919)
    noise = noise_of(case)
    rows = torch.arange(batch)
    second = noise.argmax(-1)
    assert float(noise.amax(-1).min()) > 8.2
    first = torch.where(second < 4096, 8_200, 3) + rows
    signs = torch.where(rows % 2 == 0, 1.0, -1.0)
    gap = noise[rows, first].double() - noise[rows, second].double() + signs * hair
    logits[rows, :, first] = 0.0
    logits[rows, :, second] = (temperature * gap).float()[:, None]
    return case, first, second


@pytest.mark.parametrize(("num_warps", "num_lanes"), [(4, 32), (1, 8)])
@pytest.mark.parametrize("temperature", [1.0, 1e-4, 3.0])
@pytest.mark.parametrize("with_q", [False, True])
def test_winners_by_a_hair(
    with_q: bool,
    temperature: float,
    num_warps: int,
    num_lanes: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_rejection, "_JUDGE_WARPS", num_warps)
    monkeypatch.setattr(triton_rejection, "_JUDGE_LANES", num_lanes)
    case, first, second = rivals(temperature, hair=2e-5)
    expected = torch.where(torch.arange(len(first)) % 2 == 0, second, first)
    if with_q:  # certain of the draft, so that the residual is p
        draft_logits = torch.full((len(first), 1, VOCAB_SIZE), -1e5)
        draft_logits[:, :, VOCAB_SIZE - 2] = 0.0
        case = replace(case, draft_logits=draft_logits)
    tokens, num_sampled, _ = assert_equals_twin(case, device)
    assert num_sampled.tolist() == [1] * len(first)
    assert torch.equal(tokens[:, 0].long(), expected)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_threshold_at_the_winner(is_kept: bool, device: str) -> None:
    case, first, second = rivals(1.0, hair=1e-3)
    rows = torch.arange(len(first))
    thresholds = case.target_logits[rows, :, second].clone()
    if not is_kept:
        thresholds = thresholds.nextafter(torch.tensor(0.0))
    tokens, _, _ = assert_equals_twin(replace(case, thresholds=thresholds), device)
    winner = torch.where((rows % 2 == 0) & is_kept, second, first)
    assert torch.equal(tokens[:, 0].long(), winner)


def shaped_logits(shape: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(*size, generator=generator)
    if shape == "flat":
        return 0.3 * noise
    if shape == "spread":
        return 3.0 * noise
    logits = 1.5 * noise  # a model's: a few logits far above the rest
    peaks = torch.randint(size[-1], (*size[:-1], 4), generator=generator)
    heights = 14 + 2 * torch.randn(peaks.shape, generator=generator)
    return logits.scatter_(-1, peaks, heights)


@pytest.mark.parametrize(("num_warps", "num_lanes"), [(4, 32), (2, 8), (8, 128)])
@pytest.mark.parametrize("shape", ["flat", "spread", "peaked"])
@pytest.mark.parametrize("drafts", ["greedy", "gumbel", "reduced"])
@pytest.mark.parametrize("filtered", [False, True])
def test_many_blocks_equal_the_twin(
    filtered: bool,
    drafts: str,
    shape: str,
    num_warps: int,
    num_lanes: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts near the target, with all that a batch may hold, over several blocks."""
    monkeypatch.setattr(triton_rejection, "_JUDGE_WARPS", num_warps)
    monkeypatch.setattr(triton_rejection, "_JUDGE_LANES", num_lanes)
    generator = torch.Generator().manual_seed(len(shape) + num_lanes)
    batch, k = 10, 2
    draft_vocab = 5_000 if drafts == "reduced" else VOCAB_SIZE
    target_ids = torch.randperm(VOCAB_SIZE, generator=generator)[:draft_vocab].sort().values
    draft_ids = torch.full((VOCAB_SIZE,), -1, dtype=torch.int32)
    draft_ids[target_ids] = torch.arange(draft_vocab, dtype=torch.int32)
    target = shaped_logits(shape, (batch, k + 1, VOCAB_SIZE), generator)
    draft_logits = target[:, :k, target_ids] + 0.7 * torch.randn(
        batch, k, draft_vocab, generator=generator
    )
    target[1, 0, :4096] = float("-inf")
    target[2, 1, 8_999] = float("nan")
    target[3, 0, 6_000] = float("inf")
    temperature = torch.tensor([1.0, 1.0, 0.7, 1.0, 1.0, 0.0, 1e-4, 2.0, 1.0, 0.3])
    case = make_case(target, torch.zeros(batch, k), draft_logits, seed=num_lanes)
    case = replace(
        case,
        temperature=temperature,
        num_draft_tokens=torch.tensor([2, 2, 2, 2, -1, 2, 2, 0, 1, 2], dtype=torch.int32),
        draft_ids=draft_ids if drafts == "reduced" else None,
    )
    ids = target_ids.to(torch.int32)
    columns = []
    for i in range(k):
        if drafts == "greedy":
            columns.append(ids[draft_logits[:, i].argmax(-1)])
            continue
        address = (case.seeds, case.first_positions[:, None] + i, case.sample_index)
        drawn, _ = gumbel.gumbel_sample(
            draft_logits[:, i : i + 1], temperature, *address, DRAFT, i, None, ids
        )
        columns.append(drawn[:, 0])
    case = replace(
        case,
        draft_tokens=torch.stack(columns, 1),
        draft_logits=None if drafts == "greedy" else draft_logits,
    )
    if filtered:
        top_k = torch.tensor([0, 5, 40, 3, 2, 8, 3, 300, 1, 0], dtype=torch.int32)
        top_p = torch.tensor([0.8, 1.0, 0.9, 1.0, 0.5, 1.0, 1.0, 0.99, 1.0, 1.0])
        thresholds = filter_thresholds(target, temperature, top_k, top_p)
        case = replace(case, thresholds=thresholds)
    _, num_sampled, ok = assert_equals_twin(case, device)
    assert ok.tolist()[3:5] == [False, True]
    assert num_sampled.tolist()[3:5] == [0, 0]


def test_the_argmax_was_the_draft_and_is_rejected(device: str) -> None:
    """Nothing to beat is known at first: the best of the other tokens wins, wherever it is."""
    batch = 10
    logits = torch.zeros(batch, 2, VOCAB_SIZE)
    logits[:, :, 77] = 1.0
    case = make_case(logits, torch.full((batch, 1), 77))
    tokens, num_sampled, _ = assert_equals_twin(case, device)
    assert num_sampled.tolist() == [1] * batch
    assert len(set(tokens[:, 0].tolist())) > batch // 2
    only = torch.full_like(logits, float("-inf"))
    only[:, :, 8_000] = -3.0
    case = replace(case, target_logits=only, draft_tokens=case.draft_tokens * 0 + 9)
    tokens, num_sampled, _ = assert_equals_twin(case, device)
    assert tokens[:, 0].tolist() == [8_000] * batch


def test_no_weight_is_left_over_several_blocks(device: str) -> None:
    """q = p on all that is kept, and a rejected draft that q does not have: p of that row."""
    batch, middle = 8, 5_000
    logits = torch.zeros(batch, 2, VOCAB_SIZE)
    logits[:, 0, middle:] = -30.0
    draft_ids = torch.arange(VOCAB_SIZE, dtype=torch.int32)
    draft_ids[middle:] = -1
    case = make_case(
        logits, torch.full((batch, 1), VOCAB_SIZE - 1), logits[:, :1, :middle].contiguous()
    )
    case = replace(case, draft_ids=draft_ids, thresholds=torch.zeros(batch, 2))
    tokens, num_sampled, _ = assert_equals_twin(case, device)
    assert num_sampled.tolist() == [1] * batch
    assert int(tokens[:, 0].max()) < middle
    assert int(tokens[:, 0].min()) >= 0


@pytest.mark.parametrize(
    ("vocab_size", "num_warps", "num_lanes"),
    [(VOCAB_SIZE, 4, 32), (VOCAB_SIZE, 1, 4), (40_000, 1, 32)],  # 4, 8 and 16 lanes a thread
)
def test_the_residual_is_a_single_token(
    vocab_size: int, num_warps: int, num_lanes: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is: no other token gives a score to beat, so that all lanes are gone through."""
    monkeypatch.setattr(triton_rejection, "_JUDGE_WARPS", num_warps)
    monkeypatch.setattr(triton_rejection, "_JUDGE_LANES", num_lanes)
    only = torch.tensor([0, 7, 4_095, 4_096, 5_001, 8_191, 8_192, vocab_size - 1])
    batch, rejected = len(only), 77
    logits = torch.zeros(batch, 2, vocab_size)
    logits[:, :, rejected] = float("-inf")
    draft_logits = torch.zeros(batch, 1, vocab_size)
    draft_logits[:, :, rejected] = -5.0
    draft_logits[torch.arange(batch), 0, only] = -5.0  # so that q is above p at all others
    case = make_case(logits, torch.full((batch, 1), rejected), draft_logits)
    tokens, num_sampled, _ = assert_equals_twin(case, device)
    assert num_sampled.tolist() == [1] * batch
    assert torch.equal(tokens[:, 0].long(), only)


def test_the_winner_is_one_of_many_loudest_tokens(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes that promise more than they hold come first, and hundreds of tokens remain."""
    monkeypatch.setattr(triton_rejection, "_JUDGE_WARPS", 1)
    vocab_size, batch = 10 * 4_096, 8
    logits = torch.zeros(batch, 2, vocab_size)
    case = make_case(logits, torch.full((batch, 1), 77))
    noise = noise_of(case)
    by_lane = lane_ids(10).flatten(0, 1)  # [lanes, ids]
    loudest, quietest = noise[:, by_lane].max(-1), noise[:, by_lane].min(-1)
    winner = noise.argmax(-1)
    for row in range(batch):
        promising = torch.arange(0, len(by_lane), 2)
        promising = promising[(by_lane[promising] != winner[row]).all(-1)]
        promise = noise[row].max() + 0.5 - loudest.values[row, promising]
        tokens = by_lane[promising]
        logits[row, :, tokens.gather(1, quietest.indices[row, promising][:, None])[:, 0]] = promise
        logits[row, :, tokens.gather(1, loudest.indices[row, promising][:, None])[:, 0]] = -30.0
    logits[:, :, 77] = -30.0  # rejected
    tokens, num_sampled, _ = assert_equals_twin(case, device)
    assert num_sampled.tolist() == [1] * batch
    assert torch.equal(tokens[:, 0].long(), winner)

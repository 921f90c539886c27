"""The largest noises of every lane, and the lanes of noise and of logits being the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specgen.kernels import lane_noise as triton_lane_noise
from specgen.kernels.lanes import (
    LANE_GROUP,
    LANE_IDS,
    NOISE_SLACK,
    NOISE_STEP,
    NUM_LANES,
    NUM_LOUDEST,
    VOCAB_BLOCK,
)
from specgen.kernels.overlap import overlap_options
from specgen.kernels.reference import lane_noise
from specgen.kernels.reference.rng import vocab_gumbel
from specgen.kernels.step_statistics import step_statistics
from specgen.kernels.streams import TARGET

pytestmark = pytest.mark.usefixtures("poison")
NUM_STEPS = 3


def rows(num_drafts: list[int], temperature: list[float], device: str) -> tuple[Tensor, ...]:
    batch = len(num_drafts)
    first = torch.arange(batch, dtype=torch.int32)
    arguments = (
        torch.tensor(num_drafts, dtype=torch.int32),
        torch.tensor(temperature),
        first.long() * 7_919 - (1 << 40),
        20 + 3 * first,
        first % 2,
    )
    return tuple(argument.to(device) for argument in arguments)


def lane_ids(num_blocks: int) -> Tensor:
    """Ids of every lane in the order of their places, ``[N, NUM_LANES, LANE_IDS]``."""
    ids = torch.arange(num_blocks * VOCAB_BLOCK)
    return ids.view(num_blocks, -1, NUM_LANES, LANE_GROUP).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("vocab_size", [5, VOCAB_BLOCK, 9_001])
def test_bounds_are_of_the_largest_noises(vocab_size: int) -> None:
    arguments = rows([2, 2], [1.0, 0.5], "cpu")
    bounds = lane_noise.largest_noise(*arguments, NUM_STEPS, vocab_size)
    num_blocks = bounds.shape[2]
    ids = lane_ids(num_blocks)
    _, _, seeds, first_positions, sample = arguments
    places, values = bounds & LANE_IDS - 1, (bounds // LANE_IDS & 1023) * NOISE_STEP
    for step in range(NUM_STEPS):
        noise = vocab_gumbel(
            seeds, num_blocks * VOCAB_BLOCK, first_positions + step, TARGET, sample * 0, sample
        )[:, ids]  # [B, N, NUM_LANES, LANE_IDS]
        largest = noise.topk(NUM_LOUDEST, -1)
        assert torch.equal(places[:, step].transpose(-1, -2), largest.indices)
        above = values[:, step].transpose(-1, -2) - largest.values
        assert float(above.min()) > NOISE_SLACK / 2
        assert float(above.max()) < NOISE_STEP + 2 * NOISE_SLACK


@pytest.mark.parametrize("vocab_size", [5, VOCAB_BLOCK, 9_001])
@pytest.mark.parametrize(("calls", "width"), [(8, 1), (16, 16)])
def test_triton_equals_twin(
    calls: int, width: int, vocab_size: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the steps that draw; others are left alone."""
    monkeypatch.setattr(triton_lane_noise, "_CALLS", calls)
    monkeypatch.setattr(triton_lane_noise, "_WIDTH", width)
    arguments = rows([2, 0, 1, -1, 2], [1.0, 2.0, 1e-4, 1.0, 0.0], device)
    ours = triton_lane_noise.largest_noise(*arguments, NUM_STEPS, vocab_size).cpu()
    twin = lane_noise.largest_noise(*(a.cpu() for a in arguments), NUM_STEPS, vocab_size)
    untouched = torch.empty_like(ours)
    for row, num_drawn in enumerate([3, 1, 2, 0, 0]):
        mine, theirs = ours[row, :num_drawn].int(), twin[row, :num_drawn].int()
        assert torch.equal(mine & LANE_IDS - 1, theirs & LANE_IDS - 1)
        # A logarithm may differ in its last bit, and so, rarely, in what it is rounded up to.
        steps = mine // LANE_IDS - theirs // LANE_IDS
        assert int(steps.abs().max()) <= 1 if num_drawn else True
        assert float((steps != 0).float().mean()) < 1e-3 if num_drawn else True
        assert torch.equal(ours[row, num_drawn:], untouched[row, num_drawn:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lanes_of_logits_are_those_of_noise(dtype: torch.dtype, device: str) -> None:
    vocab_size, generator = 9_001, torch.Generator().manual_seed(5)
    logits = torch.randn(3, NUM_STEPS, vocab_size, generator=generator).to(dtype)
    logits[0, 0, 4_100:8_300] = float("-inf")
    num_drafts, temperature, *_ = rows([2, 1, 2], [1.0, 0.7, 0.0], device)
    statistics = step_statistics(
        logits.to(device),
        None,
        num_drafts,
        num_drafts,
        temperature,
        None,
        has_synthetic=False,
        options=overlap_options(logits.to(device)),
    )
    num_blocks = -(-vocab_size // VOCAB_BLOCK)
    padding = num_blocks * VOCAB_BLOCK - vocab_size
    padded = torch.nn.functional.pad(logits.float(), (0, padding), value=float("-inf"))
    by_lane = padded[..., lane_ids(num_blocks)].amax(-1)
    lane_max = statistics.lane_max.cpu().float()
    assert torch.equal(lane_max[0], by_lane[0])
    assert torch.equal(lane_max[1, :2], by_lane[1, :2])
    block_max = statistics.max.cpu()
    assert torch.equal(block_max[2], by_lane[2].amax(-1))

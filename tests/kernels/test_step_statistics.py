"""The statistics of logits that verification is made from, against float64."""

from __future__ import annotations

import pytest
import torch
import triton
from torch import Tensor

from specgen.kernels.lanes import LANE_GROUP, NUM_LANES, VOCAB_BLOCK
from specgen.kernels.overlap import overlap_options
from specgen.kernels.step_statistics import StepStatistics, step_statistics

pytestmark = [
    # In Triton's interpreter numpy warns about values that the kernels mask afterwards.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("poison"),
]
VOCAB_SIZE = 2 * VOCAB_BLOCK + 77
NUM_BLOCKS = 3
LANE_STRIDE = NUM_LANES * LANE_GROUP
# In the interpreter a fused operation rounds twice, by a share of the larger numbers.
LARGE, TOLERANCE = (60.0, 1e-3) if triton.knobs.runtime.interpret else (65_000.0, 2e-5)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def statistics_of(
    logits: Tensor, temperature: float, device: str, draft: bool = False, synthetic: bool = False
) -> StepStatistics:
    """Statistics of rows ``[B, V]``, each judged at one step, as target's or as draft's."""
    batch = len(logits)
    ones = torch.ones(batch, dtype=torch.int32, device=device)
    logits = logits.to(device)
    target = torch.stack((torch.zeros_like(logits) if draft else logits, logits), dim=1)
    return step_statistics(
        target,
        logits[:, None].contiguous() if draft else None,
        torch.arange(batch, dtype=torch.int32, device=device),
        ones,
        temperature * ones,
        None,
        has_synthetic=synthetic,
        options=overlap_options(logits),
    )


def blocks_of(logits: Tensor) -> Tensor:
    padding = NUM_BLOCKS * VOCAB_BLOCK - logits.shape[-1]
    padded = torch.nn.functional.pad(logits.double(), (0, padding), value=float("-inf"))
    return padded.view(*logits.shape[:-1], NUM_BLOCKS, VOCAB_BLOCK)


def sums_of(blocks: Tensor, temperature: float) -> Tensor:
    top = blocks.amax(-1, keepdim=True)
    return torch.where(top > float("-inf"), (blocks - top) / temperature, blocks).exp().sum(-1)


def hard_rows() -> Tensor:
    """What a lane's first ids do not tell of the others.

    Rows: nothing special; a peak that other ids of its lane have before it; the same so that all
    before it are far below what float32 holds; lanes that begin with -inf, some with the rest far
    below 0; all but one id -inf; one value everywhere; large values (on a GPU near the largest of
    float16).
    """
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(7, VOCAB_SIZE, generator=generator)
    rows[1, 3 * LANE_STRIDE + 5] = 40.0
    rows[2] -= 300.0
    rows[2, 5 * LANE_STRIDE + 7] = 200.0
    rows[2, VOCAB_BLOCK + 5 * LANE_STRIDE + 7] = 200.0
    rows[2, VOCAB_BLOCK : VOCAB_BLOCK + 64] = 100.0
    rows[3, :LANE_STRIDE] = float("-inf")
    rows[3, VOCAB_BLOCK:] -= 500.0
    rows[3, VOCAB_BLOCK : VOCAB_BLOCK + LANE_GROUP] = float("-inf")
    rows[3, 2 * VOCAB_BLOCK :][:LANE_GROUP] = float("-inf")
    rows[4] = float("-inf")
    rows[4, 2 * LANE_STRIDE + 9] = -3.0
    rows[5] = 11.0
    rows[6] = LARGE - rows[6].abs()
    return rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.02, 50.0])
@pytest.mark.parametrize("draft", [False, True])
def test_sums_hold_whatever_a_lane_begins_with(
    dtype: torch.dtype, temperature: float, draft: bool, device: str
) -> None:
    rows = hard_rows().to(dtype)
    found = statistics_of(rows, temperature, device, draft=draft)
    blocks = blocks_of(rows)
    block_max = (found.draft_max if draft else found.max)[:, 0].cpu()
    block_sum = (found.draft_sum if draft else found.sum)[:, 0].cpu()
    assert torch.equal(block_max.double(), blocks.amax(-1))
    expected = sums_of(blocks, temperature)
    torch.testing.assert_close(block_sum.double(), expected, rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_greedy_rows_under_synthetic_acceptance(dtype: torch.dtype, device: str) -> None:
    rows = hard_rows().to(dtype)
    found = statistics_of(rows, 0.0, device, synthetic=True)
    blocks = blocks_of(rows)
    expected = sums_of(blocks, 1.0)
    torch.testing.assert_close(found.sum[:, 0].cpu().double(), expected, rtol=TOLERANCE, atol=0)
    first = found.first[:, 0].cpu()
    for row in range(len(rows)):
        for block in range(NUM_BLOCKS):
            group = blocks[row, block].view(-1, LANE_GROUP).amax(-1)
            expected_id = block * VOCAB_BLOCK + int(group.argmax()) * LANE_GROUP
            assert first[row, block] == expected_id


@pytest.mark.parametrize("place", [0, LANE_STRIDE + 3, VOCAB_BLOCK - 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("draft", [False, True])
def test_bad_logits_make_a_block_bad_wherever_they_stand(
    place: int, bad: float, temperature: float, draft: bool, device: str
) -> None:
    rows = torch.zeros(2, VOCAB_SIZE)
    rows[1, VOCAB_BLOCK + place] = bad
    found = statistics_of(rows, temperature, device, draft=draft, synthetic=True)
    steps = [found.draft_max[:, 0]] if draft else [found.max[:, 0], found.max[:, 1]]
    for block_max in steps:
        assert block_max[0].tolist() == [0.0, 0.0, 0.0]
        assert block_max[1].tolist() == [0.0, float("inf"), 0.0]

"""What a step looks at before the target's logits is what it draws with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from specgen.kernels import Kernels, select_kernels
from specgen.kernels.batch_types import DecodeInputs, SamplingRows
from specgen.kernels.reference import lane_noise
from specgen.pipeline.cuda_capture import SideStream
from specgen.pipeline.rejection_sampler import RejectionSampler

VOCAB_SIZE = 4_200  # two blocks of lanes


def sampler(backend: str) -> tuple[RejectionSampler, Kernels]:
    kernels = select_kernels("cpu", backend)
    state = SimpleNamespace(draft_logits=None, device=torch.device("cpu"))
    return RejectionSampler(kernels, state, None, VOCAB_SIZE), kernels  # type: ignore[arg-type]


def rows(k: int) -> tuple[DecodeInputs, SamplingRows]:
    batch = 3
    first = torch.arange(batch, dtype=torch.int32)
    nothing = torch.zeros(batch, dtype=torch.int32)
    inputs = DecodeInputs(**dict.fromkeys(DecodeInputs._fields, nothing))._replace(
        draft_tokens=torch.full((batch, k), 7, dtype=torch.int32),
        num_draft_tokens=nothing + k,
    )
    sampling = SamplingRows(
        temperature=torch.ones(batch),
        seeds=first.long() + 5,
        sample_index=first % 2,
        seq_lens=20 + first,
    )
    return inputs, sampling


@pytest.mark.parametrize("k", [0, 2])
def test_noise_is_that_of_the_positions_to_draw(k: int) -> None:
    """Drawing with it gives the tokens of the twin, which knows nothing of it."""
    ours, _ = sampler("triton")
    inputs, sampling = rows(k)
    noise = ours.look_ahead(inputs, sampling)
    assert noise is not None
    expected = lane_noise.largest_noise(
        inputs.num_draft_tokens,
        sampling.temperature,
        sampling.seeds,
        sampling.seq_lens,
        sampling.sample_index,
        k + 1,
        VOCAB_SIZE,
    )
    assert float((noise != expected).float().mean()) < 1e-3
    logits = torch.randn(3, k + 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(k))
    slots = torch.arange(3, dtype=torch.int32)
    drawn = ours.verify(logits, slots, inputs, sampling, noise, needs_filter=False)
    twin, _ = sampler("reference")
    for mine, theirs in zip(
        drawn, twin.verify(logits, slots, inputs, sampling, None, needs_filter=False), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_twins_look_at_nothing_before() -> None:
    ours, _ = sampler("reference")
    assert ours.look_ahead(*rows(2)) is None


def test_without_a_capture_work_beside_is_done_in_its_turn() -> None:
    order: list[str] = []
    beside = SideStream()
    assert beside.fork(lambda: order.append("work") or 3) == 3  # type: ignore[func-returns-value]
    order.append("after")
    beside.join()
    assert order == ["work", "after"]

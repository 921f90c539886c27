"""The synthetic rule: the rates it was given, the target's own draws, Triton against the twin."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from kernels.test_rejection import MODULES, make_case, mixed_case, to_device

from specgen.kernels import rejection as triton_rejection
from specgen.kernels.reference import gumbel, rejection
from specgen.kernels.streams import TARGET

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("with_q", [False, True])
def test_acceptance_has_the_given_rates(with_q: bool, temperature: float) -> None:
    """Whatever p and q say, at any temperature: here every draft has almost no probability."""
    num, rates = 100_000, torch.tensor([0.8, 0.5, 0.25])
    logits = torch.tensor([9.0, 0.0, 0.0]).expand(num, 4, 3)
    draft_logits = torch.tensor([0.0, 5.0, 0.0]).expand(num, 3, 3) if with_q else None
    case = make_case(logits, torch.ones(num, 3), draft_logits, temperature)
    _, num_sampled, ok = replace(case, synthetic_rates=rates).run(rejection)
    assert bool(ok.all())
    for i, expected in enumerate([0.8, 0.4, 0.1]):
        rate = (num_sampled > i + 1).double().mean().item()
        assert rate == pytest.approx(expected, abs=4 * math.sqrt(0.25 / num))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("with_q", [False, True])
def test_after_a_rejection_comes_the_targets_own_draw(
    module: ModuleType, with_q: bool, device: str
) -> None:
    """Also where that draw is the rejected draft itself, which ``standard`` would never emit."""
    logits = torch.tensor([0.0, 1.0, 0.0]).expand(16, 3, 3).contiguous()
    draft_logits = torch.zeros(16, 2, 3) if with_q else None
    case = make_case(logits, torch.ones(16, 2), draft_logits)
    case = replace(case, synthetic_rates=torch.tensor([1.0, 0.0]))
    positions = (case.first_positions + 1)[:, None]
    arguments = (case.temperature, case.seeds, positions, case.sample_index)
    expected, _ = gumbel.gumbel_sample(logits[:, 1:2], *arguments, TARGET, 0, None, None)
    tokens, num_sampled, _ = to_device(case, device).run(module)
    assert num_sampled.tolist() == [2] * 16
    assert tokens[:, 0].tolist() == [1] * 16
    assert torch.equal(tokens[:, 1:2].cpu(), expected)
    assert 1 in expected


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("with_q", "reduced"),
    [
        pytest.param(False, False, id="greedy"),
        pytest.param(True, False, id="gumbel"),
        pytest.param(True, True, id="reduced"),
    ],
)
@pytest.mark.parametrize("filtered", [False, True])
def test_triton_equals_twin(with_q: bool, reduced: bool, filtered: bool, device: str) -> None:
    case = mixed_case(1100, torch.float32, with_q, reduced, filtered, seed=1)
    case = replace(case, synthetic_rates=torch.tensor([0.9, 0.6, 0.5, 0.1]))
    twin = case.run(rejection)
    ours = to_device(case, device).run(triton_rejection)
    for mine, theirs in zip(ours, twin, strict=True):
        assert torch.equal(mine.cpu(), theirs)
    assert len(set(twin[1].tolist())) >= 3
    standard = replace(case, synthetic_rates=None).run(rejection)
    assert not torch.equal(standard[0], twin[0])


@pytest.mark.parametrize("module", MODULES)
def test_a_bad_judged_row_still_ends_the_request(module: ModuleType, device: str) -> None:
    logits = torch.zeros(2, 3, 40)
    logits[0, 1, 5] = float("nan")
    case = make_case(logits, torch.ones(2, 2))
    case = replace(case, synthetic_rates=torch.ones(2))
    _, num_sampled, ok = to_device(case, device).run(module)
    assert (ok.tolist(), num_sampled.tolist()) == ([False, True], [0, 3])

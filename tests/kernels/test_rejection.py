"""The standard rejection rule: closed forms, edges, and Triton against the torch twin."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from specgen.kernels import rejection as triton_rejection
from specgen.kernels.reference import gumbel, rejection
from specgen.kernels.reference.logits import filter_thresholds
from specgen.kernels.streams import DRAFT

# In Triton's interpreter numpy warns about values that the kernels mask afterwards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MODULES = [pytest.param(rejection, id="reference"), pytest.param(triton_rejection, id="triton")]


@dataclass(frozen=True)
class Case:
    """The arguments of rejection_sample."""

    target_logits: Tensor
    draft_tokens: Tensor
    num_draft_tokens: Tensor
    draft_logits: Tensor | None
    slot_ids: Tensor
    draft_ids: Tensor | None
    temperature: Tensor
    seeds: Tensor
    first_positions: Tensor
    sample_index: Tensor
    thresholds: Tensor | None
    synthetic_rates: Tensor | None = None

    def run(self, module: ModuleType) -> tuple[Tensor, Tensor, Tensor]:
        result: tuple[Tensor, Tensor, Tensor] = module.rejection_sample(**vars(self))
        return result


def make_case(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    temperature: float = 1.0,
    seed: int = 0,
) -> Case:
    batch, k = draft_tokens.shape
    device = target_logits.device
    zeros = torch.zeros(batch, dtype=torch.int32, device=device)
    rows = torch.arange(batch, device=device)
    return Case(
        target_logits=target_logits,
        draft_tokens=draft_tokens.to(torch.int32),
        num_draft_tokens=zeros + k,
        draft_logits=draft_logits,
        slot_ids=rows.to(torch.int32),
        draft_ids=None,
        temperature=torch.full((batch,), temperature, device=device),
        seeds=rows * 77_777 + seed,
        first_positions=zeros + 20,
        sample_index=zeros,
        thresholds=None,
    )


def drafts_of(case_logits: Tensor, case: Case, target_ids: Tensor | None = None) -> Tensor:
    """Draw drafts from ``[B, k, Vd]`` logits as the drafter does."""
    tokens = []
    for i in range(case_logits.shape[1]):
        positions = (case.first_positions + i)[:, None]
        arguments = (case.temperature, case.seeds, positions, case.sample_index)
        drawn, ok = gumbel.gumbel_sample(
            case_logits[:, i : i + 1], *arguments, DRAFT, i, None, target_ids
        )
        assert bool(ok.all())
        tokens.append(drawn[:, 0])
    return torch.stack(tokens, 1)


P = [0.6, 0.2, 0.1, 0.1]
Q = [0.7, 0.2, 0.05, 0.05]


@pytest.mark.parametrize(
    ("drafts", "judged_with_q", "expected"),
    [
        ("argmax", False, 0.60),  # p(argmax q)
        ("sampled", True, 0.90),  # 1 - TV(p, q)
        ("sampled", False, 0.47),  # sum of p * q: a sampled draft judged as if it were greedy
    ],
)
def test_acceptance_has_its_closed_form(drafts: str, judged_with_q: bool, expected: float) -> None:
    num = 200_000
    p = torch.tensor(P).log().expand(num, 2, 4)
    q = torch.tensor(Q).log().expand(num, 1, 4).contiguous()
    case = make_case(p, torch.zeros(num, 1), q if judged_with_q else None)
    if drafts == "sampled":
        case = replace(case, draft_tokens=drafts_of(q, case))
    tokens, num_sampled, ok = case.run(rejection)
    assert bool(ok.all())
    rate = (num_sampled == 2).double().mean().item()
    assert rate == pytest.approx(expected, abs=4 * math.sqrt(0.25 / num))
    emitted = np.bincount(tokens[:, 0].numpy(), minlength=4) / num
    assert emitted == pytest.approx(P, abs=4 * math.sqrt(0.25 / num))


@pytest.mark.parametrize("module", MODULES)
def test_equal_distributions_accept_everything(module: ModuleType, device: str) -> None:
    logits = torch.randn(8, 4, 9, generator=torch.Generator().manual_seed(2))
    case = make_case(logits, torch.zeros(8, 3), logits[:, :3].contiguous())
    case = replace(case, draft_tokens=drafts_of(logits[:, :3], case))
    tokens, num_sampled, _ = to_device(case, device).run(module)
    assert num_sampled.tolist() == [4] * 8
    assert torch.equal(tokens[:, :3].cpu(), case.draft_tokens)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("with_q", [False, True])
def test_filtered_draft_is_never_accepted(module: ModuleType, with_q: bool, device: str) -> None:
    num = 12
    logits = torch.tensor([3.0, 2.9, 0.0, -1.0], device=device).expand(num, 2, 4)
    draft_logits = torch.tensor([0.0, 0.0, 1.0, 9.0], device=device).expand(num, 1, 4)
    drafts = torch.full((num, 1), 3, device=device)
    case = make_case(logits, drafts, draft_logits if with_q else None)
    case = replace(case, thresholds=torch.full((num, 2), 2.9, device=device))
    tokens, num_sampled, _ = case.run(module)
    assert num_sampled.tolist() == [1] * num
    assert set(tokens[:, 0].tolist()) == {0, 1}


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("with_q", [False, True])
def test_a_rejected_draft_is_not_emitted_in_its_place(
    module: ModuleType, with_q: bool, device: str
) -> None:
    num = 200 if module is rejection or device == "cuda" else 15
    logits = torch.zeros(num, 2, 3, device=device)
    draft_logits = torch.tensor([0.0, 5.0, 0.0], device=device).expand(num, 1, 3)
    drafts = torch.full((num, 1), 1, device=device)
    tokens, num_sampled, _ = make_case(logits, drafts, draft_logits if with_q else None).run(module)
    rejected = num_sampled == 1
    assert num // 3 < int(rejected.sum()) < num
    assert set(tokens[rejected][:, 0].tolist()) == {0, 2}


@pytest.mark.parametrize("module", MODULES)
def test_certain_draft_is_accepted_or_drawn_again(module: ModuleType, device: str) -> None:
    """Where only the draft has probability the residual is empty: the token still is the draft."""
    num = 6
    logits = torch.full((num, 2, 5), float("-inf"), device=device)
    logits[..., 2] = 1.0
    drafts = torch.full((num, 1), 2, device=device)
    tokens, num_sampled, ok = make_case(logits, drafts).run(module)
    assert bool(ok.all())
    assert tokens.tolist() == [[2, 2]] * num
    assert num_sampled.tolist() == [2] * num


@pytest.mark.parametrize("module", MODULES)
def test_empty_residual_falls_back_to_p(module: ModuleType, device: str) -> None:
    """A draft outside the kept set with q = p on the kept set leaves no weight at all."""
    logits = torch.tensor([1.0, 0.5, -20.0], device=device).expand(12, 2, 3)
    # q is above p on every kept token, and the draft (an id that q does not have) is rejected.
    draft_logits = torch.tensor([1.0, 0.5], device=device).expand(12, 1, 2)
    case = make_case(logits, torch.full((12, 1), 2, device=device), draft_logits)
    case = replace(
        case,
        draft_ids=torch.tensor([0, 1, -1], dtype=torch.int32, device=device),
        thresholds=torch.full((12, 2), 0.5, device=device),
    )
    tokens, num_sampled, ok = case.run(module)
    assert bool(ok.all())
    assert num_sampled.tolist() == [1] * 12
    assert set(tokens[:, 0].tolist()) == {0, 1}


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("with_q", [False, True])
def test_temperature_zero_follows_the_argmax(module: ModuleType, with_q: bool, device: str) -> None:
    # Row 0 of every request has a tie: only the lowest id is its argmax.
    logits = torch.zeros(4, 3, 6, device=device)
    logits[:, 0, [2, 4]] = 3.0
    logits[:, 1, 5] = 1.0
    logits[:, 2, 0] = 1.0
    drafts = torch.tensor([[2, 5], [4, 5], [2, 4], [0, 0]], device=device)
    draft_logits = torch.zeros(4, 2, 6, device=device) if with_q else None
    tokens, num_sampled, _ = make_case(logits, drafts, draft_logits, temperature=0.0).run(module)
    assert tokens.tolist() == [[2, 5, 0], [2, -1, -1], [2, 5, -1], [2, -1, -1]]
    assert num_sampled.tolist() == [3, 1, 2, 1]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_rows_matter_only_where_judged(
    module: ModuleType, temperature: float, bad: float, device: str
) -> None:
    """Rows of logits: token 1 is certain, so drafts of 1 pass and drafts of 0 fail."""
    logits = torch.full((6, 3, 1100), -200.0, device=device)
    logits[..., 1] = 200.0
    drafts = torch.tensor([[1, 1], [1, 1], [0, 1], [1, 1], [1, 1], [1, 1]], device=device)
    logits[0, 0, 1099] = bad  # first row
    logits[1, 2, 7] = bad  # bonus row
    logits[2, 1, 7] = bad  # behind a rejection: never judged
    logits[3, 2, 7] = bad  # behind the row's last draft
    logits[4] = bad  # padding
    logits[5, 1] = float("-inf")
    case = make_case(logits, drafts, temperature=temperature)
    case = replace(
        case,
        num_draft_tokens=torch.tensor([2, 2, 2, 1, -1, 2], dtype=torch.int32, device=device),
    )
    tokens, num_sampled, ok = case.run(module)
    assert ok.tolist() == [False, False, True, True, True, False]
    assert num_sampled.tolist() == [0, 0, 1, 2, 0, 0]
    nothing = [-1, -1, -1]
    assert tokens.tolist() == [nothing, nothing, [1, -1, -1], [1, 1, -1], nothing, nothing]


@pytest.mark.parametrize("module", MODULES)
def test_without_drafts_it_is_a_draw_from_the_target(module: ModuleType, device: str) -> None:
    """d = 0, and k = 0, draw exactly what gumbel_sample draws at that position."""
    logits = torch.randn(8, 3, 40, generator=torch.Generator().manual_seed(5))
    case = make_case(logits, torch.zeros(8, 2))
    case = replace(case, num_draft_tokens=torch.zeros(8, dtype=torch.int32))
    arguments = (case.temperature, case.seeds, case.first_positions[:, None], case.sample_index)
    expected, _ = gumbel.gumbel_sample(logits[:, :1], *arguments, 2, 0, None, None)
    tokens, num_sampled, _ = to_device(case, device).run(module)
    assert torch.equal(tokens[:, :1].cpu(), expected)
    assert num_sampled.tolist() == [1] * 8
    short = replace(
        case,
        target_logits=logits[:, :1],
        draft_tokens=torch.zeros(8, 0, dtype=torch.int32),
        draft_logits=torch.zeros(8, 2, 40),
    )
    tokens, num_sampled, _ = to_device(short, device).run(module)
    assert torch.equal(tokens.cpu(), expected)
    assert num_sampled.tolist() == [1] * 8


def to_device(case: Case, device: str) -> Case:
    moved = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in vars(case).items()
    }
    return Case(**moved)


def mixed_case(
    vocab_size: int, dtype: torch.dtype, with_q: bool, reduced: bool, filtered: bool, seed: int
) -> Case:
    """Rows of every sort in one batch: padding, fewer drafts, greedy, bad rows, shuffled slots."""
    generator = torch.Generator().manual_seed(vocab_size + seed)
    batch, k, num_slots = 7, 3, 11
    draft_vocab = max(vocab_size // 2, 1) if reduced else vocab_size
    target_ids = torch.arange(vocab_size)
    if reduced:
        target_ids = torch.randperm(vocab_size, generator=generator)[:draft_vocab].sort().values
    draft_ids = torch.full((vocab_size,), -1, dtype=torch.int32)
    draft_ids[target_ids] = torch.arange(draft_vocab, dtype=torch.int32)
    slots = torch.tensor([10, 3, 0, -1, 7, 2, 9])
    all_draft_logits = 3 * torch.randn(num_slots, k + 2, draft_vocab, generator=generator)
    all_draft_logits = all_draft_logits.to(dtype)
    own = all_draft_logits[slots.clamp(min=0), :k]
    target = 0.5 * torch.randn(batch, k + 1, vocab_size, generator=generator)
    target[:, :k, target_ids] += own.float()
    target[5, 2, vocab_size - 1] = float("nan")
    target[6, 1, ::2] = float("-inf")
    target = target.to(dtype)
    case = make_case(target, torch.zeros(batch, k), all_draft_logits, seed=seed)
    case = replace(
        case,
        slot_ids=slots.to(torch.int32),
        num_draft_tokens=torch.tensor([3, 3, 2, -1, 3, 3, 0], dtype=torch.int32),
        temperature=torch.tensor([1.0, 0.7, 1.3, 1.0, 0.0, 1.0, 0.2]),
        sample_index=torch.tensor([0, 1, 2, 0, 1, 2, 3], dtype=torch.int32),
        first_positions=torch.arange(batch, dtype=torch.int32) * 1000,
        draft_ids=draft_ids if reduced else None,
    )
    drafts = drafts_of(own.contiguous(), case, target_ids.to(torch.int32))
    thresholds = None
    if filtered:
        top_k = torch.tensor([0, 5, 40, 3, 2, 8, 3], dtype=torch.int32)
        top_p = torch.tensor([0.8, 1.0, 0.9, 1.0, 0.5, 1.0, 1.0])
        thresholds = filter_thresholds(target, case.temperature, top_k, top_p)
    if not with_q:
        case = replace(case, draft_logits=None)
        drafts[:, 0] = target[:, 0].float().nan_to_num().argmax(-1)  # so that some are accepted
    return replace(case, draft_tokens=drafts, thresholds=thresholds)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(5, torch.float32), (1100, torch.float32), (1100, torch.bfloat16)]
)
@pytest.mark.parametrize(
    ("with_q", "reduced"),
    [
        pytest.param(False, False, id="greedy"),
        pytest.param(True, False, id="gumbel"),
        pytest.param(True, True, id="reduced"),
    ],
)
@pytest.mark.parametrize("filtered", [False, True])
def test_triton_equals_twin(
    vocab_size: int, dtype: torch.dtype, with_q: bool, reduced: bool, filtered: bool, device: str
) -> None:
    case = mixed_case(vocab_size, dtype, with_q, reduced, filtered, seed=0)
    twin = case.run(rejection)
    ours = to_device(case, device).run(triton_rejection)
    for mine, theirs in zip(ours, twin, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.cpu(), theirs)
    # A padding, a bad row, rejections and acceptances all occurred.
    assert len(set(twin[1].tolist())) >= 3


def test_signatures_equal() -> None:
    ours, twin = triton_rejection.rejection_sample, rejection.rejection_sample
    assert inspect.signature(ours) == inspect.signature(twin)

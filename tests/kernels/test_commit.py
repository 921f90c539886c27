"""The end of a step against the rules in plain Python."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specgen.kernels import commit as triton_commit
from specgen.kernels.batch_types import FINISH_ERROR, FINISH_LENGTH, FINISH_STOP, RUNNING
from specgen.kernels.reference import commit as reference_commit

MODULES = [pytest.param(reference_commit, id="reference"), pytest.param(triton_commit, id="triton")]
MODULE_OF = {"reference": reference_commit, "triton": triton_commit}


def expected_row(
    tokens: list[int], stops: list[int], seq_len: int, max_len: int
) -> tuple[list[int], int]:
    """What a live row commits, token by token, and why it ends."""
    kept: list[int] = []
    for token in tokens:
        if seq_len + len(kept) >= max_len:
            return kept, FINISH_LENGTH
        kept.append(token)
        if token in stops:
            return kept, FINISH_STOP
    return kept, FINISH_LENGTH if seq_len + len(kept) >= max_len else RUNNING


def run(module: ModuleType, device: str, case: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    arguments = {name: tensor.to(device, copy=True) for name, tensor in case.items()}
    result = module.commit_tokens(**arguments)
    changed = {name: arguments[name].cpu() for name in ("seq_lens", "last_tokens", "active")}
    for name, tensor in case.items():
        if name not in changed:
            assert torch.equal(arguments[name].cpu(), tensor), name
    return {**{name: tensor.cpu() for name, tensor in result._asdict().items()}, **changed}


def check(module: ModuleType, device: str, case: dict[str, torch.Tensor]) -> None:
    out = run(module, device, case)
    seq_lens, last_tokens = case["seq_lens"].clone(), case["last_tokens"].clone()
    active = case["active"].clone()
    for row, slot in enumerate(case["slot_ids"].tolist()):
        committed: list[int] = []
        finish = RUNNING
        takes_part = slot >= 0 and bool(active[slot]) and case["num_draft_tokens"][row] >= 0
        count = int(case["num_sampled"][row])
        if takes_part and not case["ok"][row]:
            finish = FINISH_ERROR
        elif takes_part and count > 0:
            committed, finish = expected_row(
                case["tokens"][row, :count].tolist(),
                [stop for stop in case["stop_ids"][slot].tolist() if stop >= 0],
                int(seq_lens[slot]),
                int(case["max_lens"][slot]),
            )
        assert out["num_committed"][row] == len(committed), row
        assert out["finish"][row] == finish, row
        if committed:
            seq_lens[slot] += len(committed)
            last_tokens[slot] = committed[-1]
        if finish != RUNNING:
            active[slot] = False
    assert torch.equal(out["seq_lens"], seq_lens)
    assert torch.equal(out["last_tokens"], last_tokens)
    assert torch.equal(out["active"], active)
    assert out["num_committed"].dtype == out["finish"].dtype == torch.int32
    names = ("num_sampled", "num_draft_tokens")
    columns = (*(case[name] for name in names), out["num_committed"], out["finish"])
    record = torch.cat((case["tokens"], torch.stack(columns, dim=1)), dim=1)
    assert torch.equal(out["record"], record)
    assert out["record"].dtype == torch.int32


@st.composite
def cases(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """A batch over a vocabulary so small that stops, caps and both at once are common."""
    num_slots = draw(st.integers(1, 5))
    k = draw(st.integers(0, 4))
    num_stops = draw(st.integers(0, 3))
    order = draw(st.permutations(range(num_slots)))
    slots = [slot if draw(st.booleans()) else -1 for slot in order] + [-1]
    rows = range(len(slots))
    seq_lens = [draw(st.integers(1, 20)) for _ in range(num_slots)]
    tokens, num_sampled = [], []
    for _ in rows:
        count = draw(st.integers(0, k + 1))
        num_sampled.append(count)
        tokens.append([draw(st.integers(0, 5)) for _ in range(count)] + [-1] * (k + 1 - count))

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return {
        "slot_ids": ints(slots),
        "tokens": ints(tokens),
        "num_sampled": ints(num_sampled),
        "ok": torch.tensor([draw(st.integers(0, 4)) > 0 for _ in rows]),
        "num_draft_tokens": ints([draw(st.sampled_from([-1, k, k, k])) for _ in rows]),
        "stop_ids": ints(
            [[draw(st.integers(-1, 5)) for _ in range(num_stops)] for _ in range(num_slots)]
        ).view(num_slots, num_stops),
        "max_lens": ints([length + draw(st.integers(0, 6)) for length in seq_lens]),
        "seq_lens": ints(seq_lens),
        "last_tokens": ints([draw(st.integers(0, 5)) for _ in range(num_slots)]),
        "active": torch.tensor([draw(st.integers(0, 3)) > 0 for _ in range(num_slots)]),
    }


@pytest.mark.parametrize("name", list(MODULE_OF))
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases())
@pytest.mark.usefixtures("poison")
def test_equals_the_rules(name: str, device: str, case: dict[str, torch.Tensor]) -> None:
    check(MODULE_OF[name], device, case)


def one_row(
    tokens: list[int],
    *,
    stops: list[int],
    seq_len: int = 10,
    max_len: int = 100,
    ok: bool = True,
    active: bool = True,
) -> dict[str, torch.Tensor]:
    return {
        "slot_ids": torch.tensor([1], dtype=torch.int32),
        "tokens": torch.tensor([tokens], dtype=torch.int32),
        "num_sampled": torch.tensor([sum(t >= 0 for t in tokens)], dtype=torch.int32),
        "ok": torch.tensor([ok]),
        "num_draft_tokens": torch.tensor([len(tokens) - 1], dtype=torch.int32),
        "stop_ids": torch.tensor([[-1] * len(stops), stops], dtype=torch.int32),
        "max_lens": torch.tensor([0, max_len], dtype=torch.int32),
        "seq_lens": torch.tensor([3, seq_len], dtype=torch.int32),
        "last_tokens": torch.tensor([7, 8], dtype=torch.int32),
        "active": torch.tensor([True, active]),
    }


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("case", "committed", "finish", "last"),
    [
        pytest.param(one_row([4, 5, 6], stops=[9]), 3, RUNNING, 6, id="goes on"),
        pytest.param(one_row([4, 5, -1], stops=[9]), 2, RUNNING, 5, id="a draft was rejected"),
        pytest.param(one_row([4, 9, 9], stops=[3, 9]), 2, FINISH_STOP, 9, id="first stop wins"),
        pytest.param(
            one_row([4, 5, 6], stops=[9], max_len=12), 2, FINISH_LENGTH, 5, id="cut at the cap"
        ),
        pytest.param(
            one_row([4, 5, 6], stops=[9], max_len=13), 3, FINISH_LENGTH, 6, id="just at the cap"
        ),
        pytest.param(
            one_row([4, 9, 6], stops=[9], max_len=12), 2, FINISH_STOP, 9, id="stop on last place"
        ),
        pytest.param(
            one_row([4, 5, 9], stops=[9], max_len=12), 2, FINISH_LENGTH, 5, id="stop past the cap"
        ),
        pytest.param(
            one_row([4, 5], stops=[9], max_len=10), 0, FINISH_LENGTH, 8, id="no room at all"
        ),
        pytest.param(one_row([4, 5], stops=[]), 2, RUNNING, 5, id="no stop tokens"),
        pytest.param(one_row([4, -1], stops=[-1]), 1, RUNNING, 4, id="padding is no stop"),
        pytest.param(one_row([-1, -1], stops=[9], ok=False), 0, FINISH_ERROR, 8, id="bad logits"),
        pytest.param(one_row([-1, -1], stops=[9]), 0, RUNNING, 8, id="inert"),
        pytest.param(one_row([4, 9], stops=[9], active=False), 0, RUNNING, 8, id="ended before"),
        pytest.param(
            one_row([-1, -1], stops=[9], ok=False, active=False), 0, RUNNING, 8, id="no new error"
        ),
    ],
)
@pytest.mark.usefixtures("poison")
def test_rules_by_example(
    module: ModuleType,
    device: str,
    case: dict[str, torch.Tensor],
    committed: int,
    finish: int,
    last: int,
) -> None:
    out = run(module, device, case)
    assert out["num_committed"].tolist() == [committed]
    assert out["finish"].tolist() == [finish]
    assert out["seq_lens"].tolist() == [3, int(case["seq_lens"][1]) + committed]
    assert out["last_tokens"].tolist() == [7, last]
    still_active = bool(case["active"][1]) and finish == RUNNING
    assert out["active"].tolist() == [True, still_active]


@pytest.mark.parametrize("module", MODULES)
def test_padding_rows_do_not_disturb_slot_zero(module: ModuleType, device: str) -> None:
    """A careless clamp of -1 would let padding rows write slot 0 beside its real row."""
    case = one_row([4, 5], stops=[9])
    case["slot_ids"] = torch.tensor([-1, 0, -1, -1], dtype=torch.int32)
    case["tokens"] = torch.tensor([[1, 2], [4, 5], [6, 9], [-1, -1]], dtype=torch.int32)
    case["num_sampled"] = torch.tensor([2, 2, 2, 0], dtype=torch.int32)
    case["ok"] = torch.tensor([True, True, True, False])
    case["num_draft_tokens"] = torch.ones(4, dtype=torch.int32)
    case["max_lens"] = torch.tensor([50, 50], dtype=torch.int32)
    out = run(module, device, case)
    assert out["num_committed"].tolist() == [0, 2, 0, 0]
    assert out["finish"].tolist() == [0, 0, 0, 0]
    assert out["seq_lens"].tolist() == [5, 10]
    assert out["last_tokens"].tolist() == [5, 8]
    assert out["active"].tolist() == [True, True]


def drafts_left(
    case: dict[str, torch.Tensor], position_limit: int | None
) -> tuple[list[list[int]], list[int]]:
    """What `commit_drafts` leaves in the rows, slot by slot."""
    tokens, counts = case["draft_tokens"].tolist(), case["num_draft_tokens"].tolist()
    k = case["tokens"].shape[0]
    for row, slot in enumerate(case["slot_ids"].tolist()):
        if slot < 0:
            continue
        count = 0
        while count < k and case["ok"][count, row]:
            n = int(case["seq_lens"][slot])
            if position_limit is not None and n - 2 + count >= position_limit:
                break
            count += 1
        limit = int(case["draft_limits"][slot])
        counts[slot] = min(count, limit) if case["active"][slot] else 0
        for j in range(k):
            tokens[slot][j] = int(case["tokens"][j, row]) if case["ok"][j, row] else 0
    return tokens, counts


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("position_limit", [None, 12])
@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_drafts_are_written_to_their_rows(
    module: ModuleType, device: str, k: int, position_limit: int | None
) -> None:
    g = torch.Generator().manual_seed(k)
    num_slots = 9
    slot_ids = torch.tensor([4, -1, 0, 7, 2, -1, 8, 1], dtype=torch.int32)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g).int()

    case = {
        "slot_ids": slot_ids,
        "tokens": ints(1, 100, k, len(slot_ids)),
        "ok": torch.rand(k, len(slot_ids), generator=g) < 0.8,
        "seq_lens": ints(8, 16, num_slots),
        "active": torch.rand(num_slots, generator=g) < 0.8,
        "draft_limits": ints(0, k + 1, num_slots),
        "draft_tokens": ints(100, 200, num_slots, 6),
        "num_draft_tokens": ints(0, 6, num_slots),
    }
    tokens, counts = drafts_left(case, position_limit)
    arguments = {name: tensor.to(device, copy=True) for name, tensor in case.items()}
    module.commit_drafts(**arguments, position_limit=position_limit)
    assert arguments["draft_tokens"].tolist() == tokens
    assert arguments["num_draft_tokens"].tolist() == counts
    for name in set(case) - {"draft_tokens", "num_draft_tokens"}:
        assert torch.equal(arguments[name].cpu(), case[name]), name


@pytest.mark.parametrize("name", ["commit_tokens", "commit_drafts"])
def test_signatures_match(name: str) -> None:
    assert inspect.signature(getattr(triton_commit, name)) == inspect.signature(
        getattr(reference_commit, name)
    )

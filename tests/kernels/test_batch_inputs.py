"""The batch kernels against a model in plain Python, row by row."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch

from specgen.kernels import batch_inputs as triton_batch_inputs
from specgen.kernels.reference import batch_inputs as reference_batch_inputs

MODULES = [
    pytest.param(reference_batch_inputs, id="reference"),
    pytest.param(triton_batch_inputs, id="triton"),
]
NUM_SLOTS, COLUMNS, BLOCK_SIZE = 7, 3, 4  # a row's table covers 12 positions


def i32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    """Persistent rows: 2 is inactive, 3 and 5 leave their tables, 6 has no blocks."""
    g = torch.Generator().manual_seed(1)
    tables = torch.randperm(NUM_SLOTS * COLUMNS, generator=g).view(NUM_SLOTS, COLUMNS).int()
    tables[6] = -1
    tables[4, 2] = -1  # granted two blocks only
    return {
        "last_tokens": torch.randint(100, 200, (NUM_SLOTS,), generator=g).int(),
        "draft_tokens": torch.randint(200, 300, (NUM_SLOTS, 4), generator=g).int(),
        "num_draft_tokens": i32(3, 0, 2, 4, 1, 4, 2),
        "seq_lens": i32(4, 1, 6, 11, 8, 11, 3),
        "active": torch.tensor([True, True, False, True, True, True, True]),
        "block_tables": tables,
    }


SLOT_IDS = i32(3, -1, 0, 2, 5, 1, -1, 4, 6)
TIMED_SLOT_IDS = i32(-2, -1, 3, -70, 2)


def token_slot(tables: torch.Tensor, slot: int, position: int) -> int:
    column, offset = divmod(position, BLOCK_SIZE)
    if position < 0 or column >= COLUMNS or tables[slot, column] < 0:
        return -1
    return int(tables[slot, column]) * BLOCK_SIZE + offset


def is_live(state: dict[str, torch.Tensor], slot: int) -> bool:
    return slot >= 0 and bool(state["active"][slot])


def check(result: Any, expected: dict[str, Any], wide: tuple[str, ...]) -> None:
    assert set(result._fields) == set(expected)
    for name, values in expected.items():
        dtype = torch.int64 if name in wide else torch.int32
        shape = getattr(result, name).shape
        torch.testing.assert_close(
            getattr(result, name).cpu(), torch.tensor(values, dtype=dtype).view(shape), msg=name
        )


def expected_decode(state: dict[str, torch.Tensor], k: int) -> dict[str, Any]:
    out: dict[str, Any] = {
        name: []
        for name in (
            "input_ids",
            "positions",
            "slot_mapping",
            "first_positions",
            "context_lens",
            "draft_tokens",
            "num_draft_tokens",
        )
    }
    for slot in SLOT_IDS.tolist():
        if not is_live(state, slot):
            out["input_ids"].append([0] * (k + 1))
            out["positions"].append([0] * (k + 1))
            out["slot_mapping"].append([-1] * (k + 1))
            out["first_positions"].append(0)
            out["context_lens"].append(0)
            out["draft_tokens"].append([0] * k)
            out["num_draft_tokens"].append(-1)
            continue
        n, d = int(state["seq_lens"][slot]), min(int(state["num_draft_tokens"][slot]), k)
        drafts = state["draft_tokens"][slot, :d].tolist() + [0] * (k - d)
        out["input_ids"].append([int(state["last_tokens"][slot]), *drafts])
        out["positions"].append([n - 1 + i for i in range(k + 1)])
        out["slot_mapping"].append(
            [
                token_slot(state["block_tables"], slot, n - 1 + i) if i <= d else -1
                for i in range(k + 1)
            ]
        )
        out["first_positions"].append(n - 1)
        out["context_lens"].append(n + d)
        out["draft_tokens"].append(drafts)
        out["num_draft_tokens"].append(d)
    return out


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("k", [0, 1, 3, 4])
@pytest.mark.usefixtures("poison")
def test_decode_inputs(
    module: ModuleType, device: str, state: dict[str, torch.Tensor], k: int
) -> None:
    arguments = {name: tensor.to(device) for name, tensor in state.items()}
    before = {name: tensor.clone() for name, tensor in arguments.items()}
    result = module.decode_inputs(SLOT_IDS.to(device), **arguments, k=k, block_size=BLOCK_SIZE)
    check(result, expected_decode(state, k), wide=("slot_mapping",))
    for name, tensor in before.items():
        assert torch.equal(arguments[name], tensor), name


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("k", [0, 3])
def test_inert_rows_that_are_timed_run_over_tokens_of_their_own(
    module: ModuleType, device: str, state: dict[str, torch.Tensor], k: int
) -> None:
    """And differ from padding in nothing else."""
    arguments = {name: tensor.to(device) for name, tensor in state.items()}

    def inputs(slot_ids: torch.Tensor) -> Any:
        return module.decode_inputs(slot_ids.to(device), **arguments, k=k, block_size=BLOCK_SIZE)

    timed, padding = inputs(TIMED_SLOT_IDS), inputs(TIMED_SLOT_IDS.clamp(min=-1))
    tokens = timed.input_ids.cpu()
    assert tokens[0].tolist() == list(range(1, k + 2))
    assert tokens[3].tolist() == list(range(69, k + 70))
    assert torch.equal(tokens[[1, 2, 4]], padding.input_ids.cpu()[[1, 2, 4]])
    for name in set(timed._fields) - {"input_ids"}:
        assert torch.equal(getattr(timed, name), getattr(padding, name)), name


@pytest.mark.parametrize("module", MODULES)
def test_more_drafts_wanted_than_rows_hold(
    module: ModuleType, device: str, state: dict[str, torch.Tensor]
) -> None:
    state["num_draft_tokens"][:] = 9  # a count left by a step with a larger k
    arguments = {name: tensor.to(device) for name, tensor in state.items()}
    result = module.decode_inputs(SLOT_IDS.to(device), **arguments, k=6, block_size=BLOCK_SIZE)
    assert result.num_draft_tokens.tolist() == [4, -1, 4, -1, 4, 4, -1, 4, 4]
    assert not result.draft_tokens[:, 4:].any()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("k", [0, 2, 3])
@pytest.mark.usefixtures("poison")
def test_extend_inputs(
    module: ModuleType, device: str, state: dict[str, torch.Tensor], k: int
) -> None:
    batch = SLOT_IDS.numel()
    tokens = torch.randint(1, 99, (batch, k + 1), dtype=torch.int32)
    committed = (torch.arange(batch) % (k + 2)).int()  # 0 .. k+1
    firsts = i32(0, 3, 9, 5, 10, 0, 2, 7, 1)
    expected: dict[str, Any] = {
        name: []
        for name in (
            "input_ids",
            "slot_mapping",
            "context_lens",
            "last_idx",
            "last_positions",
            "next_positions",
        )
    }
    for row, slot in enumerate(SLOT_IDS.tolist()):
        c = int(committed[row]) if is_live(state, slot) else 0
        first = int(firsts[row])
        expected["input_ids"].append(tokens[row, :c].tolist() + [0] * (k + 1 - c))
        expected["slot_mapping"].append(
            [token_slot(state["block_tables"], slot, first + i) for i in range(c)]
            + [-1] * (k + 1 - c)
        )
        expected["context_lens"].append(first + c if c else 0)
        expected["last_idx"].append(row * (k + 1) + max(c - 1, 0))
        expected["last_positions"].append(first + c - 1 if c else 0)
        expected["next_positions"].append(first + 1 + c if c else -1)
    result = module.extend_inputs(
        SLOT_IDS.to(device),
        tokens.to(device),
        committed.to(device),
        firsts.to(device),
        state["active"].to(device),
        state["block_tables"].to(device),
        BLOCK_SIZE,
    )
    check(result, expected, wide=("slot_mapping", "last_idx"))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("step", [0, 1, 2, 4])
@pytest.mark.usefixtures("poison")
def test_draft_inputs(
    module: ModuleType, device: str, state: dict[str, torch.Tensor], step: int
) -> None:
    expected: dict[str, Any] = {
        name: [] for name in ("positions", "slot_mapping", "context_lens", "next_positions")
    }
    for slot in SLOT_IDS.tolist():
        if not is_live(state, slot):
            expected["positions"].append(0)
            expected["slot_mapping"].append(-1)
            expected["context_lens"].append(0)
            expected["next_positions"].append(-1)
            continue
        n = int(state["seq_lens"][slot])
        expected["next_positions"].append(n + step)
        expected["positions"].append(n - 2 + step)
        expected["slot_mapping"].append(token_slot(state["block_tables"], slot, n - 2 + step))
        expected["context_lens"].append(n - 1 + step)
    result = module.draft_inputs(
        SLOT_IDS.to(device),
        state["seq_lens"].to(device),
        state["active"].to(device),
        state["block_tables"].to(device),
        step,
        BLOCK_SIZE,
    )
    check(result, expected, wide=("slot_mapping",))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("batch", [0, 1, 9, 131])
@pytest.mark.usefixtures("poison")
def test_sampling_rows(module: ModuleType, device: str, batch: int) -> None:
    g = torch.Generator().manual_seed(batch)
    slot_ids = torch.randint(-1, NUM_SLOTS, (batch,), generator=g).int()
    state = (
        torch.rand(NUM_SLOTS, generator=g),
        torch.randint(-(1 << 62), 1 << 62, (NUM_SLOTS,), generator=g),
        torch.randint(0, 99, (NUM_SLOTS,), generator=g).int(),
        torch.randint(1, 99, (NUM_SLOTS,), generator=g).int(),
    )
    result = module.sampling_rows(slot_ids.to(device), *(tensor.to(device) for tensor in state))
    assert result._fields == ("temperature", "seeds", "sample_index", "seq_lens")
    for got, source in zip(result, state, strict=True):
        assert got.dtype == source.dtype
        wanted = [source[slot].item() if slot >= 0 else 0 for slot in slot_ids.tolist()]
        assert got.tolist() == wanted


@pytest.mark.parametrize(
    "name", ["decode_inputs", "extend_inputs", "draft_inputs", "sampling_rows"]
)
def test_signatures_match(name: str) -> None:
    assert inspect.signature(getattr(triton_batch_inputs, name)) == inspect.signature(
        getattr(reference_batch_inputs, name)
    )

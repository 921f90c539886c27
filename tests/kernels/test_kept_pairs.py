"""Pairs that rows keep, against plain Python: places, rows that ended, slots of others, padding."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch

from specgen.kernels import kept_pairs as triton_kept
from specgen.kernels.batch_types import KeptPairs
from specgen.kernels.reference import kept_pairs as reference_kept

MODULES = [pytest.param(reference_kept, id="reference"), pytest.param(triton_kept, id="triton")]
SLOTS, PLACES, BLOCK_SIZE, COLUMNS = 6, 4, 4, 5


def empty(size: int, dtype: torch.dtype, device: str) -> KeptPairs:
    return KeptPairs(
        torch.full((SLOTS, PLACES, size), float("nan"), dtype=dtype, device=device),
        torch.full((SLOTS, PLACES), -7, dtype=torch.int32, device=device),
        torch.full((SLOTS, PLACES), -1, dtype=torch.int32, device=device),
    )


def ints(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 24, 2049])
@pytest.mark.usefixtures("poison")
def test_what_is_kept_is_taken_with_its_place_in_the_cache(
    module: ModuleType, device: str, size: int, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(size)
    kept = empty(size, dtype, device)
    active = torch.tensor([True, True, False, True, True, True], device=device)
    tables = torch.arange(SLOTS * COLUMNS, dtype=torch.int32).view(SLOTS, COLUMNS).flip(0)
    tables[5, 1] = -1  # no block there
    tables = tables.to(device)
    # Slot 2 has ended; -1 and -9 are padding; 5 ends its table at position 4, 3 goes past it.
    slots = [4, -1, 0, 2, 5, 3, -9]
    wanted: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
    for step in range(3):
        positions = [7 + step, 0, 2 + step, 5 + step, 3 + step, 19 + step, 0]
        tokens = [10 * step + i for i in range(len(slots))]
        features = torch.randn((len(slots), size), generator=g).to(dtype)
        module.keep_pairs(
            ints(slots, device),
            ints(tokens, device),
            ints(positions, device),
            active,
            features.to(device),
            kept,
        )
        for i, slot in enumerate(slots):
            if slot in (0, 3, 4, 5):
                wanted[slot, positions[i]] = tokens[i], features[i]
    asked = [5, 0, -1, 2, 4, 1, -9, 3]
    taken = module.take_pairs(ints(asked, device), active, tables, kept, BLOCK_SIZE)
    assert taken.features.shape == (len(asked) * PLACES, size)
    assert not taken.features.isnan().any(), "what is no pair is zero"
    found = {}
    for at in range(len(asked) * PLACES):
        slot, position = asked[at // PLACES], int(taken.positions[at])
        target = int(taken.slot_mapping[at])
        if target >= 0:
            assert position % PLACES == at % PLACES
            block = int(tables[slot, position // BLOCK_SIZE])
            assert target == block * BLOCK_SIZE + position % BLOCK_SIZE
            found[slot, position] = int(taken.tokens[at]), taken.features[at].cpu()
    # No block for 4 and 5 of slot 5, nor for 20 and 21 of slot 3.
    missing = {(5, 4), (5, 5), (3, 20), (3, 21)}
    assert found.keys() == wanted.keys() - missing
    for key, (token, feature) in found.items():
        assert token == wanted[key][0]
        torch.testing.assert_close(feature, wanted[key][1], rtol=0, atol=0)


@pytest.mark.parametrize("module", MODULES)
def test_a_row_that_ended_gives_nothing_and_a_batch_may_be_empty(
    module: ModuleType, device: str
) -> None:
    kept = empty(8, torch.float32, device)
    active = torch.ones(SLOTS, dtype=torch.bool, device=device)
    tables = torch.zeros((SLOTS, COLUMNS), dtype=torch.int32, device=device)
    one, features = ints([3], device), torch.ones((1, 8), device=device)
    module.keep_pairs(one, one, one, active, features, kept)
    assert module.take_pairs(one, active, tables, kept, BLOCK_SIZE).slot_mapping.max() >= 0
    active[3] = False
    assert module.take_pairs(one, active, tables, kept, BLOCK_SIZE).slot_mapping.max() == -1
    module.keep_pairs(one[:0], one[:0], one[:0], active, features[:0], kept)
    assert len(module.take_pairs(one[:0], active, tables, kept, BLOCK_SIZE).tokens) == 0


@pytest.mark.parametrize("name", ["keep_pairs", "take_pairs"])
def test_signatures_match(name: str) -> None:
    assert inspect.signature(getattr(triton_kept, name)) == inspect.signature(
        getattr(reference_kept, name)
    )

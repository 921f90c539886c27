from __future__ import annotations

import random

import pytest

from specgen.pipeline.block_manager import BlockManager


def test_grow_takes_only_what_is_missing() -> None:
    manager = BlockManager(num_blocks=4, block_size=16)
    held: list[int] = []
    assert manager.grow(held, 17)
    assert len(held) == 2
    assert manager.grow(held, 32)
    assert len(held) == 2
    assert manager.num_free == 2


def test_a_failed_grow_changes_nothing() -> None:
    manager = BlockManager(num_blocks=2, block_size=4)
    held: list[int] = []
    assert manager.grow(held, 5)
    assert not manager.grow(held, 9)
    assert len(held) == 2
    assert manager.num_free == 0


def test_blocks_stay_a_partition_under_random_use() -> None:
    rng = random.Random(0)
    manager = BlockManager(num_blocks=23, block_size=4)
    rows: list[list[int]] = [[] for _ in range(6)]
    for _ in range(500):
        row = rng.choice(rows)
        if rng.random() < 0.3:
            manager.release(row)
        else:
            manager.grow(row, rng.randint(1, 40))
        manager.check(rows)


def test_check_notices_a_block_held_twice() -> None:
    manager = BlockManager(num_blocks=2, block_size=4)
    held: list[int] = []
    manager.grow(held, 4)
    with pytest.raises(AssertionError, match="held twice"):
        manager.check([held, held])

"""Shared beginnings of prompts: which blocks are shared, and how long they live."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.pipeline.block_manager import BlockManager, prefix_keys

BLOCK = 4


def admit(manager: BlockManager, tokens: tuple[int, ...]) -> tuple[list[int], int]:
    """Give a prompt its blocks as the scheduler does; returns them and how many were shared."""
    keys = prefix_keys(tokens, BLOCK)
    blocks = manager.match(keys)
    num_shared = len(blocks)
    assert manager.grow(blocks, len(tokens))
    manager.publish(blocks, keys, len(tokens))
    return blocks, num_shared


def test_a_block_is_shared_only_if_the_token_after_it_is_the_same() -> None:
    same = prefix_keys((1, 2, 3, 4, 5, 6), BLOCK)
    assert prefix_keys((1, 2, 3, 4, 5, 9), BLOCK) == same
    assert prefix_keys((1, 2, 3, 4, 9, 6), BLOCK) != same


@given(st.lists(st.integers(0, 1), min_size=1, max_size=24), st.integers(0, 23))
@settings(max_examples=200, deadline=None)
def test_keys_cover_everything_before_them(tokens: list[int], at: int) -> None:
    keys = prefix_keys(tokens, BLOCK)
    # The last token always stays to be computed: its logits are needed.
    assert len(keys) == (len(tokens) - 1) // BLOCK
    changed = list(tokens)
    changed[at % len(tokens)] ^= 1
    for index, (key, other) in enumerate(zip(keys, prefix_keys(changed, BLOCK), strict=True)):
        assert (key == other) == (at % len(tokens) > (index + 1) * BLOCK)


def test_equal_prompts_share_all_but_the_end() -> None:
    manager = BlockManager(16, BLOCK)
    prompt = tuple(range(9))
    first, _ = admit(manager, prompt)
    second, num_shared = admit(manager, prompt)
    assert num_shared == 2
    assert second[:2] == first[:2]
    assert second[2] != first[2]
    manager.check([first, second])


def test_nothing_is_shared_before_it_is_computed() -> None:
    manager = BlockManager(16, BLOCK)
    prompt = tuple(range(13))
    keys = prefix_keys(prompt, BLOCK)
    blocks: list[int] = []
    manager.grow(blocks, len(prompt))
    manager.publish(blocks, keys, 6)  # a chunk that ends inside the second block
    assert manager.match(keys) == blocks[:1]


def test_blocks_outlive_their_row_until_their_room_is_needed() -> None:
    manager = BlockManager(3, BLOCK)
    prompt = tuple(range(9))
    blocks, _ = admit(manager, prompt)
    manager.release(blocks)
    assert manager.num_free == 3
    again, num_shared = admit(manager, prompt)
    assert num_shared == 2
    manager.release(again)
    other, _ = admit(manager, tuple(range(100, 112)))
    assert len(other) == 3
    manager.release(other)
    _, num_shared = admit(manager, prompt)
    assert num_shared == 0


def test_the_end_of_a_prompt_is_given_up_before_its_beginning() -> None:
    manager = BlockManager(3, BLOCK)
    prompt = tuple(range(13))  # three blocks can be shared, a fourth is never cached here
    keys = prefix_keys(prompt, BLOCK)
    blocks: list[int] = []
    manager.grow(blocks, 12)
    manager.publish(blocks, keys, 12)
    manager.release(blocks)
    taken: list[int] = []
    manager.grow(taken, 4)
    assert len(manager.match(keys)) == 2


def test_a_failed_step_takes_back_what_it_promised() -> None:
    manager = BlockManager(8, BLOCK)
    blocks, _ = admit(manager, tuple(range(9)))
    manager.forget_prefixes()
    assert manager.match(prefix_keys(tuple(range(9)), BLOCK)) == []
    manager.release(blocks)
    manager.check([])
    assert manager.num_free == 8


@pytest.mark.parametrize("seed", range(6))
def test_the_cache_stays_accounted_for(seed: int) -> None:
    rng = random.Random(seed)
    manager = BlockManager(20, BLOCK)
    rows: list[list[int]] = []
    for _ in range(400):
        action = rng.random()
        if action < 0.45:
            tokens = tuple(rng.randint(0, 1) for _ in range(rng.randint(1, 20)))
            keys = prefix_keys(tokens, BLOCK)
            blocks = manager.match(keys)
            if manager.grow(blocks, len(tokens)):
                manager.publish(blocks, keys, rng.randint(0, len(tokens)))
                rows.append(blocks)
            else:
                manager.release(blocks)
        elif action < 0.6 and rows:
            row = rng.choice(rows)
            manager.grow(row, len(row) * BLOCK + rng.randint(0, 9))
        elif action < 0.99 and rows:
            manager.release(rows.pop(rng.randrange(len(rows))))
        else:
            manager.forget_prefixes()
        manager.check(rows)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_what_is_known_is_what_would_match(prompts: list[list[int]]) -> None:
    manager = BlockManager(200, BLOCK)
    for prompt in prompts:
        keys = prefix_keys(prompt, BLOCK)
        num_free = manager.num_free
        num_known = manager.num_known(keys)
        assert manager.num_free == num_free
        assert admit(manager, tuple(prompt))[1] == num_known

"""The common beginning of the rows of a batch, against a search through all of them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.pipeline import shared_prefix
from specgen.pipeline.shared_prefix import CommonPrefix, SharedRows, find_common_prefix

NOTHING = CommonPrefix((), ())


def test_one_system_prompt_and_strangers() -> None:
    prompt = [7, 3, 9, 4]
    rows = [[*prompt, 20], [1, 2], [*prompt, 21, 22], prompt, [7, 3, 5], [7, 3, 9, 4, 23]]
    assert find_common_prefix(rows) == CommonPrefix((7, 3, 9, 4), (0, 2, 3, 5))


def test_a_shorter_beginning_of_more_rows_may_save_more() -> None:
    rows = [[1, 2, 3, 4], [1, 2, 3, 5], *[[1, 10 + i] for i in range(9)]]
    assert find_common_prefix(rows) == CommonPrefix((1,), tuple(range(11)))
    deep = list(range(1, 30))
    rows = [[*deep, 50], [*deep, 51], *[[1, 60 + i] for i in range(9)]]
    assert find_common_prefix(rows) == CommonPrefix(tuple(deep), (0, 1))


def test_nothing_in_common() -> None:
    for rows in ([], [[]], [[], []], [[1, 2, 3]], [[1, 2], [3, 2], [4]]):
        assert find_common_prefix(rows) == NOTHING


def test_rows_that_are_one_another_beginning() -> None:
    rows = [[5], [5, 6], [5, 6, 7]]
    assert find_common_prefix(rows) == CommonPrefix((5,), (0, 1, 2))
    assert find_common_prefix([[5, 6], [5, 6]]) == CommonPrefix((5, 6), (0, 1))


# A trie: a row is a walk whose block ids tell the whole way to them, as those of shared blocks do.
walks = st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=12)


def as_blocks(walk: list[int]) -> list[int]:
    return [hash(tuple(walk[: end + 1])) for end in range(len(walk))]


@settings(max_examples=300, deadline=None)
@given(walks)
def test_what_is_found_is_common_and_the_best_of_the_widest_way(steps: list[list[int]]) -> None:
    rows = [as_blocks(walk) for walk in steps]
    found = find_common_prefix(rows)
    depth = len(found.block_ids)
    for row in range(len(rows)):
        begins_alike = depth > 0 and tuple(rows[row][:depth]) == found.block_ids
        assert begins_alike == (row in found.members)
    # Along the widest way, every depth by itself.
    best, prefix = 0, []
    for at in range(8):
        group = [r for r in rows if r[:at] == prefix and len(r) > at]
        if not group:
            break
        block, count = Counter(r[at] for r in group).most_common(1)[0]
        prefix = [*prefix, block]
        best = max(best, (at + 1) * (count - 1))
    assert found.num_saved_blocks == best


def make_row(slot: int, *block_ids: int) -> Any:
    return SimpleNamespace(slot=slot, block_ids=list(block_ids))


def make_shared(min_saved_tokens: int = 32) -> SharedRows:
    return SharedRows(
        max_num_seqs=6,
        max_blocks=5,
        block_size=16,
        device=torch.device("cpu"),
        min_saved_tokens=min_saved_tokens,
    )


def check_tensors(shared: SharedRows, block_ids: list[int], slots: set[int]) -> None:
    tensors = shared.tensors
    assert tensors.length.tolist() == [16 * len(block_ids)]
    assert tensors.block_ids[: len(block_ids)].tolist() == block_ids
    assert set(tensors.members.nonzero().flatten().tolist()) == slots
    assert tensors.members.shape == (7,)  # padding rows read the last one's flag, or none


def test_the_tensors_follow_the_rows_in_place() -> None:
    shared = make_shared()
    before = [tensor.data_ptr() for tensor in shared.tensors]
    rows = [make_row(4, 7, 8, 1), make_row(0, 7, 8, 2), make_row(2, 9)]
    assert shared.follow(rows)
    check_tensors(shared, [7, 8], {0, 4})
    rows.append(make_row(3, 7, 8, 3))
    assert shared.follow(rows)
    check_tensors(shared, [7, 8], {0, 3, 4})
    # The slot of a row that ended has a new owner, which shares nothing.
    assert shared.follow([rows[1], make_row(4, 5), rows[3]])
    check_tensors(shared, [7, 8], {0, 3})
    assert [tensor.data_ptr() for tensor in shared.tensors] == before


def test_rows_that_save_too_little_are_left_alone() -> None:
    rows = [make_row(0, 7, 8, 1), make_row(1, 7, 8, 2)]
    assert make_shared(min_saved_tokens=32).follow(rows)
    assert not make_shared(min_saved_tokens=33).follow(rows)
    assert not make_shared(min_saved_tokens=0).follow([make_row(0, 1), make_row(1, 2)])
    assert not make_shared(min_saved_tokens=0).follow([])


def test_a_batch_that_stays_is_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []

    def search(lists: Any) -> CommonPrefix:
        searched.append(1)
        return find_common_prefix(lists)

    monkeypatch.setattr(shared_prefix, "find_common_prefix", search)
    shared, rows = make_shared(), [make_row(0, 7, 8), make_row(1, 7, 8)]
    for _ in range(3):
        assert shared.follow(rows)
        rows[0].block_ids.append(20)
    assert len(searched) == 1
    # It gave way and came back with blocks of its own: the same row to look at.
    rows[0].block_ids[:] = [3, 4]
    shared.forget()
    assert not shared.follow(rows)
    assert len(searched) == 2

"""The common beginning of the rows of a batch, against a search through all of them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.pipeline.shared_prefix import CommonPrefix, find_common_prefix

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

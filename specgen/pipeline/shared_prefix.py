"""Which leading cache blocks the rows of a batch have in common, for attention to read them once.

Blocks are shared by id: two rows hold the same block only where the block manager gave it to both,
which it does for whole blocks of equal prompts, none of which is written any more. So every query
of a decode step stands behind all blocks that its row shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MIN_SAVED_TOKENS = 1 << 16
"""Reads of cached tokens that must be saved in a step before a second kernel in every layer pays:
about 40,000 on an H200 with 8 heads of 128 (``benchmarks/kernel_bandwidth.py``)."""


class CommonPrefix(NamedTuple):
    """Leading blocks of some rows of a batch."""

    block_ids: tuple[int, ...]
    members: tuple[int, ...]
    """Indices of the rows that begin with them, ascending."""

    @property
    def num_saved_blocks(self) -> int:
        """Reads of blocks that become one read each."""
        return len(self.block_ids) * (len(self.members) - 1)


def find_common_prefix(block_lists: Sequence[Sequence[int]]) -> CommonPrefix:
    """The common beginning that saves the most reads.

    From all rows on, the largest group that goes on alike is followed; every place where a group
    parts is a candidate. A group that is not the largest at its parting is never looked into.

    Args:
        block_lists: the blocks of every row of the batch, in order; one list may stand for
            several rows.

    Returns:
        Its blocks and rows; no blocks and no rows where no two rows share any.
    """
    best = CommonPrefix((), ())
    group = list(range(len(block_lists)))
    depth = 0
    while True:
        group = _largest_group(block_lists, group, depth)
        if len(group) < 2:
            return best
        depth = _common_length(block_lists, group, depth + 1)
        found = CommonPrefix(tuple(block_lists[group[0]][:depth]), tuple(group))
        if found.num_saved_blocks > best.num_saved_blocks:
            best = found


def _largest_group(
    block_lists: Sequence[Sequence[int]], rows: Sequence[int], depth: int
) -> list[int]:
    """The most rows that hold one block at ``depth``; of equal groups the first."""
    groups: dict[int, list[int]] = {}
    for row in rows:
        blocks = block_lists[row]
        if len(blocks) > depth:
            groups.setdefault(blocks[depth], []).append(row)
    return max(groups.values(), key=len, default=[])


def _common_length(block_lists: Sequence[Sequence[int]], rows: Sequence[int], known: int) -> int:
    """Blocks at the beginning of all ``rows``, of which the first ``known`` are known to agree."""
    first = block_lists[rows[0]]
    length = len(first)
    for row in rows[1:]:
        blocks = block_lists[row]
        length = min(length, len(blocks))
        if blocks[:length] != first[:length]:
            length = _first_difference(first, blocks, known, length)
    return length


def _first_difference(left: Sequence[int], right: Sequence[int], low: int, high: int) -> int:
    """Where two lists part that agree in their first ``low`` blocks and differ within ``high``.

    Slices are compared, not blocks: the search is as fast as its few comparisons in C.
    """
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low

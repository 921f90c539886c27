"""Which leading cache blocks the rows of a batch have in common, for attention to read them once.

Blocks are shared by id: two rows hold the same block only where the block manager gave it to both,
which it does for whole blocks of equal prompts, none of which is written any more. So every query
of a decode step stands behind all blocks that its row shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from specgen.kernels.batch_types import SharedPrefix
from specgen.pipeline.request import Request
from specgen.pipeline.uploads import upload

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


class SharedRows:
    """What the running rows share, found when the batch changes, and its tensors on the device.

    The tensors persist: a captured step that reads them follows every change. Whether a step reads
    them at all is the host's decision, since the second kernel costs time even for nothing.

    Args:
        max_num_seqs: S; every row of a slot and the spare row for padding have a flag.
        max_blocks: blocks of the longest row.
        block_size: tokens of a block.
        min_saved_tokens: reads of tokens that must be saved for the kernel to pay.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        min_saved_tokens: int = MIN_SAVED_TOKENS,
    ) -> None:
        self.tensors = SharedPrefix(
            block_ids=torch.zeros(max_blocks, dtype=torch.int32, device=device),
            length=torch.zeros(1, dtype=torch.int32, device=device),
            members=torch.zeros(max_num_seqs + 1, dtype=torch.bool, device=device),
        )
        self._block_size = block_size
        self._min_saved_tokens = min_saved_tokens
        self._rows: list[Request] = []
        self._on_device: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self._pays = False

    def forget(self) -> None:
        """Look again before the next step: a row's blocks are others than they were.

        Rows that come or go are seen without it; a row that gave way and came back looks the same.
        """
        self._rows, self._pays = [], False

    def follow(self, requests: Sequence[Request]) -> bool:
        """Bring the tensors up to date for a step of ``requests``, in stream order before it.

        Returns:
            Whether the step should read shared blocks once.
        """
        if len(requests) != len(self._rows) or any(
            new is not old for new, old in zip(requests, self._rows, strict=True)
        ):
            self._rows = list(requests)
            found = find_common_prefix([request.block_ids for request in requests])
            num_saved = found.num_saved_blocks * self._block_size
            self._pays = num_saved > 0 and num_saved >= self._min_saved_tokens
            if self._pays:
                slots = [requests[row].slot for row in found.members]
                self._write(found.block_ids, tuple(slot for slot in slots if slot is not None))
        return self._pays

    def _write(self, block_ids: tuple[int, ...], slots: tuple[int, ...]) -> None:
        if (block_ids, slots) == self._on_device:
            return
        self._on_device = (block_ids, slots)
        num_blocks, num_flags = len(block_ids), self.tensors.members.shape[0]
        packed = np.zeros(1 + num_blocks + num_flags, dtype=np.int32)
        packed[0] = num_blocks * self._block_size
        packed[1 : 1 + num_blocks] = block_ids
        packed[1 + num_blocks + np.array(slots)] = 1
        uploaded = upload(packed, self.tensors.length.device)
        self.tensors.length.copy_(uploaded[:1])
        self.tensors.block_ids[:num_blocks].copy_(uploaded[1 : 1 + num_blocks])
        self.tensors.members.copy_(uploaded[1 + num_blocks :])


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

"""Blocks of the paged cache: which are free, which rows share, how many a row needs.

Prompts that begin alike share the blocks of their common beginning. A block is shared only as a
whole and only if the token *after* it is the same too, because the draft's entry at a position
depends on that position's successor; so both halves of the cache are shared, and no row ever writes
into a shared block. Blocks of finished prompts stay until their room is needed.
"""

from __future__ import annotations

import bisect
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


def prefix_keys(token_ids: Sequence[int], block_size: int) -> tuple[bytes, ...]:
    """Keys of the blocks of a prompt that may be shared, first block first.

    The key of a block covers all tokens up to its end and the one after, so equal keys mean equal
    cache entries of target and draft. The last block, whose successor is not known, has none.
    """
    keys = []
    digest = b""
    for end in range(block_size, len(token_ids), block_size):
        tokens = array("q", token_ids[end - block_size : end + 1]).tobytes()
        digest = hashlib.blake2b(tokens, key=digest, digest_size=16).digest()
        keys.append(digest)
    return tuple(keys)


class BlockManager:
    """Hands out block ids of one cache that target and draft share.

    Args:
        num_blocks: Blocks that may be handed out, ids ``0 .. num_blocks - 1``.
        block_size: Tokens a block holds.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Popped from the end: the lowest ids first, so that short jobs touch little memory.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_holders = [0] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # shareable, unheld, oldest first

    @property
    def num_free(self) -> int:
        """Blocks not held by any row."""
        return len(self._free) + len(self._idle)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens fill."""
        return -(-num_tokens // self.block_size)

    def grow(self, block_ids: list[int], num_tokens: int) -> bool:
        """Extend ``block_ids`` in place to hold ``num_tokens``.

        Returns:
            Whether there were enough free blocks; if not, nothing changed.
        """
        missing = self.num_blocks_for(num_tokens) - len(block_ids)
        if missing > self.num_free:
            return False
        block_ids.extend(self._take() for _ in range(missing))
        return True

    def num_known(self, keys: Sequence[bytes]) -> int:
        """About how many leading blocks :meth:`match` would find, without holding any.

        Too few or too many only where later blocks of a prompt are known and earlier ones not.
        """
        return bisect.bisect_left(keys, True, key=lambda key: key not in self._by_key)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Hold, for a row, the blocks that already have the longest beginning of ``keys``."""
        block_ids: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            self._idle.pop(block, None)
            self._num_holders[block] += 1
            block_ids.append(block)
        return block_ids

    def publish(self, block_ids: Sequence[int], keys: Sequence[bytes], num_tokens: int) -> None:
        """Let others share a row's blocks, as far as ``num_tokens`` of its prompt are computed.

        "Computed" includes the step that is about to run: within a step, every layer writes the
        entries of all its tokens before any of them is read.
        """
        for block, key in zip(block_ids, keys[: num_tokens // self.block_size], strict=False):
            if key not in self._by_key:
                self._by_key[key] = block
                self._key_of[block] = key

    def release(self, block_ids: list[int]) -> None:
        """Take back a row's blocks and empty its list."""
        # The end of a prompt first: it is shared least, so it is to be overwritten first.
        for block in reversed(block_ids):
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)
        block_ids.clear()

    def forget_prefixes(self) -> None:
        """Share nothing that exists so far, after a step failed and left entries unwritten."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._by_key.clear()
        self._key_of.clear()

    def check(self, held: list[list[int]]) -> None:
        """Assert that the cache is accounted for (a test and idle check).

        Args:
            held: The block lists of all rows.
        """
        num_holders = [0] * self.num_blocks
        for block_ids in held:
            assert len(set(block_ids)) == len(block_ids), "a row holds a cache block twice"
            for block in block_ids:
                num_holders[block] += 1
        assert num_holders == self._num_holders, "cache blocks lost or held twice"
        unheld = sorted([*self._free, *self._idle])
        assert unheld == [b for b, count in enumerate(num_holders) if count == 0], "blocks lost"
        for block, key in self._key_of.items():
            assert self._by_key[key] == block, "two blocks under one key"

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._by_key[self._key_of.pop(block)]
        self._num_holders[block] = 1
        return block

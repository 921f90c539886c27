"""Blocks of the paged cache: which are free, and how many a row needs."""

from __future__ import annotations


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

    @property
    def num_free(self) -> int:
        """Blocks not held by any row."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens fill."""
        return -(-num_tokens // self.block_size)

    def grow(self, block_ids: list[int], num_tokens: int) -> bool:
        """Extend ``block_ids`` in place to hold ``num_tokens``.

        Returns:
            Whether there were enough free blocks; if not, nothing changed.
        """
        missing = self.num_blocks_for(num_tokens) - len(block_ids)
        if missing > len(self._free):
            return False
        block_ids.extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, block_ids: list[int]) -> None:
        """Take back a row's blocks and empty its list."""
        self._free.extend(reversed(block_ids))
        block_ids.clear()

    def check(self, held: list[list[int]]) -> None:
        """Assert that free and held blocks are a partition of the cache (a test and idle check)."""
        ids = sorted(self._free + [block for blocks in held for block in blocks])
        assert ids == list(range(self.num_blocks)), "cache blocks lost or held twice"

"""How much one step may hold: less after memory ran out, and more again when it lasts."""

from __future__ import annotations

__all__ = ["StepLimits"]

_GROW_AFTER_STEPS = 256
_MIN_TOKENS = 16


class StepLimits:
    """Rows and prompt tokens of a step, between one and what was configured.

    Args:
        max_num_seqs: most rows that may be admitted at a time.
        max_num_batched_tokens: most prompt tokens of a prefill step.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.num_seqs = self._max_num_seqs = max_num_seqs
        self.num_tokens = self._max_num_tokens = max_num_batched_tokens
        self._num_good_steps = 0

    @property
    def reduced(self) -> bool:
        """Whether less is allowed than was configured."""
        return self.num_seqs < self._max_num_seqs or self.num_tokens < self._max_num_tokens

    def cap(self, max_num_seqs: int) -> None:
        """Never again allow more rows than this."""
        self._max_num_seqs = min(self._max_num_seqs, max_num_seqs)
        self.num_seqs = min(self.num_seqs, max_num_seqs)

    def shrink(self, num_seqs: int, num_prefill_tokens: int) -> bool:
        """Halve what a step held that ran out of memory; False if it cannot be smaller.

        Args:
            num_seqs: rows of the step.
            num_prefill_tokens: its prompt tokens; 0 for a decode step.
        """
        self._num_good_steps = 0
        if num_prefill_tokens > _MIN_TOKENS:
            self.num_tokens = num_prefill_tokens // 2
            return True
        if num_seqs > 1:
            self.num_seqs = num_seqs // 2
            return True
        return False

    def step_succeeded(self) -> None:
        """Count a good step; many in a row allow twice as much again.

        The shortage may have been another process's, and a night is long.
        """
        if not self.reduced:
            return
        self._num_good_steps += 1
        if self._num_good_steps >= _GROW_AFTER_STEPS:
            self._num_good_steps = 0
            self.num_seqs = min(2 * self.num_seqs, self._max_num_seqs)
            self.num_tokens = min(2 * self.num_tokens, self._max_num_tokens)

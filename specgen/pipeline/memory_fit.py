"""What a row takes, and whether the rows that may run at a time fit the memory."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specgen.config import ResolvedConfig
from specgen.errors import EnvironmentProblem
from specgen.models.config import DraftConfig
from specgen.models.target import CachedModel
from specgen.pipeline.kv_cache import block_bytes
from specgen.pipeline.request_state import bytes_per_row

__all__ = ["RowSizes", "check_num_seqs"]


@dataclass(frozen=True)
class RowSizes:
    """Sizes that settings and configurations fix; an engine allocates by them, doctor says them.

    Attributes:
        num_lookahead: tokens of cache past the last one that a row may commit.
        block_size: tokens of a cache block.
        block_bytes: of a cache block, over all layers of target and draft.
        max_context_len: tokens of cache that the longest row takes.
        draft_logits_shape: ``(draft vocabulary, dtype)`` of the logits that are kept of each draft,
            None if none are.
        kept_pairs_shape: ``(size, dtype)`` of the features of pairs that wait to be written to the
            draft's cache, None if none do.
        state_bytes: of what is kept of a row besides its cache.
    """

    num_lookahead: int
    block_size: int
    block_bytes: int
    max_context_len: int
    draft_logits_shape: tuple[int, torch.dtype] | None
    kept_pairs_shape: tuple[int, torch.dtype] | None
    state_bytes: int

    @classmethod
    def of(cls, config: ResolvedConfig, target: CachedModel, draft: DraftConfig | None) -> RowSizes:
        """The sizes under `config` of a target and a draft, of which the configurations will do."""
        k, dtype = config.num_speculative_tokens, getattr(torch, config.dtype)
        # Drafts look ahead 2k positions past the last token a row may commit (see the scheduler).
        num_lookahead = 2 * k + 1
        max_context_len = config.max_model_len + num_lookahead
        logits_shape = None
        if draft is not None and config.draft_sample == "gumbel":  # judged by their ratio
            logits_shape = (draft.draft_vocab_size, dtype)
        kept_shape = None
        if draft is not None and config.auto_draft_length:  # which has steps without drafts
            kept_shape = (max(1, len(draft.aux_layers)) * draft.target_hidden_size, dtype)
        cached: list[CachedModel] = [target] if draft is None else [target, draft]
        return cls(
            num_lookahead=num_lookahead,
            block_size=config.block_size,
            block_bytes=sum(block_bytes(model, config.block_size, dtype) for model in cached),
            max_context_len=max_context_len,
            draft_logits_shape=logits_shape,
            kept_pairs_shape=kept_shape,
            state_bytes=bytes_per_row(
                -(-max_context_len // config.block_size), k, logits_shape, kept_shape
            ),
        )

    @property
    def max_blocks(self) -> int:
        """Cache blocks of the longest row."""
        return -(-self.max_context_len // self.block_size)

    def num_blocks(self, num_tokens: int) -> int:
        """Cache blocks of a row of `num_tokens`, prompt and completion."""
        return -(-(num_tokens + self.num_lookahead) // self.block_size)


def check_num_seqs(
    max_num_seqs: int,
    *,
    available: int,
    bytes_per_row: int,
    step_bytes: Callable[[int], int],
    cache_bytes: int,
) -> None:
    """Refuse more rows than leave room for a cache.

    Args:
        max_num_seqs: rows that may run at a time.
        available: bytes beside what the device holds already.
        bytes_per_row: of what is kept of a row besides its cache.
        step_bytes: temporaries of the largest step of so many rows.
        cache_bytes: the smallest cache that will do.

    Raises:
        EnvironmentProblem: with the number that would fit.
    """

    def is_too_large(num_seqs: int) -> bool:
        # One row more than there are slots absorbs the writes of padding.
        return (num_seqs + 1) * bytes_per_row + step_bytes(num_seqs) + cache_bytes > available

    if not is_too_large(max_num_seqs):
        return
    fitting = bisect.bisect_left(range(1, max_num_seqs + 1), True, key=is_too_large)
    if fitting == 0:
        return  # not for their number: the cache says what it lacks
    raise EnvironmentProblem(
        f"--max-num-seqs {max_num_seqs}: so many rows leave no room for their cache",
        f"give --max-num-seqs {fitting} or less",
    )

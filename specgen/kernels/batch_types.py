"""The tensors that the batch kernels hand back, named once for the kernels and their twins.

B rows of a step's batch, k draft tokens a row. A row is *inert* in a step when its slot id is
negative or its slot is no longer active: it then reads nothing that matters and writes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

RUNNING = 0
"""`CommitResult.finish`: the row goes on, or was inert."""
FINISH_STOP = 1
"""`CommitResult.finish`: the last committed token is one of the row's stop tokens."""
FINISH_LENGTH = 2
"""`CommitResult.finish`: the row reached its longest allowed length."""
FINISH_ERROR = 3
"""`CommitResult.finish`: the row's logits were unusable; nothing was committed."""


class DecodeInputs(NamedTuple):
    """What the target runs over in one decode step: the last token and the drafts of every row."""

    input_ids: Tensor
    """int32 `[B, k+1]`: last token, then the drafts; 0 past the row's drafts. On inert rows 0, or
    the tokens that a slot below -1 stands for."""
    positions: Tensor
    """int32 `[B, k+1]`: n-1+i; 0 on inert rows."""
    slot_mapping: Tensor
    """int64 `[B, k+1]`: token slot in the cache; -1 past the row's drafts and on inert rows."""
    first_positions: Tensor
    """int32 `[B]`: n-1; 0 on inert rows."""
    context_lens: Tensor
    """int32 `[B]`: n+d, the drafts included; 0 on inert rows."""
    draft_tokens: Tensor
    """int32 `[B, k]`: the drafts judged in this step; 0 past the row's drafts and on inert rows."""
    num_draft_tokens: Tensor
    """int32 `[B]`: d; -1 on inert rows."""


class SamplingRows(NamedTuple):
    """What drawing tokens of a batch depends on beside logits, gathered from the persistent rows.

    Padding rows have zeros.
    """

    temperature: Tensor
    """float32 `[B]`."""
    seeds: Tensor
    """int64 `[B]`."""
    sample_index: Tensor
    """int32 `[B]`."""
    seq_lens: Tensor
    """int32 `[B]`: n, which is also the position of the next token."""


class ExtendInputs(NamedTuple):
    """What the draft's extend pass runs over: the pairs (feature, next token) just committed."""

    input_ids: Tensor
    """int32 `[B, k+1]`: the committed tokens; 0 past them and on inert rows."""
    slot_mapping: Tensor
    """int64 `[B, k+1]`: token slot in the cache; -1 past the committed pairs and on inert rows."""
    context_lens: Tensor
    """int32 `[B]`: first position + committed tokens; 0 on inert rows."""
    last_idx: Tensor
    """int64 `[B]`: the last true pair, counted over `[B*(k+1)]`; the row's start if inert."""
    last_positions: Tensor
    """int32 `[B]`: n-2, where the last true pair stands; 0 on inert rows."""
    next_positions: Tensor
    """int32 `[B]`: n, of the token that the last pair drafts; -1 on inert rows."""


class DraftInputs(NamedTuple):
    """What one single-token draft pass runs over."""

    positions: Tensor
    """int32 `[B]`: n-2+step; 0 on inert rows."""
    slot_mapping: Tensor
    """int64 `[B]`: token slot in the cache; -1 on inert rows."""
    context_lens: Tensor
    """int32 `[B]`: n-1+step; 0 on inert rows."""
    next_positions: Tensor
    """int32 `[B]`: n+step, of the token that the pass drafts; -1 on inert rows."""


class CommitResult(NamedTuple):
    """What the end of a step did to each row."""

    num_committed: Tensor
    """int32 `[B]`: tokens appended to the row; 0 on inert and failed rows."""
    finish: Tensor
    """int32 `[B]`: `RUNNING`, `FINISH_STOP`, `FINISH_LENGTH` or `FINISH_ERROR`."""
    record: Tensor
    """int32 `[B, k+1+4]`, for the host: the tokens, then `num_sampled`, `num_draft_tokens`,
    `num_committed` and `finish`."""


class SharedPrefix(NamedTuple):
    """Leading cache blocks that several rows of a batch have in common.

    All of it is on the device and persists, so that a captured step follows its changes.
    """

    block_ids: Tensor
    """int32 `[MB]`, of which the first `length / block_size` count."""
    length: Tensor
    """int32 `[1]`, tokens in those blocks, a multiple of the block size; 0: nothing is shared."""
    members: Tensor
    """bool `[S]`: whether the row of a slot begins with these blocks."""


class KeptPairs(NamedTuple):
    """Pairs that rows keep until they are written to the draft's cache, N places a slot."""

    features: Tensor
    """``[S, N, F]``."""
    tokens: Tensor
    """int32 ``[S, N]``."""
    positions: Tensor
    """int32 ``[S, N]``, of the features; -1: no pair."""


class TakenPairs(NamedTuple):
    """Pairs of a pass over what rows have kept."""

    features: Tensor
    """``[T, F]``."""
    tokens: Tensor
    """int32 ``[T]``."""
    positions: Tensor
    """int32 ``[T]``."""
    slot_mapping: Tensor
    """int64 ``[T]``, -1: no pair."""

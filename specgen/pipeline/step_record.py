"""What a step did to its rows, as the host reads it; the device writes it as it commits."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["RowRecord", "record_width", "unpack_record"]

_NUM_COLUMNS = 4  # behind the tokens: num_sampled, num_draft_tokens, num_committed, finish


class RowRecord(NamedTuple):
    """What one step did to one row (host side)."""

    token_ids: list[int]  # committed
    num_sampled: int  # accepted drafts + 1, before cuts; 0 when inert or failed
    num_draft_tokens: int  # judged; -1 when inert
    finish: int  # batch_types.RUNNING, FINISH_STOP, FINISH_LENGTH, FINISH_ERROR


def record_width(num_speculative_tokens: int) -> int:
    """Integers a row of a step with k drafts has in its record."""
    return num_speculative_tokens + 1 + _NUM_COLUMNS


def unpack_record(record: torch.Tensor) -> list[RowRecord]:
    """The rows of a record that lies on the host."""
    rows: list[list[int]] = record.tolist()
    return [
        RowRecord(row[:num_committed], num_sampled, num_draft_tokens, finish)
        for row in rows
        for num_sampled, num_draft_tokens, num_committed, finish in (row[-_NUM_COLUMNS:],)
    ]

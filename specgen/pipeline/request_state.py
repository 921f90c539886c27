"""Persistent device rows: everything a step needs to know about a request, one row a slot.

The rows outlive steps. The device advances ``seq_lens``, ``last_tokens``, ``active`` and the
drafts by itself; the host writes whole rows when it admits a request and clears ``active`` when it
takes one back. One row beyond ``max_num_seqs`` absorbs the writes of padding rows, whose slot is
-1, so that a step needs no mask and no decision on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specgen.kernels import Kernels
from specgen.kernels.batch_types import KeptPairs, SamplingRows
from specgen.pipeline.request import Request
from specgen.pipeline.uploads import pinned, upload

_MIN_STOP_IDS = 8
NUM_KEPT_PAIRS = 8
"""Pairs of steps without drafts that a row keeps before they are written to the draft's cache."""


def bytes_per_row(
    max_blocks: int,
    num_speculative_tokens: int,
    draft_logits_shape: tuple[int, torch.dtype] | None,
    kept_pairs_shape: tuple[int, torch.dtype] | None = None,
) -> int:
    """Bytes of one device row, of those tensors that grow with a setting."""
    num_bytes = 4 * (max_blocks + num_speculative_tokens + _MIN_STOP_IDS)
    if draft_logits_shape is not None:
        vocab_size, dtype = draft_logits_shape
        num_bytes += num_speculative_tokens * vocab_size * dtype.itemsize
    if kept_pairs_shape is not None:
        feature_size, dtype = kept_pairs_shape
        num_bytes += NUM_KEPT_PAIRS * (feature_size * dtype.itemsize + 8)
    return num_bytes


class RequestState:
    """Device rows of up to ``max_num_seqs`` requests.

    Args:
        max_num_seqs: S, the number of slots; every tensor has S + 1 rows.
        max_blocks: Entries of a block table row.
        num_speculative_tokens: k, the width of the draft rows.
        draft_logits_shape: ``(draft vocabulary, dtype)`` when drafts are sampled and judged by
            ratio; ``None`` allocates nothing.
        kept_pairs_shape: ``(feature size, dtype)`` where rows keep pairs of steps without drafts.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_blocks: int,
        num_speculative_tokens: int,
        device: torch.device,
        draft_logits_shape: tuple[int, torch.dtype] | None,
        kept_pairs_shape: tuple[int, torch.dtype] | None = None,
    ) -> None:
        rows = max_num_seqs + 1
        self.max_num_seqs = max_num_seqs
        self.device = device

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.seq_lens = ints(rows)  # committed tokens, n
        self.last_tokens = ints(rows)  # the n-th token, not yet run
        self.max_lens = ints(rows)
        self.top_k = ints(rows)
        self.sample_index = ints(rows)
        self.draft_limits = ints(rows)  # the row's own k
        self.num_draft_tokens = ints(rows)
        self.draft_tokens = ints(rows, max(num_speculative_tokens, 1))
        self.block_tables = ints(rows, max_blocks)
        self.stop_ids = torch.full((rows, _MIN_STOP_IDS), -1, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float32, device=device)
        self.active = torch.zeros(rows, dtype=torch.bool, device=device)
        self._deactivated = torch.zeros(rows, dtype=torch.int64, device=device)
        self.draft_logits: torch.Tensor | None = None
        if draft_logits_shape is not None:
            vocab_size, dtype = draft_logits_shape
            self.draft_logits = torch.zeros(
                (rows, num_speculative_tokens, vocab_size), dtype=dtype, device=device
            )

        self.kept_pairs: KeptPairs | None = None
        if kept_pairs_shape is not None:
            size, dtype = kept_pairs_shape
            self.kept_pairs = KeptPairs(
                features=torch.zeros((rows, NUM_KEPT_PAIRS, size), dtype=dtype, device=device),
                tokens=ints(rows, NUM_KEPT_PAIRS),
                positions=ints(rows, NUM_KEPT_PAIRS) - 1,
            )

    @property
    def draft_logits_bytes(self) -> int:
        """Memory that the ratio rule's draft logits take; 0 for greedy drafts."""
        return 0 if self.draft_logits is None else self.draft_logits.nbytes

    def sampling_rows(self, kernels: Kernels, slot_ids: torch.Tensor) -> SamplingRows:
        """What drawing tokens of the rows of ``slot_ids`` (int32 [B], -1 padding) depends on."""
        gathered: SamplingRows = kernels.batch_inputs.sampling_rows(
            slot_ids, self.temperature, self.seeds, self.sample_index, self.seq_lens
        )
        return gathered

    def rows(self, slot_ids: torch.Tensor) -> torch.Tensor:
        """Row indices (int64) of ``slot_ids``: padding slots (-1) go to the spare row."""
        return torch.where(slot_ids < 0, self.max_num_seqs, slot_ids).long()

    def admit(self, requests: Sequence[Request]) -> bool:
        """Write the rows of newly admitted requests, inactive until their prefill is done.

        Returns:
            Whether a tensor was replaced by a wider one, which invalidates captured graphs.
        """
        slots = self._slots(requests)
        ints = self._upload(
            [
                [
                    r.num_tokens,
                    r.output_token_ids[-1] if r.is_resuming else 0,
                    r.max_len,
                    r.row.sampling.top_k,
                    r.sample_index,
                    r.num_speculative_tokens,
                ]
                for r in requests
            ],
            np.int32,
        )
        floats = self._upload(
            [[r.row.sampling.temperature, r.row.sampling.top_p] for r in requests], np.float32
        )
        targets = (
            self.seq_lens,
            self.last_tokens,
            self.max_lens,
            self.top_k,
            self.sample_index,
            self.draft_limits,
        )
        for column, target in enumerate(targets):
            target[slots] = ints[:, column]
        self.temperature[slots] = floats[:, 0]
        self.top_p[slots] = floats[:, 1]
        self.seeds[slots] = self._upload([r.seed for r in requests], np.int64)
        # Not by indexing: torch would upload the scalars, and wait for them.
        self.num_draft_tokens.index_fill_(0, slots, 0)
        self.active.index_fill_(0, slots, False)
        widened = self._widen_stop_ids(max(len(r.stop_token_ids) for r in requests))
        stop_ids = np.full((len(requests), self.stop_ids.shape[1]), -1, dtype=np.int32)
        for row, request in enumerate(requests):
            stop_ids[row, : len(request.stop_token_ids)] = request.stop_token_ids
        self.stop_ids[slots] = upload(stop_ids, self.device)
        return widened

    def write_block_tables(self, requests: Sequence[Request]) -> None:
        """Upload the block tables of ``requests`` after their blocks grew."""
        if not requests:
            return
        width = max(len(r.block_ids) for r in requests)
        tables = np.zeros((len(requests), width), dtype=np.int32)
        for row, request in enumerate(requests):
            tables[row, : len(request.block_ids)] = request.block_ids
        self.block_tables[self._slots(requests), :width] = upload(tables, self.device)

    def deactivate(self, slots: Sequence[int]) -> None:
        """Make rows inert in stream order: later steps write nothing for them.

        Takes no device memory: it is also what follows when there is none.
        """
        if slots:
            idx = self._deactivated[: len(slots)]
            idx.copy_(pinned(np.array(slots, dtype=np.int64), self.device), non_blocking=True)
            self.active.index_fill_(0, idx, False)

    def _slots(self, requests: Sequence[Request]) -> torch.Tensor:
        """Slots of admitted requests, int64, on the device."""
        return self._upload([r.slot for r in requests], np.int64)

    def _upload(self, values: Sequence[Any], dtype: type[np.generic]) -> torch.Tensor:
        return upload(np.array(values, dtype=dtype), self.device)

    def _widen_stop_ids(self, num_ids: int) -> bool:
        width = self.stop_ids.shape[1]
        if num_ids <= width:
            return False
        while width < num_ids:
            width *= 2
        wider = self.stop_ids.new_full((self.stop_ids.shape[0], width), -1)
        wider[:, : self.stop_ids.shape[1]] = self.stop_ids
        self.stop_ids = wider
        return True

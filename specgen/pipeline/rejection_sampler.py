"""Judging drafts: the target's logits of a decode step in, the tokens that follow out."""

from __future__ import annotations

import torch

from specgen.kernels import Kernels
from specgen.kernels.batch_types import DecodeInputs
from specgen.pipeline.request_state import RequestState


class RejectionSampler:
    """Applies the ``standard`` rule to every row of a decode step.

    Args:
        draft_ids: int32 [V], target id to draft id (-1 outside); ``None`` when they are the same.
    """

    def __init__(
        self, kernels: Kernels, state: RequestState, draft_ids: torch.Tensor | None
    ) -> None:
        self._kernels = kernels
        self._state = state
        self._draft_ids = draft_ids

    def verify(
        self,
        logits: torch.Tensor,
        slot_ids: torch.Tensor,
        inputs: DecodeInputs,
        *,
        needs_filter: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Judge the drafts of ``inputs``.

        Args:
            logits: [B, k + 1, V]; row i follows the last token and i drafts.
            slot_ids: int32 [B].

        Returns:
            Tokens int32 [B, k + 1] padded with -1, their number int32 [B] (accepted + 1), and
            bool [B]: the logits that were judged are usable.
        """
        state = self._state
        rows = state.rows(slot_ids)
        temperature = state.temperature[rows]
        thresholds = None
        if needs_filter:
            thresholds = self._kernels.logits.filter_thresholds(
                logits, temperature, state.top_k[rows], state.top_p[rows]
            )
        tokens, num_sampled, ok = self._kernels.rejection.rejection_sample(
            logits,
            inputs.draft_tokens,
            inputs.num_draft_tokens,
            state.draft_logits,
            slot_ids,
            self._draft_ids,
            temperature,
            state.seeds[rows],
            inputs.first_positions + 1,
            state.sample_index[rows],
            thresholds,
        )
        return tokens, num_sampled, ok

"""Judging drafts: the target's logits of a decode step in, the tokens that follow out."""

from __future__ import annotations

import torch

from specgen.kernels import Kernels
from specgen.kernels.batch_types import DecodeInputs, SamplingRows
from specgen.pipeline.request_state import RequestState
from specgen.synthetic import conditional_rates


class RejectionSampler:
    """Applies the rule to every row of a decode step: ``standard``, or ``synthetic`` with rates.

    Args:
        draft_ids: int32 [V], target id to draft id (-1 outside); ``None`` when they are the same.
        synthetic_rates: unconditional rates of the rule ``synthetic``, one a draft position.
    """

    def __init__(
        self,
        kernels: Kernels,
        state: RequestState,
        draft_ids: torch.Tensor | None,
        synthetic_rates: tuple[float, ...] | None = None,
    ) -> None:
        self._kernels = kernels
        self._state = state
        self._draft_ids = draft_ids
        self._synthetic_rates: torch.Tensor | None = None
        if synthetic_rates is not None:
            self._synthetic_rates = torch.tensor(
                conditional_rates(synthetic_rates), dtype=torch.float32, device=state.device
            )

    def verify(
        self,
        logits: torch.Tensor,
        slot_ids: torch.Tensor,
        inputs: DecodeInputs,
        sampling: SamplingRows,
        *,
        needs_filter: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Judge the drafts of ``inputs``.

        Args:
            logits: [B, k + 1, V]; row i follows the last token and i drafts.
            slot_ids: int32 [B].
            sampling: of the rows, before the commit.

        Returns:
            Tokens int32 [B, k + 1] padded with -1, their number int32 [B] (accepted + 1), and
            bool [B]: the logits that were judged are usable.
        """
        state = self._state
        thresholds = None
        if needs_filter:
            rows = state.rows(slot_ids)
            thresholds = self._kernels.logits.filter_thresholds(
                logits, sampling.temperature, state.top_k[rows], state.top_p[rows]
            )
        tokens, num_sampled, ok = self._kernels.rejection.rejection_sample(
            logits,
            inputs.draft_tokens,
            inputs.num_draft_tokens,
            state.draft_logits,
            slot_ids,
            self._draft_ids,
            sampling.temperature,
            sampling.seeds,
            sampling.seq_lens,
            sampling.sample_index,
            thresholds,
            self._synthetic_rates,
        )
        return tokens, num_sampled, ok

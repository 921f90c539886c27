"""Judging drafts: the target's logits of a decode step in, the tokens that follow out."""

from __future__ import annotations

import torch

from specgen.kernels import Kernels
from specgen.kernels.batch_types import DecodeInputs, SamplingRows
from specgen.pipeline.cuda_capture import SideStream
from specgen.pipeline.request_state import RequestState
from specgen.synthetic import conditional_rates


class RejectionSampler:
    """Applies the rule to every row of a decode step: ``standard``, or ``synthetic`` with rates.

    Args:
        draft_ids: int32 [V], target id to draft id (-1 outside); ``None`` when they are the same.
        vocab_size: V.
        synthetic_rates: unconditional rates of the rule ``synthetic``, one a draft position.
    """

    def __init__(
        self,
        kernels: Kernels,
        state: RequestState,
        draft_ids: torch.Tensor | None,
        vocab_size: int,
        synthetic_rates: tuple[float, ...] | None = None,
    ) -> None:
        self._kernels = kernels
        self._state = state
        self._draft_ids = draft_ids
        self._vocab_size = vocab_size
        self._beside = SideStream()
        self._synthetic_rates: torch.Tensor | None = None
        if synthetic_rates is not None:
            self._synthetic_rates = torch.tensor(
                conditional_rates(synthetic_rates), dtype=torch.float32, device=state.device
            )

    def look_ahead(self, inputs: DecodeInputs, sampling: SamplingRows) -> torch.Tensor | None:
        """Look at the noise that the step may draw with, while the target runs.

        Returns:
            What :meth:`verify` then takes; ``None`` where it would not be used.
        """
        kernels = self._kernels
        if kernels.backend == "reference":
            return None

        def look() -> torch.Tensor:
            noise: torch.Tensor = kernels.lane_noise.largest_noise(
                inputs.num_draft_tokens,
                sampling.temperature,
                sampling.seeds,
                sampling.seq_lens,
                sampling.sample_index,
                inputs.draft_tokens.shape[1] + 1,
                self._vocab_size,
            )
            return noise

        return self._beside.fork(look)

    def verify(
        self,
        logits: torch.Tensor,
        slot_ids: torch.Tensor,
        inputs: DecodeInputs,
        sampling: SamplingRows,
        lane_noise: torch.Tensor | None,
        *,
        needs_filter: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Judge the drafts of ``inputs``.

        Args:
            logits: [B, k + 1, V]; row i follows the last token and i drafts.
            slot_ids: int32 [B].
            sampling: of the rows, before the commit.
            lane_noise: of :meth:`look_ahead`.

        Returns:
            Tokens int32 [B, k + 1] padded with -1, their number int32 [B] (accepted + 1), and
            bool [B]: the logits that were judged are usable.
        """
        state = self._state
        self._beside.join()
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
            lane_noise,
        )
        return tokens, num_sampled, ok

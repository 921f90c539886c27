"""The target's own draw of the first token of a completion."""

from __future__ import annotations

import torch

from specgen.kernels import Kernels
from specgen.kernels.streams import TARGET
from specgen.pipeline.request_state import RequestState


class Sampler:
    """Draws one token a row from the target's distribution on the TARGET stream."""

    def __init__(self, kernels: Kernels, state: RequestState) -> None:
        self._kernels = kernels
        self._state = state

    def sample(
        self, logits: torch.Tensor, slot_ids: torch.Tensor, *, needs_filter: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample the token at position n (= committed tokens) of each row.

        Args:
            logits: [B, V].
            slot_ids: int32 [B].

        Returns:
            Tokens int32 [B, 1] (-1 where the logits were unusable), and bool [B]: usable.
        """
        state = self._state
        sampling = state.sampling_rows(self._kernels, slot_ids)
        logits = logits[:, None, :]
        thresholds = None
        if needs_filter:
            rows = state.rows(slot_ids)
            thresholds = self._kernels.logits.filter_thresholds(
                logits, sampling.temperature, state.top_k[rows], state.top_p[rows]
            )
        tokens, ok = self._kernels.gumbel.gumbel_sample(
            logits,
            sampling.temperature,
            sampling.seeds,
            sampling.seq_lens[:, None],
            sampling.sample_index,
            TARGET,
            0,
            thresholds,
            None,
        )
        return tokens, ok[:, 0]

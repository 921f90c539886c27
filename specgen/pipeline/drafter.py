"""Proposing: the draft's extend pass over true target features, then k - 1 passes on its own."""

from __future__ import annotations

import torch

from specgen.config import DraftSample
from specgen.kernels import Kernels
from specgen.kernels.batch_types import (
    CommitResult,
    DecodeInputs,
    DraftInputs,
    SamplingRows,
    SharedPrefix,
)
from specgen.kernels.streams import DRAFT
from specgen.models.attention import AttentionMetadata
from specgen.models.draft import DraftModel
from specgen.pipeline.input_batch import PrefillBatch
from specgen.pipeline.kv_cache import KVCache
from specgen.pipeline.request_state import RequestState


class Drafter:
    """Keeps the draft's cache true and writes k drafts into each live row.

    The pair (feature of position P, token of position P + 1) sits at position P and predicts token
    P + 2. The extend pass writes the pairs that a step committed to the cache, with the target's
    own features, and goes on with the last pair of each row, which yields draft 1; pass j feeds
    back the draft's hidden state and draft j - 1. What those passes wrote to the cache is
    overwritten by the next extend pass. A decode step without drafts, which there is only where k
    is chosen step by step, drops all drafts and keeps its pairs by row: :meth:`write_kept` writes
    those of several steps to the cache at once, before a step that drafts.

    Args:
        draft_sample: ``greedy`` proposes the most likely token, ``gumbel`` samples from the draft's
            distribution at the row's temperature and keeps its logits for the ratio rule.
    """

    def __init__(
        self,
        model: DraftModel,
        caches: tuple[KVCache, ...],
        kernels: Kernels,
        state: RequestState,
        *,
        draft_sample: DraftSample,
        block_size: int,
    ) -> None:
        self._model = model
        self._caches = caches
        self._kernels = kernels
        self._state = state
        self._sampled = draft_sample == "gumbel"
        self._position_limit = model.config.position_limit
        self._block_size = block_size

    @property
    def needs_all_states(self) -> bool:
        """Whether the draft is fed the target's final states, not those of auxiliary layers."""
        return self._model.features == "final"

    def features(self, hidden: torch.Tensor, aux: torch.Tensor | None) -> torch.Tensor:
        """The target features this draft was trained on."""
        if self._model.features == "final":
            return hidden
        assert aux is not None, "the target was built without the draft's auxiliary layers"
        return aux

    def after_prefill(
        self,
        batch: PrefillBatch,
        features: torch.Tensor,
        next_ids: torch.Tensor,
        slot_ids: torch.Tensor,
        last_idx: torch.Tensor,
        num_speculative_tokens: int,
    ) -> None:
        """Extend over the prompt chunks; draft for the rows (``slot_ids``) that start decoding.

        Args:
            features: [T, ·] of the chunks' tokens.
            next_ids: int32 [T], ``batch.next_ids`` completed with the tokens sampled in this step.
            last_idx: int64 [B], row of each starting request's last pair.
            num_speculative_tokens: drafts to make.
        """
        hidden = self._model.fuse(features)
        if num_speculative_tokens == 0 or slot_ids.numel() == 0:
            self._model.write_cache(next_ids, hidden, batch.metadata, self._caches)
            return
        last_pair = self._inputs(slot_ids, step=0)
        metadata = AttentionMetadata(
            positions=batch.metadata.positions,
            slot_mapping=batch.metadata.slot_mapping,
            query_idx=last_idx,
            block_tables=self._state.block_tables,
            slot_ids=slot_ids,
            first_positions=last_pair.positions,
            context_lens=last_pair.context_lens,
            query_len=1,
            max_query_len=1,
            max_context_len=batch.metadata.max_context_len,
        )
        logits_hidden, feedback = self._model.forward(next_ids, hidden, metadata, self._caches)
        self._propose(
            slot_ids,
            logits_hidden,
            feedback,
            last_pair.next_positions,
            self._state.sampling_rows(self._kernels, slot_ids),
            num_speculative_tokens,
            shared_prefix=None,
            max_context_len=metadata.max_context_len,
        )

    def after_decode(
        self,
        slot_ids: torch.Tensor,
        inputs: DecodeInputs,
        tokens: torch.Tensor,
        committed: CommitResult,
        features: torch.Tensor,
        sampling: SamplingRows,
        *,
        shared_prefix: SharedPrefix | None,
        max_context_len: int,
    ) -> None:
        """Extend over the committed tokens of a decode step and draft as many as it judged.

        Args:
            tokens: int32 [B, k + 1] that the step emitted.
            features: [B * (k + 1), ·] of the positions the target ran.
            sampling: of the rows; its ``seq_lens`` are those before the commit.
            shared_prefix: blocks that are read once for all rows that begin with them.
        """
        state, k = self._state, tokens.shape[1] - 1
        if k == 0:
            assert state.kept_pairs is not None, "k is 0 in some steps only where it is chosen"
            self._kernels.kept_pairs.keep_pairs(
                slot_ids,
                tokens[:, 0],
                inputs.first_positions,
                state.active,
                features,
                state.kept_pairs,
            )
            self._commit(slot_ids, [], [])
            return
        extend = self._kernels.batch_inputs.extend_inputs(
            slot_ids,
            tokens,
            committed.num_committed,
            inputs.first_positions,
            state.active,
            state.block_tables,
            self._block_size,
        )
        metadata = AttentionMetadata(
            positions=inputs.positions.flatten(),
            slot_mapping=extend.slot_mapping.flatten(),
            query_idx=extend.last_idx,
            block_tables=state.block_tables,
            slot_ids=slot_ids,
            first_positions=extend.last_positions,
            context_lens=extend.context_lens,
            query_len=1,
            max_query_len=1,
            max_context_len=max_context_len,
            shared_prefix=shared_prefix,
        )
        input_ids, hidden = extend.input_ids.flatten(), self._model.fuse(features)
        logits_hidden, feedback = self._model.forward(input_ids, hidden, metadata, self._caches)
        self._propose(
            slot_ids,
            logits_hidden,
            feedback,
            extend.next_positions,
            sampling,
            k,
            shared_prefix=shared_prefix,
            max_context_len=max_context_len,
        )

    @property
    def keeps_pairs(self) -> bool:
        """Whether steps without drafts leave their pairs to :meth:`write_kept`."""
        return self._state.kept_pairs is not None

    def forget_kept(self, rows: torch.Tensor) -> None:
        """Drop what was kept for others in the slots of rows that start (int64 [B])."""
        if self._state.kept_pairs is not None:
            self._state.kept_pairs.positions.index_fill_(0, rows, -1)

    def write_kept(self, slot_ids: torch.Tensor) -> None:
        """Write the pairs that rows (int32 [B], -1 padding) have kept to the draft's cache.

        Whatever a row has committed since, its pairs stay true. Those of rows that have ended are
        dropped: their blocks may be another's.
        """
        state = self._state
        assert state.kept_pairs is not None
        taken = self._kernels.kept_pairs.take_pairs(
            slot_ids, state.active, state.block_tables, state.kept_pairs, self._block_size
        )
        self.forget_kept(state.rows(slot_ids))
        metadata = AttentionMetadata(
            positions=taken.positions,
            slot_mapping=taken.slot_mapping,
            block_tables=state.block_tables,
            slot_ids=slot_ids,
            first_positions=taken.positions,
            context_lens=taken.positions,
            query_len=0,
            max_query_len=1,
            max_context_len=1,
        )
        hidden = self._model.fuse(taken.features)
        self._model.write_cache(taken.tokens, hidden, metadata, self._caches)

    def _propose(
        self,
        slot_ids: torch.Tensor,
        logits_hidden: torch.Tensor,
        feedback: torch.Tensor,
        next_positions: torch.Tensor,
        sampling: SamplingRows,
        k: int,
        *,
        shared_prefix: SharedPrefix | None,
        max_context_len: int,
    ) -> None:
        """Draft k tokens for each row from its last true pair, and write them to its device row."""
        drafts: list[torch.Tensor] = []
        usable: list[torch.Tensor] = []
        for j in range(k):
            if j > 0:
                inputs = self._inputs(slot_ids, step=j)
                next_positions = inputs.next_positions
                logits_hidden, feedback = self._pass(
                    slot_ids, inputs, drafts[-1], feedback, shared_prefix, max_context_len + j
                )
            logits = self._model.compute_logits(logits_hidden)
            tokens, ok = self._draw(slot_ids, next_positions, sampling, logits, j)
            drafts.append(tokens)
            usable.append(ok)
        self._commit(slot_ids, drafts, usable)

    def _commit(
        self, slot_ids: torch.Tensor, drafts: list[torch.Tensor], usable: list[torch.Tensor]
    ) -> None:
        """Write drafts (int32 [B] each) to the rows, up to the first that is not usable."""
        state, none = self._state, slot_ids.new_empty((0, slot_ids.numel()))
        self._kernels.commit.commit_drafts(
            slot_ids,
            torch.stack(drafts) if drafts else none,
            torch.stack(usable) if usable else none.bool(),
            state.seq_lens,
            state.active,
            state.draft_limits,
            self._position_limit,
            state.draft_tokens,
            state.num_draft_tokens,
        )

    def _inputs(self, slot_ids: torch.Tensor, step: int) -> DraftInputs:
        """What a pass over one pair a row needs; see ``draft_inputs``."""
        state = self._state
        inputs: DraftInputs = self._kernels.batch_inputs.draft_inputs(
            slot_ids, state.seq_lens, state.active, state.block_tables, step, self._block_size
        )
        return inputs

    def _pass(
        self,
        slot_ids: torch.Tensor,
        inputs: DraftInputs,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        shared_prefix: SharedPrefix | None,
        max_context_len: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one pair a row: a token and the hidden state before it."""
        metadata = AttentionMetadata(
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            block_tables=self._state.block_tables,
            slot_ids=slot_ids,
            first_positions=inputs.positions,
            context_lens=inputs.context_lens,
            query_len=1,
            max_query_len=1,
            max_context_len=max_context_len,
            shared_prefix=shared_prefix,
        )
        return self._model.forward(tokens, hidden, metadata, self._caches)

    def _draw(
        self,
        slot_ids: torch.Tensor,
        positions: torch.Tensor,
        sampling: SamplingRows,
        logits: torch.Tensor,
        j: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft j of each row from logits [B, Vd]: tokens int32 [B] (target ids), bool [B].

        A row whose logits broke gets -1 and false, an inert one -1 and true.
        """
        state, gumbel = self._state, self._kernels.gumbel
        if self._sampled:
            assert state.draft_logits is not None, "sampled drafts keep their logits"
            tokens, ok = gumbel.gumbel_sample(
                logits[:, None, :],
                sampling.temperature,
                sampling.seeds,
                positions[:, None],
                sampling.sample_index,
                DRAFT,
                j,
                None,
                self._model.target_ids,
                slot_ids,
                state.draft_logits[:, j],  # q is what was sampled
            )
        else:
            tokens, ok = gumbel.greedy_sample(
                logits[:, None, :], positions[:, None], self._model.target_ids
            )
        return tokens[:, 0], ok[:, 0]

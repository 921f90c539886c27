"""A step on the device: prefill chunks, or one round of verify, commit and draft.

Nothing in here reads a device value on the host. The one thing a step hands back is a small record
on the device, which is copied out behind it and read later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from specgen.kernels import Kernels
from specgen.kernels.batch_types import CommitResult
from specgen.models.attention import AttentionMetadata
from specgen.models.target import TargetModel
from specgen.pipeline.decode_graphs import DecodeGraphs
from specgen.pipeline.drafter import Drafter
from specgen.pipeline.input_batch import PrefillBatch
from specgen.pipeline.kv_cache import KVCache
from specgen.pipeline.prefill_graphs import PrefillGraphs
from specgen.pipeline.rejection_sampler import RejectionSampler
from specgen.pipeline.request import Request
from specgen.pipeline.request_state import NUM_KEPT_PAIRS, RequestState
from specgen.pipeline.sampler import Sampler
from specgen.pipeline.shared_prefix import SharedRows
from specgen.pipeline.uploads import upload

_NUM_TIMED_STEPS = 4
_MOST_ROWS_OF_KEPT = 256  # whose pairs are written to the draft's cache at a time
_TOKEN_STRIDE = 7919  # a prime, so that rows of a timed step begin with tokens of their own


class ModelRunner:
    """Runs steps of one target (and draft) over the persistent rows.

    Args:
        block_size: Tokens of a cache block.
        vocab_size: Token ids that the target has.
        shared_rows: Finds what rows share; ``None``: every row reads its own blocks.
        max_context_len: Host bound on any row's context, for captured graphs.
        graphs: Replays decode steps as CUDA graphs; ``None`` launches them one by one.
        prefill_graphs: The same for the target's passes over few prompt tokens.
    """

    def __init__(
        self,
        target: TargetModel,
        caches: tuple[KVCache, ...],
        kernels: Kernels,
        state: RequestState,
        rejection_sampler: RejectionSampler,
        drafter: Drafter | None,
        *,
        block_size: int,
        vocab_size: int,
        max_context_len: int,
        graphs: DecodeGraphs | None = None,
        prefill_graphs: PrefillGraphs | None = None,
        shared_rows: SharedRows | None = None,
    ) -> None:
        self._target = target
        self._caches = caches
        self._kernels = kernels
        self._state = state
        self._sampler = Sampler(kernels, state)
        self._rejection_sampler = rejection_sampler
        self._drafter = drafter
        self._needs_all_states = drafter is not None and drafter.needs_all_states
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._max_context_len = max_context_len
        self._graphs = graphs
        self._prefill_graphs = prefill_graphs
        self._shared_rows = shared_rows
        # Rows whose pairs of steps without drafts are not in the draft's cache yet, and such steps.
        self._slots_of_kept: set[int] = set()
        self._num_kept = 0

    @torch.inference_mode()
    def prefill(self, batch: PrefillBatch, num_speculative_tokens: int) -> torch.Tensor:
        """Run prompt chunks; sample the first token of fresh requests; draft for all that start.

        Args:
            num_speculative_tokens: drafts to make.

        Returns:
            A record of the fresh requests, in the order of the chunks; see :mod:`.step_record`.
        """
        state = self._state
        hidden, aux = self._run_prompts(batch)
        slots = torch.cat((batch.fresh_slots, batch.resumed_slots))
        # Not by indexing: torch would upload the scalar, and wait for it.
        state.active.index_fill_(0, slots.long(), True)
        last_hidden = hidden
        if self._needs_all_states:
            last_hidden = batch.last.at_queries(hidden)
        logits = self._target.compute_logits(last_hidden[batch.fresh_rows])
        tokens, ok = self._sampler.sample(
            logits, batch.fresh_slots, needs_filter=batch.needs_filter
        )
        num_sampled = ok.to(torch.int32)
        committed = self._commit(
            batch.fresh_slots, tokens, num_sampled, ok, torch.zeros_like(num_sampled)
        )
        if self._drafter is not None:
            self._drafter.forget_kept(slots.long())
            next_ids = batch.next_ids
            next_ids[batch.fresh_idx] = tokens[:, 0].clamp_min(0)
            self._drafter.after_prefill(
                batch,
                self._drafter.features(hidden, aux),
                next_ids,
                slots,
                torch.cat((batch.fresh_idx, batch.resumed_idx)),
                num_speculative_tokens,
            )
        return committed.record

    def padded_prefill_size(self, num_tokens: int) -> tuple[int, int] | None:
        """Tokens and rows that chunks of ``num_tokens`` in all are best padded to, if any."""
        if self._prefill_graphs is None:
            return None
        return self._prefill_graphs.padded_size(num_tokens)

    def _run_prompts(self, batch: PrefillBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the target over a batch of chunks; hidden states of all tokens or of last ones."""

        def run_pass(
            input_ids: torch.Tensor, metadata: AttentionMetadata, last: AttentionMetadata
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            wanted = None if self._needs_all_states else last
            return self._target.forward(input_ids, metadata, self._caches, wanted)

        inputs = (batch.input_ids, batch.metadata, batch.last)
        if self._prefill_graphs is not None:
            replayed = self._prefill_graphs.run(*inputs, run_pass)
            if replayed is not None:
                return replayed
        return run_pass(*inputs)

    def decode(
        self, requests: Sequence[Request], num_speculative_tokens: int, max_num_tokens: int
    ) -> torch.Tensor:
        """Run one decode step of ``requests``; see :meth:`decode_step`.

        Args:
            max_num_tokens: bound on the committed tokens of the longest row.
        """
        slots = [-1 if r.slot is None else r.slot for r in requests]
        needs_filter = any(r.needs_filter for r in requests)
        drafts = any(r.num_speculative_tokens for r in requests)
        if drafts:
            self._keep_or_write(slots, num_speculative_tokens)
        shares = self._shared_rows is not None and self._shared_rows.follow(requests)
        return self._decode(
            slots, num_speculative_tokens, needs_filter, drafts, shares, max_num_tokens
        )

    def _keep_or_write(self, slots: Sequence[int], num_speculative_tokens: int) -> None:
        """Before a step that drafts, or has no room to keep pairs, write those that are kept."""
        if self._drafter is None or not self._drafter.keeps_pairs:
            return
        if num_speculative_tokens > 0 or self._num_kept == NUM_KEPT_PAIRS:
            kept, self._slots_of_kept, self._num_kept = sorted(self._slots_of_kept), set(), 0
            for start in range(0, len(kept), _MOST_ROWS_OF_KEPT):
                self._write_kept(kept[start : start + _MOST_ROWS_OF_KEPT])
        if num_speculative_tokens == 0:
            self._slots_of_kept.update(slots)
            self._num_kept += 1

    @torch.inference_mode()
    def _write_kept(self, slots: list[int]) -> None:
        assert self._drafter is not None
        if self._graphs is not None:
            self._graphs.run(slots, "kept", self._kept_step)
        else:
            self._kept_step(upload(np.array(slots, dtype=np.int32), self._state.device))

    def _kept_step(self, slot_ids: torch.Tensor) -> torch.Tensor:
        """The unit of a CUDA graph, which has no record."""
        assert self._drafter is not None
        self._drafter.write_kept(slot_ids)
        return slot_ids

    def rows_were_admitted(self) -> None:
        """A row that comes back may have other blocks than when it was last seen."""
        if self._shared_rows is not None:
            self._shared_rows.forget()

    def time_inert_step(self, num_rows: int, num_speculative_tokens: int) -> float:
        """Seconds of a decode step whose rows are all inert; waits for the device.

        Rows that run over one token alone would draw far less power than real ones, so that a GPU
        would time them at a clock that real steps never see.
        """
        last = self._vocab_size - num_speculative_tokens
        run = partial(
            self._decode,
            [-1 - i * _TOKEN_STRIDE % max(last, 1) for i in range(num_rows)],
            num_speculative_tokens,
            needs_filter=False,
            keeps_drafts=True,
            shares_blocks=False,
            max_num_tokens=1,
            exact=True,
        )
        num_steps = 1  # on a CPU a step takes long, and has nothing to capture or to compile
        if self._state.device.type == "cuda":
            run()
            num_steps = _NUM_TIMED_STEPS
        self._wait()
        started = time.perf_counter()
        for _ in range(num_steps):
            run()
        self._wait()
        return (time.perf_counter() - started) / num_steps

    def _wait(self) -> None:
        if self._state.device.type == "cuda":
            torch.cuda.synchronize(self._state.device)

    @torch.inference_mode()
    def _decode(
        self,
        slots: list[int],
        num_speculative_tokens: int,
        needs_filter: bool,
        keeps_drafts: bool,
        shares_blocks: bool,
        max_num_tokens: int,
        exact: bool = False,
    ) -> torch.Tensor:
        k = num_speculative_tokens
        variant = (k, needs_filter, keeps_drafts, shares_blocks)
        if self._graphs is not None:

            def step(graph_slots: torch.Tensor) -> torch.Tensor:
                return self.decode_step(graph_slots, *variant, self._max_context_len)

            return self._graphs.run(slots, variant, step, exact=exact)
        slot_ids = upload(np.array(slots, dtype=np.int32), self._state.device)
        # The draft passes may look ahead beyond what the step commits.
        max_context_len = max_num_tokens + 2 * k + 1
        return self.decode_step(slot_ids, *variant, max_context_len)

    def decode_step(
        self,
        slot_ids: torch.Tensor,
        num_speculative_tokens: int,
        needs_filter: bool,
        keeps_drafts: bool,
        shares_blocks: bool,
        max_context_len: int,
    ) -> torch.Tensor:
        """Target over k+1 positions a row, judge, commit, draft again: the unit of a CUDA graph.

        Args:
            slot_ids: int32 [B], -1 on padding rows.
            num_speculative_tokens: k of this step, and of the drafts made for the next.
            keeps_drafts: whether a row may draft, now or later; otherwise the draft is left out.
            shares_blocks: whether blocks that rows share are read once for all of them.
            max_context_len: host bound on the context of any row in the step.

        Returns:
            Record int32 [B, k + 1 + 4]; see :mod:`.step_record`.
        """
        state, k = self._state, num_speculative_tokens
        inputs = self._kernels.batch_inputs.decode_inputs(
            slot_ids,
            state.last_tokens,
            state.draft_tokens,
            state.num_draft_tokens,
            state.seq_lens,
            state.active,
            state.block_tables,
            k,
            self._block_size,
        )
        shared_prefix = None
        if shares_blocks and self._shared_rows is not None:
            shared_prefix = self._shared_rows.tensors
        metadata = AttentionMetadata(
            positions=inputs.positions.flatten(),
            slot_mapping=inputs.slot_mapping.flatten(),
            block_tables=state.block_tables,
            slot_ids=slot_ids,
            first_positions=inputs.first_positions,
            context_lens=inputs.context_lens,
            query_len=k + 1,
            query_start_loc=None,
            max_query_len=k + 1,
            max_context_len=max_context_len,
            shared_prefix=shared_prefix,
        )
        sampling = state.sampling_rows(self._kernels, slot_ids)
        lane_noise = self._rejection_sampler.look_ahead(inputs, sampling)
        hidden, aux = self._target.forward(inputs.input_ids.flatten(), metadata, self._caches)
        logits = self._target.compute_logits(hidden).unflatten(0, (-1, k + 1))
        tokens, num_sampled, ok = self._rejection_sampler.verify(
            logits, slot_ids, inputs, sampling, lane_noise, needs_filter=needs_filter
        )
        committed = self._commit(slot_ids, tokens, num_sampled, ok, inputs.num_draft_tokens)
        if self._drafter is not None and keeps_drafts:
            features = self._drafter.features(hidden, aux)
            self._drafter.after_decode(
                slot_ids,
                inputs,
                tokens,
                committed,
                features,
                sampling,
                shared_prefix=shared_prefix,
                max_context_len=max_context_len,
            )
        return committed.record

    def _commit(
        self,
        slot_ids: torch.Tensor,
        tokens: torch.Tensor,
        num_sampled: torch.Tensor,
        ok: torch.Tensor,
        num_draft_tokens: torch.Tensor,
    ) -> CommitResult:
        state = self._state
        result: CommitResult = self._kernels.commit.commit_tokens(
            slot_ids,
            tokens,
            num_sampled,
            ok,
            num_draft_tokens,
            state.stop_ids,
            state.max_lens,
            state.seq_lens,
            state.last_tokens,
            state.active,
        )
        return result

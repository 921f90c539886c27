"""What the next step does: which rows prefill, which decode, and who gives way.

Prefill and decode steps are apart: a prefill step packs chunks of several prompts up to a token
budget, because a matrix product of a few thousand rows costs far less a token than a prompt at a
time; a decode step runs every admitted row.

The host may be steps behind the device (see :mod:`.in_flight`). A row with steps under way has
between ``num_pending_steps`` and ``num_pending_tokens`` tokens more than the host knows, or has
ended. Blocks are granted for the most it can have; a row that must have ended is left out. Slots
and blocks of a row are given back when its last record is read: what is launched later comes later
in the device's one stream, so no step under way can meet their next owner. Nothing is taken from a
row whose records are still to come: before a row gives way, all records are read.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from specgen.pipeline.block_manager import BlockManager
from specgen.pipeline.draft_length import DraftLength, FixedDraftLength
from specgen.pipeline.request import Request
from specgen.pipeline.step_limits import StepLimits
from specgen.pipeline.waiting_queue import WaitingQueue


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens ``start .. start + num_tokens`` of a request, run in one prefill step."""

    request: Request
    start: int
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the request enters decode after this chunk."""
        return self.start + self.num_tokens == self.request.num_prefill_tokens


@dataclass(frozen=True)
class ScheduledStep:
    """A step: either ``chunks`` to prefill or ``decode`` rows; plus the host's edits before it.

    Attributes:
        admitted: Requests that got a slot; their device rows must be written.
        grown: Requests whose block list changed; their block tables must be written.
        preempted: Slots taken back; their device rows must be made inert first.
        max_num_tokens: Committed tokens that the longest row of a decode step may have.
        num_speculative_tokens: The draft length k of a decode step; of a prefill step, how many
            drafts to make for the rows that start.
    """

    chunks: tuple[PrefillChunk, ...] = ()
    decode: tuple[Request, ...] = ()
    admitted: tuple[Request, ...] = ()
    grown: tuple[Request, ...] = ()
    preempted: tuple[int, ...] = ()
    num_speculative_tokens: int = 0
    max_num_tokens: int = 0


class Scheduler:
    """Grants slots, blocks and prefill tokens; preempts by recomputation when blocks run out.

    Args:
        max_num_seqs: Slots.
        max_num_batched_tokens: Prompt tokens of one prefill step.
        num_speculative_tokens: k of the engine, or the largest; 0 without a draft.
        draft_length: Chooses the k of a step; without it, k never changes.
        min_prefill_tokens: Do not interrupt decoding for fewer prompt tokens than this, unless a
            quarter of the slots is free.
    """

    def __init__(
        self,
        *,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_speculative_tokens: int,
        draft_length: DraftLength | None = None,
        min_prefill_tokens: int = 1024,
    ) -> None:
        self.blocks = block_manager
        self.waiting = WaitingQueue()
        self.prefilling: list[Request] = []
        self.running: list[Request] = []  # in order of admission
        self.num_prompt_tokens_shared = 0  # prompt tokens that needed no prefill
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.limits = StepLimits(max_num_seqs, max_num_batched_tokens)
        self._min_prefill_tokens = min_prefill_tokens
        self._num_speculative_tokens = num_speculative_tokens
        self.draft_length = draft_length or FixedDraftLength(num_speculative_tokens)
        # Rows whose block list changed, until a step takes the news to the device.
        self._grown: list[Request] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting, prefilling or decoding."""
        return bool(self.waiting or self.prefilling or self.running)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests; the caller has checked that each fits the cache alone."""
        self.waiting.add(requests)

    def max_blocks_of(self, request: Request) -> int:
        """Blocks the request can ever hold, its drafts' look-ahead included."""
        return self.blocks.num_blocks_for(request.max_len + self._lookahead)

    @property
    def _lookahead(self) -> int:
        # Before a step with n committed tokens, its k+1 queries reach position n - 1 + k, and the
        # draft passes after it, should all k+1 tokens commit, n + 2k - 1.
        return 2 * self._num_speculative_tokens

    def schedule(self) -> ScheduledStep | None:
        """Choose the next step; ``None`` when there is none before another record is read."""
        if self.prefilling or self._should_admit():
            step = self._schedule_prefill()
            if step.chunks:
                return step
        if self.running:
            return self._schedule_decode()
        if self.waiting:
            raise AssertionError("a waiting request does not fit an empty cache")
        return None

    @property
    def _num_free(self) -> int:
        """Rows that may be admitted now."""
        return self.limits.num_seqs - len(self.running) - len(self.prefilling)

    def _should_admit(self) -> bool:
        num_free = self._num_free
        if not self.waiting or num_free <= 0:
            return False
        if not self.running:
            return True
        if num_free * 4 >= self.limits.num_seqs:
            return True
        num_tokens = 0
        for request in itertools.islice(self.waiting, num_free):
            # What is in the cache already is no work.
            known = self.blocks.num_known(request.prefix_keys) * self.blocks.block_size
            num_tokens += request.num_prefill_tokens - known
            if num_tokens >= self._min_prefill_tokens:
                return True
        return False

    def _schedule_prefill(self) -> ScheduledStep:
        """Chunks of the rows that prefill, then of waiting ones, up to the token budget."""
        chunks: list[PrefillChunk] = []
        admitted: list[Request] = []
        budget = self.limits.num_tokens
        for request in self.prefilling:
            budget -= self._add_chunk(chunks, request, budget)
        while (
            budget > 0 and self.waiting and self._num_free > 0 and self._admit(self.waiting.first)
        ):
            request = self.waiting.pop()
            admitted.append(request)
            # Scheduled before the next row is admitted: that one may share what this one writes.
            budget -= self._add_chunk(chunks, request, budget)
        starting = [chunk.request for chunk in chunks if chunk.is_last]
        return ScheduledStep(
            chunks=tuple(chunks),
            admitted=tuple(admitted),
            grown=tuple(admitted),
            num_speculative_tokens=self._choose_k([*self.running, *starting]) if starting else 0,
        )

    def _admit(self, request: Request) -> bool:
        """Give a request a slot and all blocks of its prefill, if there are enough."""
        num_tokens = request.num_tokens + self._lookahead + 1
        shared = self.blocks.match(request.prefix_keys)
        num_missing = self.blocks.num_blocks_for(num_tokens) - len(shared)
        # Leave every decoding row a block to grow by: a row that is admitted only to be preempted a
        # step later would be recomputed again and again.
        if self.blocks.num_free - num_missing < len(self.running):
            self.blocks.release(shared)
            return False
        request.num_computed_tokens = len(shared) * self.blocks.block_size
        request.block_ids = shared
        self.blocks.grow(request.block_ids, num_tokens)
        request.slot = self._free_slots.pop()
        self.prefilling.append(request)
        self.num_prompt_tokens_shared += request.num_computed_tokens
        return True

    def _add_chunk(self, chunks: list[PrefillChunk], request: Request, budget: int) -> int:
        """Schedule as much of a request's prefill as the budget allows; returns its tokens."""
        start = request.num_computed_tokens
        num_tokens = min(budget, request.num_prefill_tokens - start)
        if num_tokens > 0:
            chunks.append(PrefillChunk(request, start, num_tokens))
            self.blocks.publish(request.block_ids, request.prefix_keys, start + num_tokens)
        return num_tokens

    def _schedule_decode(self) -> ScheduledStep | None:
        """Decode every running row that has, or can get, the blocks its step may write."""
        preempted: list[int] = []
        ready: list[Request] = []
        # Oldest first: the newest row gives way, so the oldest always makes progress.
        queue = deque(self.running)
        block_size, ahead = self.blocks.block_size, self._lookahead + 1
        max_num_tokens = 0
        while queue:
            request = queue.popleft()
            num_tokens, max_len = request.num_tokens, request.max_len
            if request.num_pending_steps:
                if num_tokens + request.num_pending_steps >= max_len:
                    continue  # a step under way is its last
                num_tokens = min(num_tokens + request.num_pending_tokens, max_len - 1)
            if num_tokens > max_num_tokens:
                max_num_tokens = num_tokens
            if num_tokens + ahead <= len(request.block_ids) * block_size:  # as in most steps
                ready.append(request)
                continue
            while not self._grow(request, num_tokens + ahead):
                if any(other.num_pending_steps for other in self.running):
                    return None  # rows may have ended, and this one may need less
                victim = queue.pop() if queue else request
                preempted.append(self._preempt(victim))
                if victim is request:
                    break
            else:
                ready.append(request)
        if not ready and not preempted:
            return None  # all rows end in the steps under way
        k = self._choose_k(ready) if ready else 0
        for request in ready:
            request.num_pending_steps += 1
            request.num_pending_tokens += k + 1
        grown, self._grown = self._grown, []
        return ScheduledStep(
            decode=tuple(ready),
            grown=tuple(request for request in grown if request.slot is not None),
            preempted=tuple(preempted),
            num_speculative_tokens=k,
            max_num_tokens=max_num_tokens,
        )

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Give a row the blocks for ``num_tokens``; whether there were enough."""
        num_held = len(request.block_ids)
        if not self.blocks.grow(request.block_ids, num_tokens):
            return False
        if len(request.block_ids) > num_held:
            self._grown.append(request)
        return True

    def _choose_k(self, requests: list[Request]) -> int:
        """The draft length of a step of these rows."""
        limit = max(request.num_speculative_tokens for request in requests)
        return self.draft_length.choose(len(requests), limit)

    def _preempt(self, request: Request) -> int:
        """Take everything from a running row and put it first in the queue; return its slot."""
        self.running.remove(request)
        slot = self._release(request)
        self.waiting.put_back(request)
        return slot

    def preempt_all(self) -> list[int]:
        """Preempt every admitted row (a test's tool, and the way out of memory trouble)."""
        slots = [self._preempt(request) for request in reversed(self.running)]
        for request in reversed(self.prefilling):
            slots.append(self._release(request))
            self.waiting.put_back(request)
        self.prefilling.clear()
        # Blocks are published when their step is scheduled; it may be the one that failed.
        self.blocks.forget_prefixes()
        return slots

    def give_up(self, request: Request) -> None:
        """Drop a waiting request for good."""
        self.waiting.remove(request)

    def prefill_done(self, chunks: Iterable[PrefillChunk]) -> None:
        """Record the progress of a prefill step; completed requests start decoding.

        A fresh one has its first token under way.
        """
        for chunk in chunks:
            request = chunk.request
            if chunk.is_last:
                self.prefilling.remove(request)
                self.running.append(request)
                if not request.is_resuming:
                    request.num_pending_steps = request.num_pending_tokens = 1
            request.num_computed_tokens += chunk.num_tokens

    def record_read(self, requests: Iterable[Request], max_num_tokens: int) -> None:
        """A step under way is no more: what it added to its rows becomes known tokens."""
        for request in requests:
            if request.num_pending_steps:  # none if it has ended
                request.num_pending_steps -= 1
                request.num_pending_tokens -= max_num_tokens

    def finish(self, request: Request) -> None:
        """Take a finished row out of the batch."""
        self.running.remove(request)
        self._release(request)

    def _release(self, request: Request) -> int:
        slot = request.slot
        assert slot is not None, "only admitted requests hold anything"
        self.blocks.release(request.block_ids)
        self._free_slots.append(slot)
        request.slot = None
        request.num_pending_steps = request.num_pending_tokens = 0
        return slot

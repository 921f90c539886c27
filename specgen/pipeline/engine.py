"""The engine: rows in, steps on the device, finished rows out."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from specgen.config import EngineConfig
from specgen.errors import RequestError
from specgen.kernels.batch_types import FINISH_ERROR, FINISH_STOP, RUNNING
from specgen.pipeline.block_manager import prefix_keys
from specgen.pipeline.detokenizer import StopStringWatcher, detokenize
from specgen.pipeline.in_flight import ReadStep
from specgen.pipeline.input_batch import build_prefill_batch
from specgen.pipeline.loading import build_pipeline
from specgen.pipeline.prompt_checks import fitted_prompt
from specgen.pipeline.request import (
    ChoiceOutput,
    PromptRow,
    Request,
    RequestOutput,
    row_seed,
)
from specgen.pipeline.scheduler import ScheduledStep
from specgen.pipeline.step_record import RowRecord
from specgen.resolve import resolve
from specgen.stats import SpeculationStats


class Engine:
    """Generates completions for prompt rows in continuous batches.

    Example:
        >>> engine = Engine(EngineConfig())
        >>> for output in engine.generate(rows):
        ...     print(output.choices[0].text)

    Raises:
        SpecgenError: a model is missing or unfit, or the machine lacks what was asked for.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = resolve(config)
        self._pipeline = build_pipeline(self.config)
        self._tokenizer = self._pipeline.tokenizer
        self._runner = self._pipeline.runner
        self._state = self._pipeline.state
        self._scheduler = self._pipeline.scheduler
        self._in_flight = self._pipeline.in_flight
        self._groups: dict[int, list[Request]] = {}  # by id of the first sample
        self._watchers: dict[int, StopStringWatcher] = {}  # by id of the request
        self._finished: deque[RequestOutput] = deque()  # not handed out yet
        # The last row that ran out of memory by itself, and how far it had come.
        self._failed_alone: tuple[Request, int] | None = None
        self._num_memory_faults = 0
        self._num_generated_tokens = 0
        self._num_steps = 0
        self._num_decode_steps_by_k: Counter[int] = Counter()
        self._num_graphs = 0  # at the last decode step

    @property
    def num_running(self) -> int:
        """Samples that hold a device row."""
        return len(self._scheduler.running) + len(self._scheduler.prefilling)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated so far, those of unfinished rows included."""
        return self._num_generated_tokens

    @property
    def num_prompt_tokens_shared(self) -> int:
        """Prompt tokens whose cache entries another row had already computed."""
        return self._scheduler.num_prompt_tokens_shared

    @property
    def num_steps(self) -> int:
        """Steps launched so far, prefill and decode."""
        return self._num_steps

    @property
    def num_decode_steps_by_k(self) -> Counter[int]:
        """Decode steps launched so far, by their draft length k."""
        return self._num_decode_steps_by_k.copy()

    @property
    def num_memory_faults(self) -> int:
        """Steps that ran out of memory and were done again with less."""
        return self._num_memory_faults

    @property
    def num_waiting(self) -> int:
        """Samples that wait for a device row."""
        return len(self._scheduler.waiting)

    def has_unfinished(self) -> bool:
        """Whether :meth:`step` has anything to do or to hand out."""
        return self._scheduler.has_unfinished or bool(self._finished)

    def add_request(self, row: PromptRow) -> None:
        """Tokenise a row and queue its samples.

        Raises:
            RequestError: the row cannot be run; nothing was queued.
        """
        requests = self._requests(row)
        for request in requests:
            self._groups[id(request)] = requests
            if row.sampling.stop:
                self._watchers[id(request)] = StopStringWatcher(
                    self._tokenizer, request.prompt_token_ids, row.sampling.stop
                )
        self._scheduler.add(requests)

    def step(self) -> list[RequestOutput]:
        """Launch a step and account for the one whose record is due; return finished rows."""
        self._advance()
        return self.take_finished()

    def generate(self, rows: Iterable[PromptRow]) -> Iterator[RequestOutput]:
        """Run rows to their end, pulling them as slots come free; yields in order of completion.

        A row that cannot be run comes out at once, with its ``error``. Rows that have a method
        ``ready`` are waited for only when there is nothing else to do.
        """
        source = iter(rows)
        ready: Callable[[], bool] = getattr(rows, "ready", lambda: True)
        exhausted = False
        while True:
            while not exhausted and self.num_waiting < self._pipeline.max_num_waiting:
                if self.has_unfinished() and not ready():
                    break
                row = next(source, None)
                if row is None:
                    exhausted = True
                    break
                try:
                    self.add_request(row)
                except RequestError as error:
                    yield RequestOutput(row, (), (), error)
            if not self.has_unfinished():
                return
            self._advance()
            while self._finished:
                # Taken out only after the caller has come back: what it was handed when it was
                # interrupted is still there.
                yield self._finished[0]
                self._finished.popleft()

    def take_finished(self) -> list[RequestOutput]:
        """Finished rows that were not handed out, for example because a signal came between.

        The row that :meth:`generate` handed out last may be among them.
        """
        outputs = list(self._finished)
        self._finished.clear()
        return outputs

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """While it lasts, every batch size that occurs gets a CUDA graph of its own at once.

        Otherwise a batch that shrinks goes on in a larger graph as long as that is cheaper than a
        capture, so that an engine has all of them only after a while.
        """
        graphs = self._pipeline.graphs
        if graphs is not None:
            graphs.captures_every_size = True
        try:
            yield
        finally:
            if graphs is not None:
                graphs.captures_every_size = False

    def describe(self) -> dict[str, Any]:
        """Effective settings, for the log and the output's metadata."""
        return self._pipeline.describe()

    def preempt_all(self) -> None:
        """Send every admitted row back to the queue; they resume by recomputation."""
        while self._in_flight:
            self._read_record()
        self._state.deactivate(self._scheduler.preempt_all())

    # -- a step, piece by piece ---------------------------------------------------------------

    def _advance(self) -> None:
        """Launch a step, then read the record that is due; what it ends goes to ``_finished``."""
        scheduled = self._scheduler.schedule()
        if scheduled is not None and not self._launch(scheduled):
            self._make_room(scheduled)
        elif scheduled is None or self._in_flight.is_full:
            self._read_record()

    def _launch(self, scheduled: ScheduledStep) -> bool:
        """Put a step on the device behind those under way; False if memory ran out."""
        self._num_steps += 1
        try:
            self._apply_edits(scheduled)
            if scheduled.chunks:
                self._prefill(scheduled)
            elif scheduled.decode:
                self._decode(scheduled)
        except torch.OutOfMemoryError:
            return False  # and let go of the tensors that the error's frames hold
        self._scheduler.limits.step_succeeded()
        return True

    def _make_room(self, scheduled: ScheduledStep) -> None:
        """Undo a step that ran out of memory: its rows wait again, and fewer will run at a time.

        Device rows may be half written; what the host knows of a row is enough to resume it. A row
        that fails alone twice at the same token becomes an error row.
        """
        self._num_memory_faults += 1
        self._pipeline.release_memory()
        self.preempt_all()  # after the records of the steps before it
        requests = [chunk.request for chunk in scheduled.chunks] or list(scheduled.decode)
        num_tokens = sum(chunk.num_tokens for chunk in scheduled.chunks)
        limits = self._scheduler.limits
        limits.cap(self._pipeline.max_num_rows)
        if limits.num_seqs < len(requests) or limits.shrink(len(requests), num_tokens):
            return
        (request,) = requests
        if request.has_ended:
            return
        if self._failed_alone != (request, request.num_tokens):
            self._failed_alone = (request, request.num_tokens)
            return
        self._failed_alone = None
        self._scheduler.give_up(request)
        request.finish_reason = "error"
        request.error = RequestError(
            "out_of_memory",
            f"the row does not fit the memory at token {request.num_tokens}, even alone",
            request.row.line,
        )
        output = self._finish(request)
        if output is not None:
            self._finished.append(output)

    def _apply_edits(self, scheduled: ScheduledStep) -> None:
        """The host's edits of device rows, in stream order before the step."""
        self._state.deactivate(scheduled.preempted)
        if scheduled.admitted:
            self._runner.rows_were_admitted()
            if self._state.admit(scheduled.admitted):
                self._pipeline.forget_graphs()
        self._state.write_block_tables(scheduled.grown)

    def _prefill(self, scheduled: ScheduledStep) -> None:
        num_tokens = sum(chunk.num_tokens for chunk in scheduled.chunks)
        batch = build_prefill_batch(
            scheduled.chunks,
            self._state,
            self.config.block_size,
            self._runner.padded_prefill_size(num_tokens),
        )
        record = self._runner.prefill(batch, scheduled.num_speculative_tokens)
        self._scheduler.prefill_done(scheduled.chunks)
        last = [chunk.request for chunk in scheduled.chunks if chunk.is_last]
        fresh = [request for request in last if not request.is_resuming]
        self._in_flight.push(fresh, record, None)

    def _decode(self, scheduled: ScheduledStep) -> None:
        k = scheduled.num_speculative_tokens
        record = self._runner.decode(scheduled.decode, k, scheduled.max_num_tokens)
        self._num_decode_steps_by_k[k] += 1
        # A step that waited for a capture, or for the measurement of others, tells nothing.
        num_graphs, self._num_graphs = self._num_graphs, self._pipeline.num_graphs
        is_timed = num_graphs == self._num_graphs
        self._in_flight.push(scheduled.decode, record, k, is_timed=is_timed)

    def _read_record(self) -> None:
        """Wait for the oldest step under way, if there is one, and account for it."""
        if self._in_flight:
            step = self._in_flight.pop()
            self._update(step)
            if (k := step.num_speculative_tokens) is not None:
                num_rows = len(step.requests)
                self._scheduler.draft_length.observe(step.records, num_rows, k, step.seconds)
        if not self._scheduler.has_unfinished:
            self._in_flight.clear()

    def _update(self, step: ReadStep) -> None:
        """Account for a step; collect the rows whose last sample ended."""
        self._scheduler.record_read(step.requests, step.max_num_tokens)
        stopped_by_host: list[int] = []
        pairs = zip(step.requests, step.records, strict=True)
        # The others ended in an earlier step, or were ended here by a stop string.
        for request, record in [pair for pair in pairs if not pair[0].has_ended]:
            slot = request.slot
            assert slot is not None, "a row gave way before its record was read"
            self._account(request, record)
            if not request.has_ended:
                continue
            if record.finish == RUNNING:
                stopped_by_host.append(slot)
            self._scheduler.finish(request)
            output = self._finish(request)
            if output is not None:
                self._finished.append(output)
        self._state.deactivate(stopped_by_host)

    def _account(self, request: Request, record: RowRecord) -> None:
        token_ids, num_sampled, num_draft_tokens, finish = record
        if finish == FINISH_ERROR:
            request.finish_reason = "error"
            request.error = RequestError(
                "bad_logits",
                f"the model's logits were NaN or infinite at token {request.num_tokens}",
                request.row.line,
            )
            return
        watcher = self._watchers.get(id(request)) if self._watchers else None
        match = None
        ends_with_stop_token = finish == FINISH_STOP
        if watcher is not None:
            watched = token_ids[:-1] if ends_with_stop_token else token_ids
            match = next((m for t in watched if (m := watcher.push(t)) is not None), None)
        if match is not None:
            token_ids = token_ids[: match.num_tokens - len(request.output_token_ids)]
            request.text = match.text
        request.output_token_ids += token_ids
        num_committed = len(token_ids)
        self._num_generated_tokens += num_committed
        if num_draft_tokens > 0:
            request.stats.add_spec_step(num_draft_tokens, num_sampled - 1, num_committed)
        else:
            request.stats.add_plain(num_committed)
        if match is not None:
            request.finish_reason, request.stop_reason = "stop", match.stop
        elif ends_with_stop_token:
            last = token_ids[-1]
            is_eos = last in self.config.eos_token_ids and not request.row.sampling.ignore_eos
            request.finish_reason, request.stop_reason = "stop", None if is_eos else last
        elif finish != RUNNING:
            request.finish_reason = "length"

    def _finish(self, request: Request) -> RequestOutput | None:
        """Close a sample; return its row's output when it was the last one."""
        self._watchers.pop(id(request), None)
        group = self._groups.pop(id(request))
        if request.text is None and request.error is None:
            token_ids = request.output_token_ids
            if request.finish_reason == "stop":  # by a token, which is no text
                token_ids = token_ids[:-1]
            request.text = detokenize(self._tokenizer, request.prompt_token_ids, token_ids)
        if not all(sample.has_ended for sample in reversed(group)):  # the last ends last
            return None
        error = next((sample.error for sample in group if sample.error is not None), None)
        return RequestOutput(
            row=request.row,
            prompt_token_ids=request.prompt_token_ids,
            choices=() if error is not None else tuple(map(_choice, group)),
            error=error,
            prompt_truncated=request.prompt_truncated,
        )

    # -- from rows to requests ------------------------------------------------------------------

    def _requests(self, row: PromptRow) -> list[Request]:
        config, sampling = self.config, row.sampling
        token_ids, truncated = fitted_prompt(row, self._tokenizer, config)
        k = config.num_speculative_tokens
        if sampling.num_speculative_tokens is not None:
            if sampling.num_speculative_tokens > k > 0:
                raise RequestError(
                    "invalid_value",
                    f'"speculative.num_speculative_tokens" must be at most the run\'s {k}, '
                    f"got {sampling.num_speculative_tokens}: raise --num-speculative-tokens",
                    row.line,
                )
            k = min(k, sampling.num_speculative_tokens)
        stop_ids = () if sampling.ignore_eos else config.eos_token_ids
        room = config.max_model_len - len(token_ids)
        max_tokens = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        first = Request(
            row=row,
            sample_index=0,
            prompt_token_ids=token_ids,
            max_len=len(token_ids) + max_tokens,
            seed=row_seed(config.seed, row.index) if sampling.seed is None else sampling.seed,
            num_speculative_tokens=k,
            stop_token_ids=tuple(dict.fromkeys((*stop_ids, *sampling.stop_token_ids))),
            stats=SpeculationStats(k, faithful=config.synthetic_rates is None),
            prefix_keys=prefix_keys(token_ids, config.block_size) if config.prefix_caching else (),
            prompt_truncated=truncated,
        )
        if self._scheduler.max_blocks_of(first) > self._scheduler.blocks.num_blocks:
            raise RequestError(
                "prompt_too_long",
                f"the row may need {first.max_len} tokens of cache, "
                f"there is room for {self._pipeline.num_cache_tokens}",
                row.line,
            )
        others = [
            replace(
                first,
                sample_index=index,
                stats=SpeculationStats(k, faithful=config.synthetic_rates is None),
                output_token_ids=[],
                block_ids=[],
            )
            for index in range(1, sampling.n)
        ]
        return [first, *others]


def _choice(request: Request) -> ChoiceOutput:
    assert request.finish_reason is not None, "only finished samples become choices"
    request.stats.check(len(request.output_token_ids))
    return ChoiceOutput(
        index=request.sample_index,
        token_ids=tuple(request.output_token_ids),
        text=request.text or "",
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        seed=request.seed,
        stats=request.stats,
    )

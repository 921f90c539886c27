"""What the end-to-end proofs share: rows, runs with forced preemption, a log of every step."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from specgen.pipeline.engine import Engine
from specgen.pipeline.request import PromptRow, Request, RequestOutput
from specgen.pipeline.step_record import RowRecord
from specgen.sampling_params import SamplingParams


def make_row(index: int, prompt: str | Sequence[int], **sampling: Any) -> PromptRow:
    """A row of text or token ids."""
    text = prompt if isinstance(prompt, str) else None
    return PromptRow(
        index=index,
        input_hash="0" * 16,
        line=index + 1,
        source="test",
        sampling=SamplingParams(**sampling),
        prompt=text,
        prompt_token_ids=None if text is not None else tuple(prompt),  # type: ignore[arg-type]
    )


def run_all(
    engine: Engine, rows: Iterable[PromptRow], *, preempt_seed: int | None = None
) -> list[RequestOutput]:
    """Run rows to their end, in order of index; with a seed, preempt everything now and then."""
    rng = random.Random(preempt_seed)
    for row in rows:
        engine.add_request(row)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
        if preempt_seed is not None and rng.random() < 0.1:
            engine.preempt_all()
    blocks = engine._scheduler.blocks
    assert blocks.num_free == blocks.num_blocks, "an idle engine holds cache blocks"
    assert not engine._state.active.any(), "an idle engine has live device rows"
    assert not engine._groups
    assert not engine._watchers
    return sorted(outputs, key=lambda output: output.row.index)


def device_rows(engine: Engine, requests: Iterable[Request]) -> Iterator[tuple[Request, int, int]]:
    """Live rows of a step that is about to run, each with its slot and its committed tokens.

    As the device has them: the host may be a step behind.
    """
    state = engine._state
    for request in requests:
        assert request.slot is not None
        if state.active[request.slot]:
            yield request, request.slot, int(state.seq_lens[request.slot])


def tokens_of(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    """Completion tokens of all samples, row after row; no row may have failed."""
    for output in outputs:
        assert output.error is None, output.error
    return [choice.token_ids for output in outputs for choice in output.choices]


def histogram_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Acceptance histogram of every sample."""
    return [c.stats.acceptance_histogram for output in outputs for c in output.choices]


@dataclass(frozen=True)
class LoggedStep:
    """One row's part of a step: where it began, what it judged and what it added."""

    request: Request
    start: int  # output tokens before the step
    record: RowRecord


@contextmanager
def step_log(engine: Engine) -> Iterator[list[LoggedStep]]:
    """Log what every step does to every row, while the context lasts."""
    log: list[LoggedStep] = []
    account = engine._account

    def spy(request: Request, record: RowRecord) -> None:
        log.append(LoggedStep(request, len(request.output_token_ids), record))
        account(request, record)

    engine._account = spy  # type: ignore[method-assign]
    try:
        yield log
    finally:
        del engine._account  # type: ignore[misc]

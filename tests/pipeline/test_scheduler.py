"""The scheduler alone, driven by a pretend device that commits a random number of tokens."""

from __future__ import annotations

import random

import pytest

from specgen.pipeline.block_manager import BlockManager
from specgen.pipeline.request import PromptRow, Request
from specgen.pipeline.scheduler import ScheduledStep, Scheduler
from specgen.sampling_params import SamplingParams
from specgen.stats import SpeculationStats


def make_request(index: int, num_prompt: int, max_tokens: int, k: int = 3) -> Request:
    row = PromptRow(index, "0" * 16, index + 1, "test", SamplingParams(), prompt="x")
    return Request(
        row=row,
        sample_index=0,
        prompt_token_ids=tuple(range(num_prompt)),
        max_len=num_prompt + max_tokens,
        seed=0,
        num_speculative_tokens=k,
        stop_token_ids=(),
        stats=SpeculationStats(k),
    )


def make_scheduler(
    num_blocks: int, *, max_num_seqs: int = 4, budget: int = 16, k: int = 3, block_size: int = 4
) -> Scheduler:
    return Scheduler(
        block_manager=BlockManager(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        num_speculative_tokens=k,
        min_prefill_tokens=8,
    )


def advance(scheduler: Scheduler, step: ScheduledStep, rng: random.Random) -> list[Request]:
    """Do to the requests what a device step would; return the finished ones."""
    done = []
    if step.chunks:
        scheduler.prefill_done(step.chunks)
        committed = [c.request for c in step.chunks if c.is_last and not c.request.is_resuming]
        grow = 1
    else:
        committed, grow = list(step.decode), rng.randint(1, step.num_speculative_tokens + 1)
    for request in committed:
        room = request.max_len - request.num_tokens
        request.output_token_ids += [7] * min(grow, room)
        if request.num_tokens == request.max_len:
            scheduler.finish(request)
            done.append(request)
    return done


@pytest.mark.parametrize("num_blocks", [14, 20, 100])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_finishes_whatever_the_cache(num_blocks: int, seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks)
    requests = [make_request(i, rng.randint(1, 25), rng.randint(1, 20)) for i in range(20)]
    scheduler.add(requests)
    finished: list[Request] = []
    for _ in range(5000):
        step = scheduler.schedule()
        if step is None:
            break
        for request in (*step.decode, *(chunk.request for chunk in step.chunks)):
            covered = len(request.block_ids) * scheduler.blocks.block_size
            assert covered >= request.num_tokens + 2 * 3, "a step may write past its blocks"
        slots = [r.slot for r in (*scheduler.running, *scheduler.prefilling)]
        assert len(set(slots)) == len(slots)
        assert None not in slots
        finished += advance(scheduler, step, rng)
        held = [r.block_ids for r in requests]
        scheduler.blocks.check(held)
    assert len(finished) == len(requests)
    assert scheduler.blocks.num_free == num_blocks


def test_a_small_cache_does_preempt() -> None:
    rng = random.Random(1)
    scheduler = make_scheduler(14)
    scheduler.add([make_request(i, 12, 20) for i in range(4)])
    preempted = 0
    while (step := scheduler.schedule()) is not None:
        preempted += len(step.preempted)
        advance(scheduler, step, rng)
    assert preempted > 0


def test_long_prompts_are_split_by_the_token_budget() -> None:
    scheduler = make_scheduler(100, budget=16)
    request = make_request(0, 40, 4)
    scheduler.add([request])
    sizes = []
    while not scheduler.running:
        step = scheduler.schedule()
        assert step is not None
        sizes.append([chunk.num_tokens for chunk in step.chunks])
        scheduler.prefill_done(step.chunks)
    assert sizes == [[16], [16], [8]]


def test_prompts_share_a_prefill_step() -> None:
    scheduler = make_scheduler(100, budget=16)
    scheduler.add([make_request(i, 5, 4) for i in range(4)])
    step = scheduler.schedule()
    assert step is not None
    assert [chunk.num_tokens for chunk in step.chunks] == [5, 5, 5, 1]


def test_a_resuming_request_prefills_all_but_its_last_token() -> None:
    request = make_request(0, 10, 10)
    assert request.num_prefill_tokens == 10
    request.output_token_ids += [1, 2]
    assert request.num_prefill_tokens == 11
    assert request.token_ids(8, 12) == [8, 9, 1, 2]
    assert request.token_ids(10, 11) == [1]


def test_k_is_zero_when_no_row_drafts() -> None:
    scheduler = make_scheduler(100)
    scheduler.add([make_request(0, 4, 8, k=0)])
    first = scheduler.schedule()
    assert first is not None
    advance(scheduler, first, random.Random(0))
    step = scheduler.schedule()
    assert step is not None
    assert step.decode
    assert step.num_speculative_tokens == 0


def test_decoding_is_not_interrupted_for_a_trickle_of_prompts() -> None:
    scheduler = make_scheduler(1000, max_num_seqs=8, budget=64)
    scheduler.add([make_request(i, 4, 30) for i in range(7)])
    rng = random.Random(0)
    for _ in range(3):
        step = scheduler.schedule()
        assert step is not None
        advance(scheduler, step, rng)
    scheduler.add([make_request(99, 3, 4)])  # one slot of eight free, three tokens: not worth it
    step = scheduler.schedule()
    assert step is not None
    assert step.decode

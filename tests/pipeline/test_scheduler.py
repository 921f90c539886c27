"""The scheduler alone, driven by a pretend device that commits a random number of tokens."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest

from specgen.pipeline.block_manager import BlockManager, prefix_keys
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


class Device:
    """Commits random numbers of tokens; the host reads what it did ``lag`` steps later."""

    def __init__(self, scheduler: Scheduler, lag: int, seed: int, k: int = 3) -> None:
        self.scheduler = scheduler
        self.k = k
        self.lag = lag
        self.rng = random.Random(seed)
        self.lengths: dict[int, int] = {}  # true ones, by id of the request
        self.unread: deque[tuple[list[tuple[Request, int]], int]] = deque()

    def run(self, step: ScheduledStep | None) -> list[Request]:
        """Launch a step and read the record that is due; return the rows it ended."""
        if step is not None:
            self.launch(step)
        if step is None or len(self.unread) > self.lag:
            return self.read() if self.unread else []
        return []

    def launch(self, step: ScheduledStep) -> None:
        width = 1
        committed = [c.request for c in step.chunks if c.is_last and not c.request.is_resuming]
        for chunk in step.chunks:
            if chunk.is_last:
                self.lengths[id(chunk.request)] = chunk.request.num_tokens
        if step.chunks:
            self.scheduler.prefill_done(step.chunks)
        else:
            committed, width = list(step.decode), step.num_speculative_tokens + 1
        gains = []
        for request in committed:
            length = self.lengths[id(request)]
            if length < request.max_len:
                covered = len(request.block_ids) * self.scheduler.blocks.block_size
                assert covered >= length + 2 * self.k, "a step may write past its blocks"
            gain = min(self.rng.randint(1, width), request.max_len - length)
            self.lengths[id(request)] += gain
            gains.append((request, gain))
        self.unread.append((gains, width))

    def read(self) -> list[Request]:
        gains, width = self.unread.popleft()
        self.scheduler.record_read([request for request, _ in gains], width)
        done = []
        for request, gain in gains:
            if request.has_ended:
                assert gain == 0
                continue
            assert request.slot is not None, "a row gave way before its record was read"
            request.output_token_ids += [7] * gain
            if request.num_tokens == request.max_len:
                request.finish_reason = "length"
                self.scheduler.finish(request)
                done.append(request)
        return done


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("num_blocks", [14, 20, 100])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_finishes_whatever_the_cache(num_blocks: int, seed: int, lag: int) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks)
    device = Device(scheduler, lag, seed)
    requests = [make_request(i, rng.randint(1, 25), rng.randint(1, 20)) for i in range(20)]
    scheduler.add(requests)
    finished: list[Request] = []
    told: dict[int, list[int]] = {}  # block tables on the device, by slot
    for _ in range(5000):
        if not scheduler.has_unfinished:
            break
        step = scheduler.schedule()
        assert step is not None or device.unread, "nothing to launch, nothing to read"
        for request in () if step is None else step.grown:
            assert request.slot is not None
            told[request.slot] = list(request.block_ids)
        for request in () if step is None else (*step.decode, *(c.request for c in step.chunks)):
            assert request.slot is not None
            assert told[request.slot] == request.block_ids, "the device has an older block table"
        slots = [r.slot for r in (*scheduler.running, *scheduler.prefilling)]
        assert len(set(slots)) == len(slots)
        assert None not in slots
        finished += device.run(step)
        scheduler.blocks.check([r.block_ids for r in requests])
    assert len(finished) == len(requests)
    assert scheduler.blocks.num_free == num_blocks


@pytest.mark.parametrize("lag", [0, 1])
def test_a_small_cache_does_preempt(lag: int) -> None:
    scheduler = make_scheduler(14)
    device = Device(scheduler, lag, seed=1)
    scheduler.add([make_request(i, 12, 20) for i in range(4)])
    preempted = 0
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        if step is not None and step.preempted:
            assert not device.unread, "a row gave way while records were under way"
            preempted += len(step.preempted)
        device.run(step)
    assert preempted > 0


def test_a_row_whose_end_is_certain_is_not_run_again() -> None:
    """Without drafts every step adds one token: with a step under way its end can be counted on."""
    scheduler = make_scheduler(100, k=0)
    device = Device(scheduler, lag=1, seed=0, k=0)
    scheduler.add([make_request(0, 3, 5, k=0)])
    num_steps = 0
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        num_steps += step is not None
        device.run(step)
    assert num_steps == 5


def test_blocks_are_granted_for_what_is_under_way() -> None:
    """Each step under way may have added k + 1 tokens; blocks hold four."""
    scheduler = make_scheduler(100)
    device = Device(scheduler, lag=2, seed=0)
    scheduler.add([make_request(0, 1, 60)])
    for expected in (1 + 1 + 6, 2 + 1 + 6, 2 + 4 + 1 + 6):
        step = scheduler.schedule()
        assert step is not None
        (request,) = (*step.decode, *(chunk.request for chunk in step.chunks))
        assert len(request.block_ids) == -(-expected // 4)
        device.launch(step)


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
    Device(scheduler, lag=0, seed=0).run(first)
    step = scheduler.schedule()
    assert step is not None
    assert step.decode
    assert step.num_speculative_tokens == 0


def test_decoding_is_not_interrupted_for_a_trickle_of_prompts() -> None:
    scheduler = make_scheduler(1000, max_num_seqs=8, budget=64)
    scheduler.add([make_request(i, 4, 30) for i in range(7)])
    device = Device(scheduler, lag=0, seed=0)
    for _ in range(3):
        device.run(scheduler.schedule())
    scheduler.add([make_request(99, 3, 4)])  # one slot of eight free, three tokens: not worth it
    step = scheduler.schedule()
    assert step is not None
    assert step.decode


@pytest.mark.parametrize("is_cached", [True, False])
def test_prompt_tokens_that_are_in_the_cache_are_no_reason_to_interrupt(is_cached: bool) -> None:
    scheduler = make_scheduler(1000, max_num_seqs=8, budget=64)

    def long_one(index: int) -> Request:
        request = make_request(index, 20, 30)
        tokens = tuple(range(20)) if is_cached else tuple(range(index, index + 20))
        return replace(request, prompt_token_ids=tokens, prefix_keys=prefix_keys(tokens, 4))

    scheduler.add([long_one(0), *(make_request(i, 4, 30) for i in range(1, 7))])
    device = Device(scheduler, lag=0, seed=0)
    for _ in range(3):
        device.run(scheduler.schedule())
    scheduler.add([long_one(99)])  # 20 tokens, of which 16 may be known
    step = scheduler.schedule()
    assert step is not None
    assert bool(step.decode) is is_cached

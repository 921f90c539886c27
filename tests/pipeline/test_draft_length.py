"""The choice of k: what it weighs, what it learns, and that it comes back from k = 0."""

from __future__ import annotations

import itertools
import random

import pytest

from specgen.pipeline.draft_length import (
    AutoDraftLength,
    FixedDraftLength,
    best_draft_length,
    expected_tokens,
)
from specgen.pipeline.step_record import RowRecord


def test_expected_tokens_of_a_chain() -> None:
    assert expected_tokens([0.5, 0.5, 0.5], 0) == 1
    assert expected_tokens([0.5, 0.5, 0.5], 3) == pytest.approx(1.875)
    assert expected_tokens([1.0, 0.5, 0.0], 3) == pytest.approx(2.5)


def target_ms(num_rows: int, k: int) -> float:
    """A step like those measured on a GPU: bound by weights up to 200 tokens, then by products."""
    tokens = num_rows * (k + 1)
    products = max(4.05 + 0.005 * tokens, 0.56 + 0.0227 * tokens)
    return products + 0.2 * k + 0.012 * num_rows


@pytest.mark.parametrize(
    ("num_rows", "acceptance", "best"),
    [
        (1, [0.0] * 4, 0),  # nothing is accepted
        (1, [1.0] * 4, 4),  # everything is
        (1, [1.0, 0.5, 0.0, 0.0], 2),  # the third is never accepted
        (1, [0.02, 0.5, 0.5, 0.5], 0),
        (64, [0.8, 0.7, 0.5, 0.4], 2),
        (256, [0.8, 0.5, 0.5, 0.4], 1),
        (256, [0.5, 0.4, 0.3, 0.2], 0),  # a draft costs two thirds of a step
    ],
)
def test_the_best_length(num_rows: int, acceptance: list[float], best: int) -> None:
    seconds = [target_ms(num_rows, k) for k in range(5)]
    assert best_draft_length(seconds, acceptance) == best


def test_the_present_length_stays_unless_a_longer_one_is_better_by_more_than_the_margin() -> None:
    seconds = [1.0, 1.1]
    assert best_draft_length(seconds, [0.105], 0) == 0, "better by half a hundredth"
    assert best_draft_length(seconds, [0.12], 0) == 1, "by two"
    assert best_draft_length(seconds, [0.109], 1) == 1
    assert best_draft_length(seconds, [0.12], 5) == 1, "a k that is out of reach now"
    assert best_draft_length([1.0, float("inf")], [0.9], 1) == 0, "or does not fit the memory"


def test_a_change_must_pay_for_the_way_back() -> None:
    """The first step with a draft judges none: here it takes 1.7 steps and yields one token."""
    assert best_draft_length([0.985, 1.7], [0.7], 1) == 1, "better by one and a half hundredths"
    assert best_draft_length([0.96, 1.7], [0.7], 1) == 0, "by four"
    assert best_draft_length([1.0, 1.0], [0.0], 1) == 0, "a useless draft is no loss"


def test_of_lengths_nearly_as_good_the_shortest_is_taken_at_first() -> None:
    seconds, acceptance = [1.0, 1.1, 1.17], [0.105, 0.7]
    rates = [expected_tokens(acceptance, k) / seconds[k] for k in range(3)]
    assert rates[0] < rates[1] < rates[2] < 1.01 * rates[0]
    assert best_draft_length(seconds, acceptance) == 0


class World:
    """A device and a head: measures steps, and says what became of their drafts."""

    def __init__(self, rates: list[float], *, extra_ms: float = 0.0, seed: int = 0) -> None:
        self.rates = rates
        self.extra_ms = extra_ms  # a row's, for reading the cache
        self.rng = random.Random(seed)
        self.measured: list[tuple[int, int]] = []
        self.pending = 0
        self.tokens = self.ms = 0.0  # expected, a row; passed

    def measure(self, num_rows: int, k: int) -> float:
        self.measured.append((num_rows, k))
        return target_ms(num_rows, k) / 1e3

    def step(
        self,
        auto: AutoDraftLength,
        num_rows: int,
        limit: int = 4,
        seen_ms: float | None = None,
    ) -> int:
        """Choose, run and observe a step; drafts of a step are judged in the next one."""
        k = auto.choose(num_rows, limit)
        judged = min(k, self.pending)
        records = []
        for _ in range(num_rows):
            accepted = 0
            while accepted < judged and self.rng.random() < self.rates[accepted]:
                accepted += 1
            records.append(RowRecord([7] * (accepted + 1), accepted + 1, judged, 0))
        self.pending = k
        ms = self.real_ms(num_rows, k)
        self.ms += ms
        self.tokens += expected_tokens(self.rates, judged)
        seen = ms * self.rng.uniform(0.98, 1.02) if seen_ms is None else seen_ms
        auto.observe(records, num_rows, k, seen / 1e3)
        return k

    def real_ms(self, num_rows: int, k: int) -> float:
        return target_ms(num_rows, k) + self.extra_ms * num_rows

    def settled(self, auto: AutoDraftLength, num_rows: int) -> int:
        """The k that most of the last steps had."""
        for _ in range(600):
            self.step(auto, num_rows)
        last = [self.step(auto, num_rows) for _ in range(100)]
        return max(set(last), key=last.count)

    def speed(self, auto: AutoDraftLength, num_rows: int, num_steps: int) -> float:
        """Tokens that so many steps give, in those of the best fixed k."""
        self.tokens = self.ms = 0.0
        for _ in range(num_steps):
            self.step(auto, num_rows)
        best = max(expected_tokens(self.rates, k) / self.real_ms(num_rows, k) for k in range(5))
        return self.tokens / self.ms / best


@pytest.mark.parametrize(
    ("num_rows", "rates", "best"),
    [
        (1, [1.0, 0.5, 0.0, 0.0], 2),
        (1, [0.0, 0.0, 0.0, 0.0], 0),
        (8, [0.9, 0.9, 0.9, 0.9], 4),
        (64, [0.8, 0.7, 0.5, 0.4], 2),
        (256, [0.8, 0.5, 0.5, 0.4], 1),
        (256, [0.5, 0.4, 0.3, 0.2], 0),
    ],
)
def test_it_finds_the_best_length(num_rows: int, rates: list[float], best: int) -> None:
    world = World(rates)
    auto = AutoDraftLength(4, 256, world.measure)
    assert world.settled(auto, num_rows) == best


def test_a_large_batch_falls_to_zero_and_its_tail_drafts_again() -> None:
    world = World([0.5, 0.4, 0.3, 0.2])
    auto = AutoDraftLength(4, 256, world.measure)
    assert world.settled(auto, 256) == 0
    assert world.settled(auto, 4) == 2


def test_a_draft_that_turned_useless_is_dropped_and_found_again_when_it_pays() -> None:
    world = World([0.8, 0.8, 0.8, 0.8])
    auto = AutoDraftLength(4, 256, world.measure)
    assert world.settled(auto, 8) == 4
    world.rates = [0.0] * 4
    for _ in range(3000):
        world.step(auto, 8)
    speed = world.speed(auto, 8, 2000)
    assert speed > 0.99, "looking for a better draft may cost next to nothing"
    world.rates = [0.9] * 4
    for _ in range(20_000):
        if world.step(auto, 8) == 4:
            return
    raise AssertionError("it never drafted again")


def test_a_batch_too_large_for_any_draft_is_not_probed() -> None:
    auto = AutoDraftLength(4, 256, lambda num_rows, k: 0.01 * (k + 1))  # a draft costs a step
    assert {auto.choose(256, 4) for _ in range(2000)} == {0}


def test_reading_the_cache_counts_for_every_length() -> None:
    """Long rows make the step dear whatever k is, and drafts cheap beside it."""
    rates = [0.2, 0.0, 0.0, 0.0]
    assert World(rates).settled(AutoDraftLength(4, 256, World(rates).measure), 128) == 0
    world = World(rates, extra_ms=0.1)
    assert world.settled(AutoDraftLength(4, 256, world.measure), 128) == 1


class OtherTimes(World):
    """A device whose real steps take other times than its inert ones."""

    def __init__(self, inert: list[float], real: list[float], rates: list[float], seed: int = 0):
        super().__init__(rates, seed=seed)
        self.inert, self.real = inert, real

    def measure(self, num_rows: int, k: int) -> float:
        return self.inert[k] / 1e3

    def real_ms(self, num_rows: int, k: int) -> float:
        return self.real[k]


CHAIN = [0.693] * 4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_slow_steps", [0, 1, 3])
@pytest.mark.parametrize(
    ("inert", "real", "rates"),
    [
        # At a power limit: longer steps slow down more than they were measured to.
        ([7.8, 13.0, 18.0, 23.0, 28.0], [10.3, 17.8, 25.0, 33.0, 41.0], CHAIN),
        # Long rows: what a step takes beyond its inert time is the same for every k.
        ([7.8, 13.0, 18.0, 23.0, 28.0], [13.0, 18.2, 23.2, 28.2, 33.2], CHAIN),
        # The same, three times what was measured.
        ([7.8, 13.0, 18.0, 23.0, 28.0], [25.0, 30.2, 35.2, 40.2, 45.2], CHAIN),
        # Inert steps were timed too long, as in a larger graph; the one in use is no exception.
        ([4.6, 5.0, 5.2, 5.8, 6.0], [4.1, 4.6, 4.8, 5.3, 5.6], [0.0] * 4),
        ([4.6, 5.0, 5.2, 5.8, 6.0], [4.1, 4.6, 4.8, 5.3, 5.6], [0.4] * 4),
        # One of them was timed much too short, or too long.
        ([4.6, 5.0, 5.2, 5.8, 4.0], [4.6, 5.0, 5.2, 5.8, 6.0], [0.0] * 4),
        ([4.6, 5.0, 5.2, 5.8, 4.0], [4.6, 5.0, 5.2, 5.8, 6.0], [0.4] * 4),
        ([5.2, 5.0, 5.2, 5.8, 6.0], [4.6, 5.0, 5.2, 5.8, 6.0], [0.1] * 4),
    ],
)
def test_however_wrong_the_inert_times_the_best_length_is_found(
    inert: list[float], real: list[float], rates: list[float], num_slow_steps: int, seed: int
) -> None:
    """The first steps may wait for the host besides."""
    world = OtherTimes(inert, real, rates, seed)
    auto = AutoDraftLength(4, 256, world.measure)
    for _ in range(num_slow_steps):
        world.step(auto, 32, seen_ms=500.0)
    world.speed(auto, 32, 300)
    assert world.speed(auto, 32, 300) > 0.985


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("waited", [1.0, 1.5])
def test_lengths_nearly_as_good_do_not_take_turns(waited: float, seed: int) -> None:
    """256 rows: k = 1 is better than 0 by 2 %, and a step on the way to it costs as much as ten."""
    world = OtherTimes(
        [8.9, 14.6, 20.4, 27.2, 33.8], [9.3, 15.4, 22.2, 28.4, 35.6], [0.693] * 4, seed
    )
    auto = AutoDraftLength(4, 256, world.measure)
    first = auto.choose(256, 4)
    auto.observe([], 256, first, waited * world.real_ms(256, first) / 1e3)
    for _ in range(50):
        world.step(auto, 256)
    speed = world.speed(auto, 256, 400)
    chosen = [world.step(auto, 256) for _ in range(400)]
    assert sum(a != b for a, b in itertools.pairwise(chosen)) <= 16
    assert speed > 0.98, "always k = 0 would be 0.978"


def test_a_position_with_an_unlucky_start_is_tried_again() -> None:
    """What stays undrafted yields no figures, so that bad luck would be believed for good."""
    auto = AutoDraftLength(4, 256, lambda rows, k: target_ms(rows, k) / 1e3)
    unlucky = [RowRecord([7, 7], 2, 4, 0)] * 500  # the first is accepted, the second never
    auto.observe(unlucky, 8, 4, None)
    world = World([0.9, 0.9, 0.9, 0.9])
    assert auto.choose(8, 4) == 1
    chosen = [world.step(auto, 8) for _ in range(3000)]
    assert chosen[-1] == 4


def test_a_step_that_waited_for_the_host_is_not_believed() -> None:
    world = World([0.2, 0.0, 0.0, 0.0])
    auto = AutoDraftLength(4, 256, world.measure)
    world.settled(auto, 128)
    auto.observe([], 128, 0, 60.0)
    assert world.settled(auto, 128) == 0


def test_times_are_measured_once_at_a_few_sizes() -> None:
    world = World([0.8] * 4)
    auto = AutoDraftLength(4, 200, world.measure)
    for num_rows in [*range(1, 201), *range(200, 0, -1)]:
        world.step(auto, num_rows)
    sizes = [1, 4, 8, 16, 32, 64, 128, 200]
    assert sorted(world.measured) == [(size, k) for size in sizes for k in range(5)]


def test_no_row_gets_more_than_the_step_has_use_for() -> None:
    world = World([1.0] * 4)
    auto = AutoDraftLength(4, 8, world.measure)
    assert max(world.step(auto, 1, limit=2) for _ in range(100)) == 2
    assert world.step(auto, 1, limit=0) == 0
    assert AutoDraftLength(2, 8, world.measure).choose(1, 9) == 2


def test_a_fixed_length() -> None:
    assert FixedDraftLength(3).choose(256, 1) == 3
    assert FixedDraftLength(3).choose(256, 0) == 0


def test_what_a_small_batch_took_says_nothing_of_a_large_one() -> None:
    """A fixed cost of one row's step must not count for each of 256 rows."""
    world = World([0.5, 0.4, 0.3, 0.2], extra_ms=0.5)
    auto = AutoDraftLength(4, 256, world.measure)
    world.settled(auto, 1)
    world.extra_ms = 0.0
    ks = [world.step(auto, 256) for _ in range(200)]
    assert ks.count(0) > 190


def test_a_length_that_does_not_fit_the_memory_is_never_chosen() -> None:
    world = World([1.0] * 4)
    auto = AutoDraftLength(4, 8, lambda n, k: world.measure(n, k) if k < 3 else float("inf"))
    ks = [world.step(auto, 1 + i % 8) for i in range(400)]
    assert set(ks) == {2}

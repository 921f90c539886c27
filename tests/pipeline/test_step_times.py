"""What is known of step times: by their own steps, by those of other lengths, and not at all."""

from __future__ import annotations

import random

import pytest

from specgen.pipeline.step_times import StepTimes

INERT = [4.0, 4.4, 4.6, 5.2]


def times(inert: list[float] = INERT) -> StepTimes:
    return StepTimes(len(inert) - 1, 64, lambda _, k: inert[k])


def test_a_length_that_runs_is_known_by_its_own_steps() -> None:
    known, rng = times(), random.Random(0)
    for _ in range(200):
        known.correct(64, 2, 7.0 * rng.uniform(0.98, 1.02))
    assert known.of(64)[2] == pytest.approx(7.0, rel=0.02)


def test_the_others_follow_and_keep_what_is_special_to_them() -> None:
    """Rows that grow make the steps of every length longer, whichever runs."""
    known = times()
    for _ in range(50):
        known.correct(64, 0, 4.0)
        known.correct(64, 2, 5.0)  # not the 4.6 of an inert one
    special = known.of(64)[2] - known.of(64)[0]
    for i in range(300):
        known.correct(64, 0, 4.0 + 0.002 * i)
    found = known.of(64)
    assert found[0] == pytest.approx(4.6, rel=0.02)
    assert found[2] - found[0] == pytest.approx(special, abs=0.25)


def test_what_was_never_run_has_the_benefit_of_the_doubt() -> None:
    known = times()
    for _ in range(50):
        known.correct(64, 3, 7.0)
    found = known.of(64)
    assert found[0] < 4.0 + (7.0 - 5.2), "as if all of it were common to both"
    assert found[0] > 4.0, "but not as if nothing were"


def test_more_drafts_never_take_less() -> None:
    known = times([5.0, 4.0, 6.0, 5.0])
    for k in (0, 1, 2, 3):
        known.correct(64, k, [5.0, 4.0, 6.0, 5.0][k])
        assert sorted(known.of(64)) == known.of(64)


def test_one_step_that_waited_changes_little_and_nothing_becomes_surer_by_it() -> None:
    known = times()
    for _ in range(100):
        known.correct(64, 1, 5.0)
    before = known.of(64)
    known.correct(64, 1, 900.0)
    assert known.of(64) == pytest.approx(before, rel=0.05)
    for _ in range(5):
        known.correct(64, 1, 5.0)
    assert known.of(64) == pytest.approx(before, rel=0.02)


@pytest.mark.parametrize("waited", range(3))
def test_one_of_the_first_steps_that_waited_is_not_believed(waited: int) -> None:
    """Nothing else is known of the length yet."""
    known = times()
    for i in range(3):
        known.correct(64, 1, 50.0 if i == waited else 5.0)
    assert known.of(64)[1] == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize("noise", [0.005, 0.03, 0.15])
def test_it_is_surer_the_less_steps_differ(noise: float) -> None:
    known, rng = times(), random.Random(0)
    for i in range(400):
        waited = 1.5 if i % 20 == 0 else 1.0
        known.correct(64, 1, waited * 5.0 * rng.gauss(1.0, noise))
    found = known._beyond[64]._noise ** 0.5
    assert max(0.015, 0.7 * noise) < found < max(0.025, 1.5 * noise)


def test_times_that_rise_for_good_are_believed_soon() -> None:
    known = times()
    for _ in range(100):
        known.correct(64, 1, 5.0)
    for _ in range(60):
        known.correct(64, 1, 15.0)
    assert known.of(64)[1] == pytest.approx(15.0, rel=0.05)


def test_sizes_know_nothing_of_each_other() -> None:
    known = StepTimes(3, 256, lambda rows, k: INERT[k] * rows)
    before = known.of(256)
    for _ in range(50):
        known.correct(64, 1, 900.0)
    assert known.of(256) == before


@pytest.mark.parametrize("missing", [{0}, {1}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}])
def test_any_lengths_may_not_fit_the_memory(missing: set[int]) -> None:
    known = times([float("inf") if k in missing else t for k, t in enumerate(INERT)])
    for k in range(4):
        known.correct(64, k, 5.0)
    found = known.of(64)
    assert {k for k in range(4) if found[k] == float("inf")} == missing
    assert not any(seconds != seconds for seconds in found), "NaN"


def test_what_does_not_fit_the_memory_stays_out_of_reach() -> None:
    known = times([4.0, 4.4, float("inf"), float("inf")])
    known.correct(64, 2, 1.0)
    for _ in range(20):
        known.correct(64, 1, 5.0)
    found = known.of(64)
    assert found[1] == pytest.approx(5.0, rel=0.05)
    assert found[2:] == [float("inf")] * 2

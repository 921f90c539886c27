from __future__ import annotations

from specgen.pipeline.step_limits import StepLimits


def test_decode_steps_are_halved_down_to_a_row() -> None:
    limits = StepLimits(256, 8192)
    assert limits.shrink(100, 0)
    assert (limits.num_seqs, limits.num_tokens) == (50, 8192)
    assert limits.shrink(3, 0)
    assert limits.num_seqs == 1
    assert not limits.shrink(1, 0)


def test_prefill_steps_are_halved_in_tokens_then_in_rows() -> None:
    limits = StepLimits(256, 8192)
    assert limits.shrink(4, 1000)
    assert (limits.num_seqs, limits.num_tokens) == (256, 500)
    assert limits.shrink(2, 16)
    assert limits.num_seqs == 1
    assert not limits.shrink(1, 16)


def test_many_good_steps_in_a_row_allow_more() -> None:
    limits = StepLimits(8, 64)
    limits.shrink(8, 0)
    for _ in range(200):
        limits.step_succeeded()
    limits.shrink(4, 0)
    for _ in range(200):
        limits.step_succeeded()
    assert limits.num_seqs == 2
    for _ in range(56):
        limits.step_succeeded()
    assert limits.num_seqs == 4
    for _ in range(1000):
        limits.step_succeeded()
    assert (limits.num_seqs, limits.reduced) == (8, False)

"""Blocks that rows share are read once for all of them: no token and no draft changes by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from e2e.engines import EngineShop
from e2e.harness import histogram_of, run_all, tokens_of
from e2e.test_prefix_sharing import BLOCK, SCHEDULES, rows

from specgen.pipeline.engine import Engine
from specgen.pipeline.request import Request


@pytest.fixture(scope="module")
def engine(engine_of: EngineShop) -> Callable[..., Engine]:
    def build(draft: str | None, sample: str, **config: Any) -> Engine:
        return engine_of("text", draft, draft_sample=sample, block_size=BLOCK, **config)

    return build


@contextmanager
def every_saving_counts(engine: Engine) -> Iterator[list[int]]:
    """Share whatever is common; yields the numbers of members of the steps that shared."""
    shared_rows = engine._runner._shared_rows
    assert shared_rows is not None
    follow, threshold = shared_rows.follow, shared_rows._min_saved_tokens
    num_members: list[int] = []

    def spy(requests: Sequence[Request]) -> bool:
        pays = follow(requests)
        if not pays:
            return False
        tensors = shared_rows.tensors
        num_blocks = int(tensors.length) // BLOCK
        beginnings = [request.block_ids[:num_blocks] for request in requests]
        expected = [row == tensors.block_ids[:num_blocks].tolist() for row in beginnings]
        # What the device is told of each row is true of the row that has the slot now.
        assert [bool(tensors.members[request.slot]) for request in requests] == expected
        num_members.append(sum(expected))
        return True

    shared_rows._min_saved_tokens = 1
    shared_rows.follow = spy  # type: ignore[method-assign]
    try:
        yield num_members
    finally:
        shared_rows._min_saved_tokens = threshold
        del shared_rows.follow  # type: ignore[misc]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("draft", "sample"), [("eagle1", "gumbel"), ("eagle3", "greedy"), (None, "greedy")]
)
def test_tokens_and_drafts_stay(
    engine: Callable[..., Engine], draft: str | None, sample: str, schedule: str
) -> None:
    alone = run_all(engine(draft, sample, prefix_caching=False, max_num_seqs=1), rows())
    sharing = engine(draft, sample, **SCHEDULES[schedule])
    with every_saving_counts(sharing) as num_members:
        shared = run_all(sharing, rows())
    assert tokens_of(shared) == tokens_of(alone)
    assert histogram_of(shared) == histogram_of(alone)
    assert num_members
    assert max(num_members) >= 2


def test_rows_that_come_back_with_other_blocks(engine: Callable[..., Engine]) -> None:
    alone = run_all(engine("eagle3", "gumbel", prefix_caching=False, max_num_seqs=1), rows())
    sharing = engine("eagle3", "gumbel", max_num_seqs=9)
    with every_saving_counts(sharing) as num_members:
        shared = run_all(sharing, rows(), preempt_seed=2)
    assert tokens_of(shared) == tokens_of(alone)
    assert histogram_of(shared) == histogram_of(alone)
    assert num_members


def test_without_prefix_caching_nothing_is_looked_for(engine: Callable[..., Engine]) -> None:
    assert engine(None, "greedy", prefix_caching=False)._runner._shared_rows is None

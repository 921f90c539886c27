"""Draft lengths that change from step to step, and what the draft's cache holds under them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from e2e.harness import device_rows

from specgen.pipeline.draft_length import DraftLength
from specgen.pipeline.engine import Engine
from specgen.pipeline.step_record import RowRecord

K = 3


class RandomLength:
    """Any k up to the limit, in short runs, so that rows come back after several plain steps."""

    def __init__(self, seed: int, max_k: int = K) -> None:
        self.rng = random.Random(seed)
        self.max_k = max_k
        self.chosen: list[int] = []

    def choose(self, num_rows: int, limit: int) -> int:
        del num_rows
        if not self.chosen or self.rng.random() < 0.5:
            self.chosen.append(self.rng.randint(0, self.max_k))
        else:
            self.chosen.append(self.chosen[-1])
        return min(self.chosen[-1], limit)

    def observe(
        self, records: Iterable[RowRecord], num_rows: int, k: int, seconds: float | None
    ) -> None:
        assert seconds is None or seconds > 0
        for record in records:
            assert record.num_draft_tokens <= k


class LongPauses(RandomLength):
    """Up to twelve steps without drafts between a few with them."""

    def choose(self, num_rows: int, limit: int) -> int:
        del num_rows
        if not self.chosen:
            self.chosen = [0] * self.rng.randint(1, 12)
            self.chosen += [self.rng.randint(1, self.max_k) for _ in range(self.rng.randint(2, 5))]
        return min(self.chosen.pop(0), limit)


def changing(engine: Engine, policy: DraftLength) -> Engine:
    engine._scheduler.draft_length = policy
    return engine


@contextmanager
def entry_log(
    engine: Engine, true: dict[tuple[int, int], torch.Tensor] | None = None
) -> Iterator[dict[tuple[int, int], torch.Tensor]]:
    """Keys in the draft's cache by row and position, after each step that drafts."""
    drafter = engine._runner._drafter
    assert drafter is not None
    keys, tables, decode = drafter._caches[0][0], engine._state.block_tables, engine._runner.decode
    size = engine.config.block_size
    found: dict[tuple[int, int], torch.Tensor] = {}

    def spy(requests: Any, k: int, *args: Any) -> torch.Tensor:
        live = list(device_rows(engine, requests))
        record = decode(requests, k, *args)
        for request, slot, n in live if k > 0 else ():
            for position in range(n - 1):  # the pair of the n-th token is the last
                entry = keys[tables[slot, position // size], position % size].clone()
                place = request.row.index, position
                found[place] = entry
                if true is not None and place in true:
                    torch.testing.assert_close(entry, true[place])
        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._runner, "decode", spy)
        yield found

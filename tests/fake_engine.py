"""An engine without a model: what the job and the command line see of the real one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from specgen.errors import RequestError
from specgen.pipeline.request import ChoiceOutput, PromptRow, RequestOutput
from specgen.stats import SpeculationStats


class FakeEngine:
    """Takes `window` rows at a time and finishes them in reverse order.

    A prompt "fail" gives an error row; "crash" raises; the text of others is the prompt reversed.
    """

    num_memory_faults = 0

    def __init__(self, window: int = 4) -> None:
        self.window = window
        self.seen: list[PromptRow] = []

    def generate(self, rows: Iterable[PromptRow]) -> Iterator[RequestOutput]:
        held: list[PromptRow] = []
        for row in rows:
            self.seen.append(row)
            held.append(row)
            if len(held) == self.window:
                yield from map(self._finish, reversed(held))
                held = []
        yield from map(self._finish, reversed(held))

    def take_finished(self) -> list[RequestOutput]:
        return []

    def _finish(self, row: PromptRow) -> RequestOutput:
        if row.prompt == "crash":
            raise RuntimeError("the engine broke")
        if row.prompt == "fail":
            error = RequestError("bad_logits", "the model's logits were NaN", row.line)
            return RequestOutput(row, (), (), error)
        text = (row.prompt or "")[::-1]
        choices = []
        for index in range(row.sampling.n):
            stats = SpeculationStats(3)
            stats.add_plain(1)
            stats.add_spec_step(3, 2, 3)
            choices.append(
                ChoiceOutput(index, (7, 8, 9, 2), text, "stop", None, row.sampling.seed or 1, stats)
            )
        return RequestOutput(row, (1, 2), tuple(choices), None)

    def describe(self) -> dict[str, Any]:
        return {"model_dir": "fake", "max_model_len": 1024, "num_speculative_tokens": 3}

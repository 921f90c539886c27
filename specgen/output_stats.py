"""What outputs say about speculation: read line by line, in memory that does not grow with them.

But for the failed rows of an `OUT.partial`, which are remembered: a later line may be the same row,
run again.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specgen.errors import InputError
from specgen.request_io.source import RawLine
from specgen.request_io.strict_json import RefusedError, parse_object
from specgen.stats import RunStats, SpeculationStats

__all__ = ["Distribution", "LengthBin", "OutputStats", "WorstRow", "add_record"]

_QUANTILES = {
    "min": 0.0,
    "p10": 0.1,
    "p25": 0.25,
    "median": 0.5,
    "p75": 0.75,
    "p90": 0.9,
    "max": 1.0,
}


class Distribution:
    """Quantiles of many values, kept to thousandths so that memory does not grow with them."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.count = 0

    def add(self, value: float | None) -> None:
        """Count a value; None is none."""
        if value is not None:
            self._counts[round(value * 1000)] += 1
            self.count += 1

    def quantiles(self) -> dict[str, float | None]:
        """The smallest values that so much of all does not exceed; None without any."""
        found: dict[str, float | None] = dict.fromkeys(_QUANTILES)
        seen, ordered = 0, sorted(self._counts)
        wanted = {name: max(math.ceil(share * self.count), 1) for name, share in _QUANTILES.items()}
        for value in ordered:
            seen += self._counts[value]
            for name, rank in wanted.items():
                if found[name] is None and seen >= rank:
                    found[name] = value / 1000
        return found


@dataclass(slots=True)
class LengthBin:
    """Rows of about the same completion length: `low` to `2 * low - 1` tokens."""

    low: int
    num_requests: int = 0
    num_spec_steps: int = 0
    num_accepted: int = 0
    num_drafted: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Counts and rates, null without a divisor."""
        steps, drafted = self.num_spec_steps, self.num_drafted
        return {
            "completion_tokens": [self.low, 2 * self.low - 1],
            "num_requests": self.num_requests,
            "num_spec_steps": steps,
            "draft_acceptance_rate": self.num_accepted / drafted if drafted else None,
            "mean_acceptance_length": 1 + self.num_accepted / steps if steps else None,
        }


@dataclass(frozen=True, slots=True, order=True)
class WorstRow:
    """A row of low acceptance, ordered so that the best of them comes first."""

    minus_length: float
    index: int
    source: str
    line: int
    completion_tokens: int
    name: str | None

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return {
            "index": self.index,
            "custom_id": self.name,
            "source": self.source,
            "line": self.line,
            "mean_acceptance_length": -self.minus_length,
            "completion_tokens": self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class RowAccounts:
    """What an output line says of its row."""

    completion_tokens: int
    finish_reasons: Sequence[str]
    spec: SpeculationStats


def add_record(run: RunStats, record: Mapping[str, Any]) -> RowAccounts | None:
    """Count an output line, flat or openai, in `run`; returns its accounts, None if it failed.

    Raises:
        KeyError, TypeError, ValueError, IndexError, AttributeError: it is no such object.
    """
    if record["status"] == "error":
        run.add_failed(record["error"]["code"])
        return None
    # A flat line may carry a data key "response"; only it has choices of its own.
    body = record if "choices" in record else record["response"]["body"]
    usage = body["usage"]
    prompt_tokens, tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
    metrics = body["metrics"]
    spec = SpeculationStats.from_dict(metrics["speculative_decoding"])
    reasons = [str(choice["finish_reason"]) for choice in body["choices"]]
    truncated = bool(metrics.get("prompt_truncated", False))
    run.add_row(prompt_tokens, tokens, reasons, spec, prompt_truncated=truncated)
    return RowAccounts(tokens, reasons, spec)


class OutputStats:
    """Accounts over the lines of outputs, flat and openai.

    Args:
        num_worst: how many rows of the lowest acceptance length to name.
    """

    def __init__(self, num_worst: int = 0) -> None:
        self.run = RunStats()
        self.acceptance_length = Distribution()
        self.acceptance_rate = Distribution()
        self._bins: dict[int, LengthBin] = {}
        self._worst: list[WorstRow] = []
        self._num_worst = num_worst
        self._failed: dict[tuple[str, int], str] = {}

    def read(self, lines: Iterable[RawLine]) -> None:
        """Count all lines; a torn one at the end of an `OUT.partial` is left out.

        Raises:
            InputError: one of them is no output line.
        """
        torn: InputError | None = None
        for raw in lines:
            if torn is not None and raw.line > 1:
                raise torn
            torn = None
            try:
                self._add(parse_object(raw.data), raw)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                raise _no_output(raw, _reason(error)) from error
            except RefusedError as error:
                if not raw.source.endswith(".partial") or not raw.data.startswith(b"{"):
                    raise _no_output(raw, str(error)) from error
                # Refused after all if another line of this file comes.
                torn = _no_output(raw, str(error))

    def _add(self, record: Mapping[str, Any], raw: RawLine) -> None:
        row = add_record(self.run, record)
        if raw.source.endswith(".partial"):
            self._replace_failed((raw.source, record["index"]), record)
        if row is None:
            return
        tokens, reasons, spec = row.completion_tokens, row.finish_reasons, row.spec
        length = spec.mean_acceptance_length
        self.acceptance_length.add(length)
        self.acceptance_rate.add(spec.draft_acceptance_rate)
        low = 1 << max(tokens // max(len(reasons), 1), 1).bit_length() - 1
        share = self._bins.setdefault(low, LengthBin(low))
        share.num_requests += 1
        share.num_spec_steps += spec.num_spec_steps
        share.num_accepted += spec.num_accepted_draft_tokens
        share.num_drafted += spec.num_draft_tokens
        if length is not None and self._num_worst:
            name = record.get("custom_id")
            worst = WorstRow(
                -length, record["index"], raw.source, raw.line, tokens, name and str(name)
            )
            if len(self._worst) < self._num_worst:
                heapq.heappush(self._worst, worst)
            else:
                heapq.heappushpop(self._worst, worst)

    def _replace_failed(self, place: tuple[str, int], record: Mapping[str, Any]) -> None:
        earlier = self._failed.pop(place, None)
        if earlier is not None:
            self.run.take_back_failed(earlier)
        if record["status"] == "error":
            self._failed[place] = record["error"]["code"]

    @property
    def length_bins(self) -> Sequence[LengthBin]:
        """Rows by completion length (mean over a row's choices), shortest first."""
        return [self._bins[low] for low in sorted(self._bins)]

    @property
    def worst(self) -> Sequence[WorstRow]:
        """Rows of the lowest acceptance length, lowest first."""
        return sorted(self._worst, key=lambda row: (-row.minus_length, row.index))

    def to_dict(self) -> dict[str, Any]:
        """Everything as one JSON object; without times, which an output does not hold."""
        out = self.run.summary(0.0)
        del out["elapsed_s"], out["completion_tokens_per_s"], out["rows"]["kept"]
        spec = out["speculative_decoding"]
        spec["per_request"]["quantiles"] = {
            "mean_acceptance_length": self.acceptance_length.quantiles(),
            "draft_acceptance_rate": self.acceptance_rate.quantiles(),
        }
        spec["with_fewer_drafts"] = self.run.speculation.with_fewer_drafts()
        spec["by_completion_length"] = [share.to_dict() for share in self.length_bins]
        if self._num_worst:
            spec["lowest"] = [row.to_dict() for row in self.worst]
        return out


def _reason(error: Exception) -> str:
    """What is amiss with a record, without the names that Python has for it."""
    if isinstance(error, KeyError):
        return f'"{error.args[0]}" is missing'
    return str(error) if isinstance(error, ValueError) else "a value is of another type"


def _no_output(raw: RawLine, reason: str) -> InputError:
    return InputError(
        f"{raw.source}:{raw.line}: is no line of an output ({reason})",
        "give files that specgen run wrote",
    )

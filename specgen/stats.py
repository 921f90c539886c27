"""Accounts of speculation: per completion, per row, and for the whole run.

A *spec step* judges `d >= 1` drafts, of which the rule accepts `tau`; `c` tokens of the step are
kept (`1 <= c <= tau + 1`, fewer than `tau + 1` only where the row ends inside the step), so
`a = min(tau, c)` drafts count as accepted. Tokens of steps without drafts are *plain* tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specgen.pipeline.request import RequestOutput

__all__ = ["RunStats", "SpeculationStats"]

# A head that was trained for its target and is read rightly accepts a third of its first drafts and
# more; one whose features are a layer off still accepts about 1 %.
_IMPLAUSIBLE_RATE = 0.05
_ENOUGH_STEPS = 300


class SpeculationStats:
    """Accounts of one completion, or the sum of several.

    Args:
        num_speculative_tokens: k, the most drafts a step may have; 0 for a run without a draft.
        faithful: whether the tokens follow the target; not so under the rule `synthetic`.
    """

    def __init__(self, num_speculative_tokens: int, *, faithful: bool = True) -> None:
        if num_speculative_tokens < 0:
            raise ValueError(f"num_speculative_tokens must be >= 0, got {num_speculative_tokens}")
        self.num_speculative_tokens = num_speculative_tokens
        self.faithful = faithful
        self.num_plain_tokens = 0
        self.num_cut = 0
        self.acceptance_histogram = [0] * (num_speculative_tokens + 1)
        self.drafted_per_position = [0] * num_speculative_tokens
        self.accepted_per_position = [0] * num_speculative_tokens

    def add_plain(self, num_tokens: int) -> None:
        """Count tokens of a step that judged no draft."""
        assert num_tokens >= 0, num_tokens
        assert not self.num_cut, "a token after the row's end"
        self.num_plain_tokens += num_tokens

    def add_spec_step(self, num_draft: int, num_accepted: int, num_committed: int) -> None:
        """Count one spec step.

        Args:
            num_draft: d, drafts judged, 1..k.
            num_accepted: tau, drafts the rule accepted, 0..d.
            num_committed: c, tokens kept, 1..tau+1; at most tau only in the row's last step.
        """
        assert 1 <= num_draft <= self.num_speculative_tokens, (
            num_draft,
            self.num_speculative_tokens,
        )
        assert 0 <= num_accepted <= num_draft, (num_accepted, num_draft)
        assert 1 <= num_committed <= num_accepted + 1, (num_committed, num_accepted)
        assert not self.num_cut, "a step after the row's end"
        kept = num_accepted if num_accepted < num_committed else num_committed
        self.acceptance_histogram[kept] += 1
        drafted, accepted = self.drafted_per_position, self.accepted_per_position
        for position in range(num_draft):
            drafted[position] += 1
        for position in range(kept):
            accepted[position] += 1
        self.num_cut += num_committed <= num_accepted

    @property
    def num_spec_steps(self) -> int:
        """Steps that judged at least one draft."""
        return sum(self.acceptance_histogram)

    @property
    def num_draft_tokens(self) -> int:
        """Drafts judged."""
        return sum(self.drafted_per_position)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Drafts accepted and kept; recovered and bonus tokens are not among them."""
        return sum(self.accepted_per_position)

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted / drafted; None where nothing was drafted."""
        drafted = self.num_draft_tokens
        return self.num_accepted_draft_tokens / drafted if drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / spec steps: tokens a spec step yields; None where there was no step."""
        steps = self.num_spec_steps
        return 1 + self.num_accepted_draft_tokens / steps if steps else None

    @property
    def acceptance_per_position(self) -> list[float | None]:
        """Share of the drafts at each position that were accepted."""
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=True)
        return [accepted / drafted if drafted else None for accepted, drafted in pairs]

    def with_fewer_drafts(self) -> list[dict[str, Any]]:
        """What a step of 1, 2, .. k drafts would have yielded, from the same steps.

        Exact for k. For fewer it is an estimate: the steps would have begun elsewhere.
        """
        found, steps = [], self.num_spec_steps
        for k in range(1, self.num_speculative_tokens + 1):
            accepted = sum(self.accepted_per_position[:k])
            drafted = sum(self.drafted_per_position[:k])
            found.append(
                {
                    "num_speculative_tokens": k,
                    "mean_acceptance_length": 1 + accepted / steps if steps else None,
                    "draft_acceptance_rate": accepted / drafted if drafted else None,
                }
            )
        return found

    def add(self, other: SpeculationStats) -> None:
        """Add the accounts of another completion; k becomes the larger of the two."""
        grow = other.num_speculative_tokens - self.num_speculative_tokens
        if grow > 0:
            self.num_speculative_tokens = other.num_speculative_tokens
            self.acceptance_histogram += [0] * grow
            self.drafted_per_position += [0] * grow
            self.accepted_per_position += [0] * grow
        self.faithful &= other.faithful
        self.num_plain_tokens += other.num_plain_tokens
        self.num_cut += other.num_cut
        for mine, theirs in (
            (self.acceptance_histogram, other.acceptance_histogram),
            (self.drafted_per_position, other.drafted_per_position),
            (self.accepted_per_position, other.accepted_per_position),
        ):
            for position, count in enumerate(theirs):
                mine[position] += count

    @classmethod
    def merged(cls, parts: Iterable[SpeculationStats]) -> SpeculationStats:
        """The sum of several accounts, as a row with `n > 1` reports it."""
        total = cls(0)
        for part in parts:
            total.add(part)
        return total

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeculationStats:
        """The accounts that :meth:`to_dict` wrote, but for whether the last step was cut.

        Raises:
            KeyError, TypeError, ValueError: it is no such object.
        """
        faithful = values.get("faithful", True) is not False
        stats = cls(_count(values["num_speculative_tokens"]), faithful=faithful)
        stats.num_plain_tokens = _count(values["num_plain_tokens"])
        for name, length in (
            ("acceptance_histogram", stats.num_speculative_tokens + 1),
            ("drafted_per_position", stats.num_speculative_tokens),
            ("accepted_per_position", stats.num_speculative_tokens),
        ):
            counts = [_count(value) for value in values[name]]
            if len(counts) != length:
                raise ValueError(f"{name} has {len(counts)} entries, not {length}")
            setattr(stats, name, counts)
        return stats

    def check(self, completion_tokens: int) -> None:
        """Assert that the accounts explain every token of the completion.

        Raises:
            AssertionError: naming the identity that does not hold.
        """
        accepted = self.num_accepted_draft_tokens
        weighed = sum(j * count for j, count in enumerate(self.acceptance_histogram))
        assert weighed == accepted, f"histogram weighs {weighed}, accepted are {accepted}"
        for position, count in enumerate(self.accepted_per_position):
            longer = sum(self.acceptance_histogram[position + 1 :])
            assert count == longer, f"position {position}: {count} accepted, histogram has {longer}"
            assert count <= self.drafted_per_position[position], f"position {position}: not drafted"
        if self.drafted_per_position:
            first = self.drafted_per_position[0]
            assert first == self.num_spec_steps, (
                f"{first} first drafts, {self.num_spec_steps} steps"
            )
        explained = self.num_plain_tokens + accepted + self.num_spec_steps - self.num_cut
        assert explained == completion_tokens, (
            f"{completion_tokens} completion tokens, but {self.num_plain_tokens} plain + "
            f"{accepted} accepted + {self.num_spec_steps} steps - {self.num_cut} cut = {explained}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The `speculative_decoding` object of an output line; rates are null without a divisor.

        `faithful` stands there only where it is false.
        """
        # Once each: this runs for every row.
        steps, drafted = sum(self.acceptance_histogram), sum(self.drafted_per_position)
        accepted = sum(self.accepted_per_position)
        values: dict[str, Any] = {
            "num_spec_steps": steps,
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": accepted,
            "num_speculative_tokens": self.num_speculative_tokens,
            "num_plain_tokens": self.num_plain_tokens,
            "acceptance_histogram": list(self.acceptance_histogram),
            "drafted_per_position": list(self.drafted_per_position),
            "accepted_per_position": list(self.accepted_per_position),
            "draft_acceptance_rate": accepted / drafted if drafted else None,
            "mean_acceptance_length": 1 + accepted / steps if steps else None,
        }
        if not self.faithful:
            values["faithful"] = False
        return values


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


class _Mean:
    """A running mean over the rows that have a value."""

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


class RunStats:
    """Accounts of a run, in constant memory however many rows it has.

    Per-token figures weigh every spec step alike, so long completions dominate; per-request
    figures are plain means over rows.
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.rows_ok = 0
        self.rows_failed = 0
        self.rows_truncated = 0  # of those ok: their prompts lost their beginnings
        self.least_prompt_left = 0  # tokens that the most cut of them has
        self.rows_kept = 0
        self.rows_kept_failed = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.num_choices = 0
        self.speculation = SpeculationStats(0)
        self.finish_reasons: Counter[str] = Counter()
        self.error_codes: Counter[str] = Counter()
        self._rate = _Mean()
        self._length = _Mean()
        self._tokens = _Mean()

    @property
    def rows_done(self) -> int:
        """Rows finished, well or not."""
        return self.rows_ok + self.rows_failed

    def keep(self, *, failed: bool) -> None:
        """Count a row that an earlier run finished; it has no part in any other figure."""
        self.rows_kept += 1
        self.rows_kept_failed += failed

    def restart_clock(self) -> None:
        """Measure time from now on, for example after the weights are loaded."""
        self.started = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds since the clock started."""
        return time.perf_counter() - self.started

    def add(self, output: RequestOutput) -> None:
        """Count one finished row."""
        if output.error is not None:
            self.add_failed(output.error.code)
            return
        self.add_row(
            len(output.prompt_token_ids),
            sum(len(choice.token_ids) for choice in output.choices),
            [choice.finish_reason for choice in output.choices],
            output.stats,
            prompt_truncated=output.prompt_truncated,
        )

    def add_failed(self, code: str) -> None:
        """Count one failed row."""
        self.rows_failed += 1
        self.error_codes[code] += 1

    def take_back_failed(self, code: str) -> None:
        """Forget a failed row that was run again."""
        self.rows_failed -= 1
        self.error_codes[code] -= 1
        if not self.error_codes[code]:
            del self.error_codes[code]

    def add_row(
        self,
        prompt_tokens: int,
        completion_tokens: int,
        finish_reasons: Sequence[str],
        spec: SpeculationStats,
        *,
        prompt_truncated: bool = False,
    ) -> None:
        """Count one row that is ok; `finish_reasons` has one for each choice."""
        self.rows_ok += 1
        if prompt_truncated:
            least = self.least_prompt_left if self.rows_truncated else prompt_tokens
            self.least_prompt_left = min(least, prompt_tokens)
            self.rows_truncated += 1
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        self.num_choices += len(finish_reasons)
        self.finish_reasons.update(finish_reasons)
        self.speculation.add(spec)
        self._rate.add(spec.draft_acceptance_rate)
        self._length.add(spec.mean_acceptance_length)
        self._tokens.add(float(completion_tokens))

    @property
    def mean_length_of_rows(self) -> float | None:
        """Mean over rows of their acceptance lengths; None without any."""
        return self._length.value

    @property
    def draft_warning(self) -> str | None:
        """What is to be said of a draft of which almost nothing is accepted, once that is sure."""
        drafted, accepted = (
            sum(counts[:1])
            for counts in (
                self.speculation.drafted_per_position,
                self.speculation.accepted_per_position,
            )
        )
        if not self.speculation.faithful:  # the rule `synthetic` accepts as it was told
            return None
        if drafted < _ENOUGH_STEPS or accepted >= _IMPLAUSIBLE_RATE * drafted:
            return None
        return (
            f"only {accepted:,} of {drafted:,} first drafts were accepted: the draft does not fit "
            "this target, or is not read as it was trained"
        )

    def summary(
        self, elapsed: float | None = None, whole: RunStats | None = None
    ) -> dict[str, Any]:
        """Everything as one JSON object.

        Args:
            elapsed: seconds; defaults to the clock's reading.
            whole: accounts of the whole output, earlier runs included; they come as
                `whole_output`, of the same keys without times.
        """
        seconds = self.elapsed() if elapsed is None else elapsed
        return {
            **self._counts(),
            "elapsed_s": seconds,
            "completion_tokens_per_s": self.completion_tokens / seconds if seconds > 0 else None,
            **({} if whole is None else {"whole_output": whole._counts()}),
        }

    def _counts(self) -> dict[str, Any]:
        """All but times."""
        return {
            "rows": {
                "done": self.rows_done,
                "ok": self.rows_ok,
                "failed": self.rows_failed,
                "truncated": self.rows_truncated,
                "kept": self.rows_kept,
                "errors": dict(sorted(self.error_codes.items())),
            },
            "choices": self.num_choices,
            "finish_reasons": dict(sorted(self.finish_reasons.items())),
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "total_tokens": self.prompt_tokens + self.completion_tokens,
            },
            "speculative_decoding": {
                **self.speculation.to_dict(),
                "acceptance_per_position": self.speculation.acceptance_per_position,
                "warning": self.draft_warning,
                "per_request": {
                    "num_requests": self._length.count,
                    "draft_acceptance_rate": self._rate.value,
                    "mean_acceptance_length": self._length.value,
                    "completion_tokens": self._tokens.value,
                },
            },
        }

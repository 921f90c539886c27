"""Requests: an input row, the samples it becomes inside the engine, and what comes out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from specgen.errors import RequestError
from specgen.sampling_params import SamplingParams
from specgen.stats import SpeculationStats

FinishReason = Literal["stop", "length", "error"]

# A derived seed survives readers that hold JSON numbers as doubles (jq, JavaScript).
_SEED_BITS = 53


@dataclass(frozen=True)
class PromptRow:
    """One input row: exactly one of ``prompt``, ``prompt_token_ids`` and ``messages`` is given.

    Attributes:
        index: Position of the row in the whole input; with the run seed it fixes the row's noise.
        input_hash: 16 hex digits that identify the row's bytes.
        line: Line number in ``source``, for error messages.
        extras: Keys of the line that are carried into the output unread.
        prompt_key: What the prompt is called in the line, for error messages; None as it is here.
    """

    index: int
    input_hash: str
    line: int
    source: str
    sampling: SamplingParams
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    prompt_key: str | None = None

    @property
    def prompt_name(self) -> str:
        """What an error message calls the prompt."""
        return self.prompt_key or ("prompt" if self.messages is None else "messages")


@dataclass(frozen=True)
class ChoiceOutput:
    """One finished sample of a row.

    ``token_ids`` end with the stop token, if one ended the row; ``text`` does not hold it.
    ``stop_reason`` is the stop string or the stop token id that ended the row, ``None`` for an
    end-of-sequence token.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int
    stats: SpeculationStats


@dataclass(frozen=True)
class RequestOutput:
    """A finished row: its choices in order, or the error that ended it.

    ``prompt_truncated`` says that the prompt's beginning was cut off.
    """

    row: PromptRow
    prompt_token_ids: tuple[int, ...]
    choices: tuple[ChoiceOutput, ...]
    error: RequestError | None = None
    prompt_truncated: bool = False

    @property
    def stats(self) -> SpeculationStats:
        """The accounts of all choices together; must not be changed."""
        if len(self.choices) == 1:
            return self.choices[0].stats
        return SpeculationStats.merged(choice.stats for choice in self.choices)


@dataclass(eq=False)  # a request is itself, not its values: the scheduler's lists search for it
class Request:
    """One sample of a row on its way through the engine (host side; device state lives in rows).

    Attributes:
        max_len: Cap on prompt and output tokens together.
        num_speculative_tokens: The row's own k; 0 switches its draft off.
        stop_token_ids: All ids that end it, end-of-sequence included.
        prefix_keys: Keys under which the blocks of the prompt are shared; none shares nothing.
        prompt_truncated: Whether the prompt's beginning was cut off.
        slot: Device row while admitted, else ``None``.
        num_computed_tokens: Tokens whose target cache entries exist, while prefilling.
        num_pending_steps: Steps under way that add a token or more to it, unless it has ended.
        num_pending_tokens: The most tokens that they can add.
        needs_filter: Whether it is sampled with top-k or top-p.
    """

    row: PromptRow
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    max_len: int
    seed: int
    num_speculative_tokens: int
    stop_token_ids: tuple[int, ...]
    stats: SpeculationStats
    prefix_keys: tuple[bytes, ...] = ()
    prompt_truncated: bool = False
    output_token_ids: list[int] = field(default_factory=list)
    slot: int | None = None
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_pending_steps: int = 0
    num_pending_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    text: str | None = None
    error: RequestError | None = None
    needs_filter: bool = field(init=False)

    def __post_init__(self) -> None:
        """Settle what every step asks."""
        sampling = self.row.sampling
        filters = sampling.top_k > 0 or sampling.top_p < 1.0
        self.needs_filter = filters and not sampling.greedy

    @property
    def num_tokens(self) -> int:
        """Committed tokens that the host knows of, prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def has_ended(self) -> bool:
        """Whether it is done, well or not."""
        return self.finish_reason is not None

    @property
    def is_resuming(self) -> bool:
        """Whether it re-enters decode after a preemption: its next token is already known."""
        return bool(self.output_token_ids)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens to run before decode: all when fresh, all but the last when resuming.

        The last committed token of a decoding row is always the one its next step runs first.
        """
        return self.num_tokens - 1 if self.is_resuming else self.num_tokens

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens ``start..stop`` of prompt and output."""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return list(self.prompt_token_ids[start:stop])
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return [*self.prompt_token_ids[start:], *self.output_token_ids[: stop - num_prompt]]


def row_seed(run_seed: int, index: int) -> int:
    """Seed of a row without one of its own: a hash of the run seed and the row's index."""
    digest = hashlib.blake2b(f"{run_seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)

"""How one prompt is sampled: a validated, immutable set of parameters.

Names and ranges follow the OpenAI API where it has them. Types are strict: `true` is no number,
`1.0` is no count, and a value outside its range is refused with its name, never clipped.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from specgen.unsupported_sampling import UNSUPPORTED_KEYS, asks_for_nothing

__all__ = ["SamplingParams", "is_sampling_key", "looks_like_sampling_key"]

_INT32_MAX = 2**31 - 1
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_MAX_SAMPLES = 10_000
_MAX_TEMPERATURE = 1e6  # every token is as likely as another long before; 1e39 is no float32

_SAME_AS = {
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_words": "stop",
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one prompt.

    Attributes:
        temperature: 0 to 1e6; below 1e-5 the most likely token is taken.
        top_p: in (0, 1]; 1 keeps everything. The smallest set of tokens whose mass reaches it.
        top_k: >= 0; 0 (or -1) keeps everything.
        max_tokens: most tokens to generate, >= 1; None means the rest of the model's context.
        n: independent completions of the prompt, >= 1.
        seed: 64-bit signed; None lets the run derive one from its own seed and the row.
        stop: strings that end the text; the text is cut before them.
        stop_token_ids: token ids that end the row, next to the model's own.
        ignore_eos: go on past the model's end-of-sequence tokens.
        num_speculative_tokens: drafts a step for this row; None takes the run's, 0 drafts nothing.

    Raises:
        ValueError: for a value of wrong type or out of range; the message names both.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check every field and bring lists and numbers to their one type."""
        put = object.__setattr__
        put(self, "temperature", _number("temperature", self.temperature))
        if self.temperature < 0:
            raise ValueError(f'"temperature" must be >= 0, got {self.temperature:g}')
        if self.temperature > _MAX_TEMPERATURE:
            raise ValueError(
                f'"temperature" must be <= {_MAX_TEMPERATURE:,.0f}, got {self.temperature:g}'
            )
        put(self, "top_p", _number("top_p", self.top_p))
        if not 0 < self.top_p <= 1:
            raise ValueError(f'"top_p" must be in (0, 1], got {self.top_p:g}')
        # -1 is how vLLM spells "off".
        _integer("top_k", self.top_k, -1, _INT32_MAX)
        put(self, "top_k", max(self.top_k, 0))
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, _INT32_MAX)
        _integer("n", self.n, 1, _MAX_SAMPLES)
        if self.seed is not None:
            _integer("seed", self.seed, _INT64_MIN, _INT64_MAX)
        put(self, "stop", _stop_strings(self.stop))
        put(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f'"ignore_eos" must be true or false, got {_show(self.ignore_eos)}')
        if self.num_speculative_tokens is not None:
            _integer("num_speculative_tokens", self.num_speculative_tokens, 0, _INT32_MAX)

    @classmethod
    def from_mapping(
        cls, mapping: Mapping[str, Any], defaults: SamplingParams | None = None
    ) -> SamplingParams:
        """Parameters of one line: `mapping` over `defaults`.

        `max_completion_tokens` is another name of `max_tokens`; a null value means "not given", and
        so does an unsupported key at a value that asks for nothing (`presence_penalty: 0`);
        `speculative` is an object whose only key is `num_speculative_tokens`.

        Raises:
            ValueError: for a key that is unknown or not supported, or for a bad value.
        """
        base = defaults if defaults is not None else cls()
        given: dict[str, Any] = {}
        for key, value in mapping.items():
            if asks_for_nothing(key, value) or (value is None and is_sampling_key(key)):
                continue
            if not is_sampling_key(key):
                raise ValueError(_unknown(key, value))
            if key == "speculative":
                if not isinstance(value, Mapping):
                    raise ValueError(f'"speculative" must be an object, got {_show(value)}')
                for inner, count in value.items():
                    if inner != "num_speculative_tokens":
                        raise ValueError(
                            f'"speculative.{inner}" is not supported; '
                            'only "speculative.num_speculative_tokens" is'
                        )
                    if count is not None:
                        _integer(f"speculative.{inner}", count, 0, _INT32_MAX)
                        given[inner] = count
                continue
            name = "max_tokens" if key == "max_completion_tokens" else key
            if name == "max_tokens" and given.get(name, value) != value:
                raise ValueError('"max_tokens" and "max_completion_tokens" contradict each other')
            given[name] = value
        return replace(base, **given)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < 1e-5

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON can hold them."""
        out = {field.name: getattr(self, field.name) for field in fields(self)}
        out["stop"] = list(self.stop)
        out["stop_token_ids"] = list(self.stop_token_ids)
        return out


# Rows choose their draft length inside "speculative", so that a stray column of that name in a
# data set is not taken for one.
_LINE_KEYS = frozenset(
    {field.name for field in fields(SamplingParams)} - {"num_speculative_tokens"}
    | {"max_completion_tokens", "speculative"}
)


def is_sampling_key(key: str) -> bool:
    """Whether a key of an input line is a sampling parameter that is honoured."""
    return key in _LINE_KEYS


def _squash(key: str) -> str:
    return key.lower().replace("_", "").replace("-", "")


_SQUASHED = {_squash(key): key for key in sorted({*_LINE_KEYS, *UNSUPPORTED_KEYS})}
_LONG_KEYS = [key for key in _SQUASHED if len(key) >= 4]


@lru_cache(maxsize=1024)  # a data set repeats its keys on every line
def _closest(key: str) -> str | None:
    """The sampling key that `key` probably means: other spelling (`topP`) or a slip of a letter."""
    squashed = _squash(key)
    if squashed in _SQUASHED and (len(squashed) > 1 or key in _LINE_KEYS):
        return _SQUASHED[squashed]
    if len(squashed) < 5:
        return None
    found = difflib.get_close_matches(squashed, _LONG_KEYS, n=1, cutoff=0.88)
    return _SQUASHED[found[0]] if found else None


def looks_like_sampling_key(key: str) -> bool:
    """Whether a key must be read as a sampling parameter, honoured, unsupported or misspelt.

    Everything else on a line is data that is carried into the output.
    """
    return key in _LINE_KEYS or key in UNSUPPORTED_KEYS or _closest(key) is not None


def _unknown(key: str, value: object) -> str:
    if key in _SAME_AS:
        return f'"{key}" is not supported; use "{_SAME_AS[key]}"'
    if key in UNSUPPORTED_KEYS:
        off = UNSUPPORTED_KEYS[key]
        but = f", but for {json.dumps(off[0])}" if off else ""
        return f'"{key}" is not supported{but}, got {_show(value)}'
    close = _closest(key)
    if close is not None and close in _LINE_KEYS:
        return f'"{key}" is not a sampling key; did you mean "{close}"?'
    return f'"{key}" is not a sampling key'


def _show(value: object, limit: int = 60) -> str:
    """A value as the user wrote it: JSON spelling, shortened."""
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, str):
        text = '"' + value.replace("\n", "\\n") + '"'
    elif isinstance(value, Mapping):
        text = "an object"
    else:
        text = str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f'"{name}" must be a number, got {_show(value)}')
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f'"{name}" must be a finite number, got {_show(value)}')
    return number


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f'"{name}" must be an integer, got {_show(value)}')
    if value < low:
        raise ValueError(f'"{name}" must be >= {low}, got {value}')
    if value > high:
        raise ValueError(f'"{name}" must be <= {high}, got {_show(value)}')
    return value


def _stop_strings(value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError(f'"stop" must be a string or a list of strings, got {_show(value)}')
    for item in items:
        if not isinstance(item, str):
            raise ValueError(f'"stop" must hold strings only, got {_show(item)}')
        if not item:
            raise ValueError('"stop" must not hold an empty string')
    return tuple(items)


def _stop_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f'"stop_token_ids" must be a list of token ids, got {_show(value)}')
    return tuple(_integer("stop_token_ids", item, 0, _INT32_MAX) for item in value)

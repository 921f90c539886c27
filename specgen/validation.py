"""Every line of an input that a run would refuse, and lines that are there twice."""

from __future__ import annotations

import bisect
import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from specgen.config import EngineConfig
from specgen.errors import RequestError
from specgen.pipeline.request import PromptRow, RequestOutput
from specgen.request_io.reader import ReadOptions, parse_line
from specgen.request_io.source import read_lines
from specgen.wording import printable

if TYPE_CHECKING:
    from specgen.pipeline.prompt_checks import FittedPrompt

__all__ = ["Finding", "Validator", "load_checks"]

_SHOWN_EQUAL_LINES = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about one line.

    Attributes:
        code: as in the `error` of an output line, or `duplicate_id`, `duplicate_line`.
    """

    source: str
    line: int
    code: str
    message: str

    def __str__(self) -> str:
        """`file:line: code: message`."""
        return printable(f"{self.source}:{self.line}: {self.code}: {self.message}")

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def load_checks(
    config: EngineConfig, template_flag: str | None = None
) -> Callable[[PromptRow], FittedPrompt]:
    """What the engine would check of a row: returns its prompt, or raises `RequestError`.

    Args:
        config: what model, and how its prompts are made.
        template_flag: a flag that sends every prompt through a chat template.

    Raises:
        ModelError: no usable model configuration or tokenizer, or no template for the flag.
    """
    from specgen.pipeline.prompt_checks import fitted_prompt
    from specgen.pipeline.tokenization import Tokenizer
    from specgen.resolve import resolve

    resolved = resolve(config, with_weights=False)
    tokenizer = Tokenizer(
        resolved.tokenizer_dir,
        chat_template=resolved.chat_template,
        trust_remote_code=resolved.trust_remote_code,
    )
    tokenizer.require_template(
        template_flag, "give one with --chat-template, or leave the flag out"
    )

    def check(row: PromptRow) -> FittedPrompt:
        return fitted_prompt(row, tokenizer, resolved)

    return check


class Validator:
    """Looks at every line once; keeps 20 bytes of it, to find those that are equal.

    Args:
        check: returns a row's prompt, or raises `RequestError`.
    """

    def __init__(self, check: Callable[[PromptRow], FittedPrompt]) -> None:
        self._check = check
        self._digests = array("Q")
        self._ids = array("Q")
        self._lines = array("I")
        self._sources: list[str] = []
        self._starts: list[int] = []
        self.num_bad = 0
        self.num_duplicate_ids = 0
        self.num_equal_lines = 0
        self.num_prompt_tokens = 0
        self.longest_prompt = 0
        self.num_truncated = 0

    @property
    def num_problems(self) -> int:
        """Findings that keep a row, or its id, from being good."""
        return self.num_bad + self.num_duplicate_ids

    def examine(self, paths: Sequence[str], options: ReadOptions) -> Iterator[Finding]:
        """Findings about lines in order, then those about lines that are there twice.

        Raises:
            InputError: an input cannot be read (further).
        """
        if options.limit != 0:
            yield from self._single_lines(paths, options)
        yield from self._duplicates()

    def _single_lines(self, paths: Sequence[str], options: ReadOptions) -> Iterator[Finding]:
        for index, raw in enumerate(read_lines(paths)):
            if not self._sources or self._sources[-1] != raw.source or raw.line < self._lines[-1]:
                self._sources.append(raw.source)
                self._starts.append(index)
            self._lines.append(raw.line)
            self._digests.append(int(raw.digest, 16))
            item = parse_line(raw, index, options)
            row = item.row if isinstance(item, RequestOutput) else item
            self._ids.append(_id_key(row.extras.get("custom_id")))
            error = item.error if isinstance(item, RequestOutput) else self._error(row)
            if error is not None:
                self.num_bad += 1
                yield Finding(raw.source, raw.line, error.code, error.message)
            if options.limit is not None and index + 1 >= options.limit:
                return

    def _error(self, row: PromptRow) -> RequestError | None:
        try:
            prompt = self._check(row)
        except RequestError as error:
            return error
        self.num_prompt_tokens += len(prompt.token_ids)
        self.longest_prompt = max(self.longest_prompt, len(prompt.token_ids))
        self.num_truncated += prompt.truncated
        return None

    def _duplicates(self) -> Iterator[Finding]:
        for first, later in _equal(self._ids, ignore=0):
            for index in later:
                self.num_duplicate_ids += 1
                source, line = self._place(index)
                yield Finding(source, line, "duplicate_id", f"its id is that of {self._at(first)}")
        for first, later in _equal(self._digests):
            for index in later:
                self.num_equal_lines += 1
                if self.num_equal_lines <= _SHOWN_EQUAL_LINES:
                    source, line = self._place(index)
                    yield Finding(source, line, "duplicate_line", f"equals {self._at(first)}")

    def _place(self, index: int) -> tuple[str, int]:
        return self._sources[bisect.bisect(self._starts, index) - 1], self._lines[index]

    def _at(self, index: int) -> str:
        source, line = self._place(index)
        return f"{source}:{line}"

    def summary(self) -> dict[str, int]:
        """What was seen, in numbers."""
        return {
            "rows": len(self._lines),
            "bad_rows": self.num_bad,
            "duplicate_ids": self.num_duplicate_ids,
            "equal_lines": self.num_equal_lines,
            "prompt_tokens": self.num_prompt_tokens,
            "longest_prompt": self.longest_prompt,
            "truncated_prompts": self.num_truncated,
        }


def _id_key(value: Any) -> int:
    """64 bits that stand for an id; 0 for none."""
    if value is None:
        return 0
    text = json.dumps(value, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") or 1


def _equal(keys: array[int], ignore: int | None = None) -> Iterator[tuple[int, Sequence[int]]]:
    """Positions of equal keys: the first, and the later ones, in order of the first."""
    values = np.frombuffer(keys, dtype=np.uint64) if keys else np.empty(0, dtype=np.uint64)
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    same = np.flatnonzero(ordered[1:] == ordered[:-1])
    if not same.size:
        return
    groups: dict[int, list[int]] = {}
    for place in same.tolist():
        if ignore is not None and ordered[place] == ignore:
            continue
        groups.setdefault(int(ordered[place]), [int(order[place])]).append(int(order[place + 1]))
    for positions in sorted(groups.values()):
        yield positions[0], positions[1:]

"""The output object of a row.

Keys of the input line that are no prompt and no sampling are carried: at the top level under their
own names, or, where the output has a key of that name itself, inside `"input"`. So nothing is
renamed, nothing is lost, and the fixed keys always mean the same.
"""

from __future__ import annotations

import json
from typing import Any

from specgen.pipeline.request import ChoiceOutput, PromptRow, RequestOutput
from specgen.request_io import fast_json

__all__ = [
    "RESERVED_KEYS", "encode", "error_message", "error_object", "head", "hint_for", "metrics",
    "row_metrics", "to_record", "usage",
]  # fmt: skip

#: Keys the output owns; data keys of these names go under "input".
RESERVED_KEYS = frozenset(
    {"index", "input_hash", "input", "status", "choices", "usage", "seed", "metrics", "error"}
)

_HINTS = {
    "chat_template_error": "check roles and their order against the model's template",
    "duplicate_key": "give each key once",
    "empty_prompt": "give at least one character or token",
    "invalid_json": "each line must be one JSON object; a program such as jq -c writes them so",
    "missing_prompt": 'give "prompt" or "messages", or name the key with --prompt-field',
    "no_chat_template": 'give --chat-template, or "prompt" instead of "messages"',
    "not_an_object": 'each line must be an object such as {"prompt": "..."}',
    "prompt_too_long": "shorten it, or give --overlong truncate-left",
}


def to_record(output: RequestOutput, *, return_token_ids: bool = False) -> dict[str, Any]:
    """The JSON object of a finished row.

    Its first keys are `index`, `input_hash` and `status`, which is all that a resume reads.

    Raises:
        AssertionError: the accounts of a choice do not explain its tokens.
    """
    row = output.row
    record = head(output)
    shadowed = {key: value for key, value in row.extras.items() if key in RESERVED_KEYS}
    record.update((k, v) for k, v in row.extras.items() if k not in RESERVED_KEYS)
    if shadowed:
        record["input"] = shadowed
    if output.error is not None:
        record |= {"choices": [], "usage": None, "seed": None, "metrics": None}
        record["error"] = error_object(output)
        return record
    several = len(output.choices) > 1
    record |= {
        "choices": [_choice(c, several, return_token_ids) for c in output.choices],
        "usage": usage(output),
        "seed": output.choices[0].seed,
        "metrics": row_metrics(output),
        "error": None,
    }
    return record


def usage(output: RequestOutput) -> dict[str, int]:
    """Tokens of a row; the prompt counts once, however many choices it has."""
    prompt_tokens = len(output.prompt_token_ids)
    completion_tokens = sum(len(choice.token_ids) for choice in output.choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def metrics(choice: ChoiceOutput) -> dict[str, Any]:
    """The `metrics` object of one choice."""
    return {"speculative_decoding": choice.stats.to_dict()}


def row_metrics(output: RequestOutput) -> dict[str, Any]:
    """The `metrics` object of a row: the sums over its choices, and whether its prompt was cut.

    Raises:
        AssertionError: the accounts of a choice do not explain its tokens.
    """
    for choice in output.choices:
        choice.stats.check(len(choice.token_ids))
    cut = {"prompt_truncated": True} if output.prompt_truncated else {}
    return {"speculative_decoding": output.stats.to_dict(), **cut}


def error_object(output: RequestOutput) -> dict[str, Any]:
    """The `error` object of a failed row."""
    assert output.error is not None
    return {
        "code": output.error.code,
        "message": error_message(output),
        "line": output.row.line,
    }


def head(output: RequestOutput) -> dict[str, Any]:
    """The keys that every line of every output form begins with, in this order."""
    return {
        "index": output.row.index,
        "input_hash": output.row.input_hash,
        "status": "ok" if output.error is None else "error",
    }


def _choice(choice: ChoiceOutput, several: bool, return_token_ids: bool) -> dict[str, Any]:
    out: dict[str, Any] = {"index": choice.index, "text": choice.text}
    if return_token_ids:
        out["token_ids"] = list(choice.token_ids)
    out["finish_reason"] = choice.finish_reason
    out["stop_reason"] = choice.stop_reason
    if several:
        out["seed"] = choice.seed
        out["metrics"] = metrics(choice)
    return out


def error_message(output: RequestOutput) -> str:
    """What is wrong with a failed row, with file and line in front."""
    assert output.error is not None
    return f"{location(output.row)}: {output.error.message}"


def hint_for(code: str) -> str | None:
    """What to do about a failed row, where that can be said of all with this code."""
    return _HINTS.get(code)


def location(row: PromptRow) -> str:
    """`file:line` of a row."""
    return f"{row.source}:{row.line}"


_LINE_ENDS = [
    (character.encode(), f"\\u{ord(character):04x}".encode())
    for character in ("\u2028", "\u2029", "\u0085")
]
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode(record: dict[str, Any]) -> bytes:
    """A record as one line of JSON without its line end.

    Text stays readable (no `\\uXXXX` for letters), but U+2028, U+2029 and U+0085 are escaped,
    because some readers split lines there.

    Raises:
        ValueError: a NaN or an infinity, which JSON has not.
    """
    data = fast_json.dump(record)
    if data is None:
        data = _ENCODER.encode(record).encode()
    if not data.isascii():
        for character, escape in _LINE_ENDS:
            if character in data:
                data = data.replace(character, escape)
    return data

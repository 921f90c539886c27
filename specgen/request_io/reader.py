"""From a line of input to a `PromptRow`, or to the error row it costs.

A line is a JSON object with exactly one of

* `prompt` (or the field named by `--prompt-field`): a string, or a list of token ids,
* `prompt_token_ids`: a list of token ids,
* `messages`: a chat, a list of `{"role", "content"}`,
* `body`: a request of the OpenAI batch API, see `openai_batch`.

Sampling keys override the run's defaults. A key that means sampling but is not honoured (of another
engine, or misspelt) is an error. Every other key is data, and is carried into the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from specgen.errors import RequestError
from specgen.pipeline.request import PromptRow, RequestOutput
from specgen.request_io.openai_batch import is_batch_line, unwrap
from specgen.request_io.partial import Head
from specgen.request_io.shard import WHOLE, Shard
from specgen.request_io.source import MAX_LINE_BYTES, RawLine, read_lines
from specgen.request_io.strict_json import RefusedError, kind_of, parse_object
from specgen.sampling_params import SamplingParams, looks_like_sampling_key

__all__ = ["PassedRow", "ReadOptions", "parse_line", "read_rows"]

ApplyChatTemplate = Literal["auto", "always", "never"]

_INT32_MAX = 2**31 - 1
_MAX_SEEN = 256
_MESSAGE_KEYS = frozenset({"role", "content", "name"})


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How lines become rows.

    Attributes:
        sampling: defaults for keys that a line does not give.
        prompt_field: the key that holds the prompt.
        id_field: the key whose value becomes `custom_id` of the output; None carries all as named.
        system_prompt: a system message put before chats that have none.
        apply_chat_template: `auto` uses the template for `messages`, and for prompt strings only
            if there is a system prompt to put before them; `always` makes every prompt string a
            user message; `never` refuses `messages`. Token ids are never touched.
        limit: read at most so many rows of the whole input.
        shard: the rows to parse; others are passed by.
        seen: a cache of what sampling keys of lines came to.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    prompt_field: str = "prompt"
    id_field: str | None = None
    system_prompt: str | None = None
    apply_chat_template: ApplyChatTemplate = "auto"
    limit: int | None = None
    shard: Shard = WHOLE
    seen: dict[str, SamplingParams] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def prompt_keys(self) -> tuple[str, ...]:
        """The keys of which a line has exactly one."""
        return _prompt_keys(self.prompt_field)

    @property
    def template_flag(self) -> str | None:
        """The flag that sends every prompt string through a chat template, if one does."""
        if self.apply_chat_template == "always":
            return "--apply-chat-template always"
        return None if self.system_prompt is None else "--system-prompt"


@lru_cache(maxsize=16)  # asked several times a line
def _prompt_keys(prompt_field: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((prompt_field, "prompt_token_ids", "messages")))


@dataclass(frozen=True, slots=True)
class PassedRow:
    """A line that needs no work: of another shard, or finished by an earlier run (`kept`)."""

    index: int
    input_hash: str
    kept: Head | None = None


def read_rows(
    paths: Sequence[str],
    options: ReadOptions,
    keep: Callable[[int, str], Head | None] = lambda index, input_hash: None,
    lines: Iterable[RawLine] | None = None,
) -> Iterator[PromptRow | RequestOutput | PassedRow]:
    """Rows of all inputs, lazily and in order; a bad line comes as a finished `RequestOutput`.

    Args:
        paths: files, or `-`.
        options: how lines become rows.
        keep: told index and hash of a line, returns what an earlier run left of it, if anything.
        lines: those of the inputs, where something else reads them.

    Raises:
        InputError: an input that cannot be read (further).
    """
    if options.limit == 0:
        return
    whole = options.shard.count == 1
    for index, raw in enumerate(read_lines(paths) if lines is None else lines):
        if not (whole or options.shard.owns(index)):
            yield PassedRow(index, raw.digest)
        elif (kept := keep(index, raw.digest)) is not None:
            yield PassedRow(index, raw.digest, kept)
        else:
            yield parse_line(raw, index, options)
        if options.limit is not None and index + 1 >= options.limit:
            return


def parse_line(raw: RawLine, index: int, options: ReadOptions) -> PromptRow | RequestOutput:
    """One line as a row; never raises for what the line holds."""
    extras: dict[str, Any] = {}
    try:
        if raw.too_long:
            raise RefusedError("line_too_long", f"line is longer than {MAX_LINE_BYTES:,} bytes")
        obj = parse_object(raw.data)
        if "body" in obj and is_batch_line(obj, options.prompt_keys):
            if "custom_id" in obj:
                extras = {"custom_id": obj["custom_id"]}
            obj = unwrap(obj, options.prompt_field)
        extras, sampling_keys = _split(obj, options)
        _take_id(obj, extras, options)
        prompt_key, prompt = _prompt(obj, options)
        sampling = _sampling(sampling_keys, options)
        return PromptRow(
            index=index,
            input_hash=raw.digest,
            line=raw.line,
            source=raw.source,
            sampling=sampling,
            extras=extras,
            prompt_key=prompt_key,
            **prompt,
        )
    except RefusedError as refused:
        row = PromptRow(
            index=index,
            input_hash=raw.digest,
            line=raw.line,
            source=raw.source,
            sampling=options.sampling,
            extras=extras,
        )
        return RequestOutput(row, (), (), RequestError(refused.code, str(refused), raw.line))


def _split(obj: Mapping[str, Any], options: ReadOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """Data keys and sampling keys of a line, without the keys that hold its prompt."""
    taken = options.prompt_keys
    extras: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for key, value in obj.items():
        if key in taken:
            continue
        (sampling if looks_like_sampling_key(key) else extras)[key] = value
    return extras, sampling


def _sampling(given: Mapping[str, Any], options: ReadOptions) -> SamplingParams:
    """The line's sampling over the run's."""
    if not given:
        return options.sampling
    # Most lines ask for the same as others. The key tells 1 from 1.0 and from true.
    key = repr(given)
    cached = options.seen.get(key)
    if cached is not None:
        return cached
    try:
        sampling = SamplingParams.from_mapping(given, options.sampling)
    except ValueError as error:
        raise RefusedError("invalid_value", str(error)) from error
    if len(options.seen) >= _MAX_SEEN:
        options.seen.clear()
    options.seen[key] = sampling
    return sampling


def _take_id(obj: Mapping[str, Any], extras: dict[str, Any], options: ReadOptions) -> None:
    """Move the value of `--id-field` to `custom_id`."""
    name = options.id_field
    if name is None or name == "custom_id":
        if name is not None and name not in obj:
            raise RefusedError("missing_id", f'"{name}" is missing (--id-field)')
        return
    if name not in obj:
        raise RefusedError("missing_id", f'"{name}" is missing (--id-field)')
    if "custom_id" in extras:
        raise RefusedError("invalid_value", f'"custom_id" is given, and --id-field names "{name}"')
    extras.pop(name, None)
    extras["custom_id"] = obj[name]


def _prompt(obj: Mapping[str, Any], options: ReadOptions) -> tuple[str, dict[str, Any]]:
    """The prompt's key, and the prompt as the one matching field of `PromptRow`."""
    names = [name for name in options.prompt_keys if name in obj]
    if not names:
        raise RefusedError("missing_prompt", f'"{options.prompt_field}" is missing')
    if len(names) > 1:
        raise RefusedError("invalid_value", f'"{names[0]}" and "{names[1]}" exclude each other')
    name, value = names[0], obj[names[0]]
    if name == "messages":
        return name, {"messages": _messages(value, options)}
    if isinstance(value, str) and name != "prompt_token_ids":
        if not value:
            raise RefusedError("empty_prompt", f'"{name}" is empty')
        templated = options.apply_chat_template == "always" or (
            options.apply_chat_template == "auto" and options.system_prompt is not None
        )
        if templated:
            messages = _with_system([{"role": "user", "content": value}], options)
            return name, {"messages": messages}
        return name, {"prompt": value}
    if isinstance(value, list):
        if options.system_prompt is not None:
            raise RefusedError(
                "invalid_value", f'"{name}" holds token ids, --system-prompt needs text'
            )
        return name, {"prompt_token_ids": _token_ids(name, value)}
    wanted = "a list of token ids" if name == "prompt_token_ids" else "a string or token ids"
    raise RefusedError("invalid_value", f'"{name}" must be {wanted}, got {kind_of(value)}')


def _token_ids(name: str, value: list[Any]) -> tuple[int, ...]:
    if not value:
        raise RefusedError("empty_prompt", f'"{name}" is empty')
    # type(), not isinstance(): true is not a token id.
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= _INT32_MAX:
        return tuple(value)
    for position, item in enumerate(value):
        if type(item) is not int:
            raise RefusedError(
                "invalid_value", f'"{name}[{position}]" must be an integer, got {kind_of(item)}'
            )
        if not 0 <= item <= _INT32_MAX:
            raise RefusedError("invalid_value", f'"{name}[{position}]" is no token id: {item}')
    raise AssertionError("the loop above finds what the quick test found")


def _messages(value: Any, options: ReadOptions) -> list[dict[str, str]]:
    if options.apply_chat_template == "never":
        raise RefusedError(
            "invalid_value", '"messages" need a chat template, which is set to "never"'
        )
    if not isinstance(value, list):
        raise RefusedError("invalid_value", f'"messages" must be a list, got {kind_of(value)}')
    if not value:
        raise RefusedError("empty_prompt", '"messages" is empty')
    messages = []
    for position, message in enumerate(value):
        where = f"messages[{position}]"
        if not isinstance(message, dict):
            raise RefusedError(
                "invalid_value", f'"{where}" must be an object, got {kind_of(message)}'
            )
        for key in message:
            if key not in _MESSAGE_KEYS:
                raise RefusedError("invalid_value", f'"{where}.{key}" is not supported')
        text: dict[str, str] = {}
        for key in ("role", "content"):
            if key not in message:
                raise RefusedError("invalid_value", f'"{where}.{key}" is missing')
        for key, item in message.items():
            text[key] = (
                _content(f"{where}.{key}", item)
                if key == "content"
                else _text(f"{where}.{key}", item)
            )
        messages.append(text)
    return _with_system(messages, options)


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RefusedError("invalid_value", f'"{where}" must be a string, got {kind_of(value)}')
    return value


def _content(where: str, value: Any) -> str:
    """A message's text; the API's list of text parts is joined."""
    if not isinstance(value, list):
        return _text(where, value)
    parts = []
    for position, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or len(part) != 2:
            raise RefusedError("invalid_value", f'"{where}[{position}]" must be a text part')
        parts.append(_text(f"{where}[{position}].text", part.get("text")))
    return "".join(parts)


def _with_system(messages: list[dict[str, str]], options: ReadOptions) -> list[dict[str, str]]:
    if options.system_prompt is None or messages[0].get("role") == "system":
        return messages
    return [{"role": "system", "content": options.system_prompt}, *messages]

"""The OpenAI batch API's lines: requests in, envelopes out.

A request line is `{"custom_id", "method": "POST", "url", "body"}` for `/v1/chat/completions` or
`/v1/completions`. Its body must ask for something that is done here: keys that do not touch the
text (`model`, `user`, ...) are let pass, options at the value that means "off" too, and everything
else is refused, because the answer would not be what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from specgen.pipeline.request import ChoiceOutput, RequestOutput
from specgen.request_io.record import error_object, head, metrics, row_metrics, usage
from specgen.request_io.strict_json import RefusedError, kind_of
from specgen.sampling_params import looks_like_sampling_key
from specgen.unsupported_sampling import asks_for_nothing

__all__ = ["is_batch_line", "to_envelope", "unwrap"]

_PROMPT_KEYS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
_LINE_KEYS = frozenset({"custom_id", "method", "url", "body"})
# Of no effect on the text: what answers (this model, always), bookkeeping, how it is sent.
_IGNORED = frozenset({"model", "user", "metadata", "store", "service_tier", "stream_options"})
# Of no effect at these values; those of sampling are in `unsupported_sampling`.
_OFF: Mapping[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (True, False),
    "stream": (False,),
}


def is_batch_line(obj: Mapping[str, Any], prompt_keys: Iterable[str]) -> bool:
    """Whether an input line is a request of the batch API, and not data with a key `body`."""
    return "body" in obj and not any(key in obj for key in prompt_keys)


def unwrap(obj: Mapping[str, Any], prompt_field: str) -> dict[str, Any]:
    """The request as a flat line: `custom_id`, prompt and sampling keys.

    Raises:
        RefusedError: it is not complete, or asks for something that is not done here.
    """
    for key in obj:
        if key not in _LINE_KEYS:
            raise RefusedError("invalid_value", f'"{key}" is no key of a batch line')
    custom_id, method, url, body = (obj.get(key) for key in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str):
        raise RefusedError("missing_id", f'"custom_id" must be a string, got {kind_of(custom_id)}')
    if method != "POST":
        raise RefusedError("invalid_value", f'"method" must be "POST", got {kind_of(method)}')
    wanted = _PROMPT_KEYS.get(url) if isinstance(url, str) else None
    if wanted is None:
        raise RefusedError(
            "unsupported_url",
            f'"url" must be one of {", ".join(_PROMPT_KEYS)}, got {kind_of(url)}',
        )
    if not isinstance(body, dict):
        raise RefusedError("invalid_value", f'"body" must be an object, got {kind_of(body)}')
    if body.get(wanted) is None:
        raise RefusedError("missing_prompt", f'"body.{wanted}" is missing')
    flat: dict[str, Any] = {"custom_id": custom_id}
    for key, value in body.items():
        if key == wanted:
            flat[prompt_field if wanted == "prompt" else wanted] = value
        elif key in _IGNORED or value is None or _is_off(key, value):
            continue
        elif looks_like_sampling_key(key):
            flat[key] = value
        else:
            raise RefusedError("invalid_value", f'"body.{key}" is not supported')
    return flat


def _is_off(key: str, value: Any) -> bool:
    return asks_for_nothing(key, value) or any(value is off for off in _OFF.get(key, ()))


def to_envelope(
    output: RequestOutput, *, model: str, created: int, return_token_ids: bool = False
) -> dict[str, Any]:
    """A finished row as the batch API answers it, with our keys first and our metrics inside.

    Args:
        output: the row.
        model: name of the model in the answer.
        created: seconds since 1970.
        return_token_ids: whether choices hold the generated ids.
    """
    row = output.row
    request = f"{row.index}-{row.input_hash}"
    envelope = head(output)
    envelope["id"] = f"batch_req_{request}"
    envelope["custom_id"] = row.extras.get("custom_id")
    others = {key: value for key, value in row.extras.items() if key != "custom_id"}
    if others:
        envelope["input"] = others
    if output.error is not None:
        envelope["response"] = None
        envelope["error"] = error_object(output)
        return envelope
    chat, several = row.messages is not None, len(output.choices) > 1
    envelope["response"] = {
        "status_code": 200,
        "request_id": request,
        "body": {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request}",
            "object": "chat.completion" if chat else "text_completion",
            "created": created,
            "model": model,
            "choices": [_choice(c, chat, several, return_token_ids) for c in output.choices],
            "usage": usage(output),
            "metrics": row_metrics(output),
        },
    }
    envelope["error"] = None
    return envelope


def _choice(
    choice: ChoiceOutput, chat: bool, several: bool, return_token_ids: bool
) -> dict[str, Any]:
    out: dict[str, Any] = {"index": choice.index}
    if chat:
        out["message"] = {"role": "assistant", "content": choice.text}
    else:
        out["text"] = choice.text
    out["logprobs"] = None
    out["finish_reason"] = choice.finish_reason
    out["stop_reason"] = choice.stop_reason
    out["seed"] = choice.seed
    if return_token_ids:
        out["token_ids"] = list(choice.token_ids)
    if several:
        out["metrics"] = metrics(choice)
    return out

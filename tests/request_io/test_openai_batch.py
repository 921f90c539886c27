from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from specgen.errors import RequestError
from specgen.pipeline.request import ChoiceOutput, PromptRow, RequestOutput
from specgen.request_io.openai_batch import to_envelope
from specgen.request_io.partial import read_head
from specgen.request_io.reader import ReadOptions, parse_line
from specgen.request_io.record import encode
from specgen.request_io.source import RawLine
from specgen.sampling_params import SamplingParams
from specgen.stats import SpeculationStats

CHAT = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "gpt", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
}
PLAIN = {
    "custom_id": "b",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "gpt", "prompt": "hi", "temperature": 0},
}


def parse(line: dict[str, Any], **options: Any) -> PromptRow | RequestOutput:
    raw = RawLine("in.jsonl", 3, json.dumps(line).encode(), "0123456789abcdef")
    return parse_line(raw, 2, ReadOptions(**options))


def refused(line: dict[str, Any], **options: Any) -> tuple[str, str]:
    found = parse(line, **options)
    assert isinstance(found, RequestOutput)
    assert found.error is not None
    return found.error.code, found.error.message


def with_body(line: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {**line, "body": {**line["body"], **keys}}


def test_chat() -> None:
    row = parse(CHAT)
    assert isinstance(row, PromptRow)
    assert row.messages == [{"role": "user", "content": "hi"}]
    assert row.sampling == SamplingParams(max_tokens=5)
    assert row.extras == {"custom_id": "a"}


@pytest.mark.parametrize("prompt", ["hi", [5, 6]])
@pytest.mark.parametrize("prompt_field", ["prompt", "question"])
def test_plain(prompt: Any, prompt_field: str) -> None:
    row = parse(with_body(PLAIN, prompt=prompt), prompt_field=prompt_field)
    assert isinstance(row, PromptRow)
    assert (row.prompt or list(row.prompt_token_ids or ())) == prompt
    assert row.sampling == SamplingParams(temperature=0.0)


def test_options_that_ask_for_nothing_are_let_pass() -> None:
    off = {
        "frequency_penalty": 0, "presence_penalty": 0.0, "logprobs": False, "top_logprobs": None,
        "logit_bias": {}, "stream": False, "user": "me", "metadata": {"a": "b"}, "store": True,
        "response_format": {"type": "text"}, "tools": [], "best_of": 1, "echo": False,
        "seed": None, "service_tier": "auto", "stream_options": None,
    }  # fmt: skip
    row = parse(with_body(CHAT, **off))
    assert isinstance(row, PromptRow)
    assert row.extras == {"custom_id": "a"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"stream": True}, '"body.stream" is not supported'),
        ({"echo": True}, '"echo" is not supported'),
        ({"best_of": 2}, '"best_of" is not supported'),
        ({"response_format": {"type": "json_object"}}, '"response_format" is not supported'),
        ({"tools": [{"type": "function"}]}, '"tools" is not supported'),
        ({"modalities": ["audio"]}, '"body.modalities" is not supported'),
        ({"temprature": 1}, 'did you mean "temperature"'),
        ({"temperature": -1}, '"temperature" must be >= 0'),
        ({"messages": []}, '"messages" is empty'),
        ({"logprobs": 0}, '"logprobs" is not supported'),  # asks for that of the token itself
    ],
)
def test_what_is_not_done_is_refused(keys: dict[str, Any], message: str) -> None:
    assert message in refused(with_body(CHAT, **keys))[1]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"custom_id": None}, "missing_id"),
        ({"custom_id": 7}, "missing_id"),
        ({"method": "GET"}, "invalid_value"),
        ({"url": "/v1/embeddings"}, "unsupported_url"),
        ({"url": ["/v1/completions"]}, "unsupported_url"),
        ({"body": "text"}, "invalid_value"),
        ({"body": {}}, "missing_prompt"),
        ({"body": {"prompt": "for the other url"}}, "missing_prompt"),
        ({"extra": 1}, "invalid_value"),
    ],
)
def test_incomplete_requests(changes: dict[str, Any], code: str) -> None:
    found = parse({**CHAT, **changes})
    assert isinstance(found, RequestOutput)
    assert found.error is not None
    assert found.error.code == code
    assert found.row.extras == {"custom_id": {**CHAT, **changes}["custom_id"]}


def test_a_data_key_named_body_stays_data() -> None:
    row = parse({"prompt": "x", "body": "the text of a letter"})
    assert isinstance(row, PromptRow)
    assert row.extras == {"body": "the text of a letter"}


def finished(line: dict[str, Any], num_choices: int = 1) -> RequestOutput:
    row = parse(line)
    assert isinstance(row, PromptRow)
    choices = []
    for index in range(num_choices):
        stats = SpeculationStats(3)
        stats.add_plain(1)
        stats.add_spec_step(3, 1, 2)
        choices.append(ChoiceOutput(index, (5, 6, 2), "text", "stop", None, 7, stats))
    return RequestOutput(row, (1, 2), tuple(choices))


def test_envelopes() -> None:
    output = finished(CHAT)
    envelope = to_envelope(output, model="m", created=12, return_token_ids=True)
    assert list(envelope)[:3] == ["index", "input_hash", "status"]
    assert read_head(encode(envelope)) is not None
    assert envelope["custom_id"] == "a"
    assert envelope["error"] is None
    body = envelope["response"]["body"]
    assert envelope["response"]["status_code"] == 200
    assert (body["object"], body["created"], body["model"]) == ("chat.completion", 12, "m")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "text"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "seed": 7,
            "token_ids": [5, 6, 2],
        }
    ]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert body["metrics"]["speculative_decoding"]["num_spec_steps"] == 1
    plain = to_envelope(finished(PLAIN, 2), model="m", created=12)["response"]["body"]
    assert plain["object"] == "text_completion"
    assert [c["text"] for c in plain["choices"]] == ["text", "text"]
    assert plain["choices"][0]["metrics"]["speculative_decoding"]["num_spec_steps"] == 1
    assert plain["metrics"]["speculative_decoding"]["num_spec_steps"] == 2


def test_envelopes_of_failed_rows_and_of_other_input() -> None:
    output = replace(finished(CHAT), choices=(), error=RequestError("bad_logits", "NaN", 3))
    envelope = to_envelope(output, model="m", created=12)
    assert envelope["response"] is None
    assert envelope["status"] == "error"
    assert envelope["error"] == {"code": "bad_logits", "message": "in.jsonl:3: NaN", "line": 3}
    flat = to_envelope(finished({"prompt": "x", "lang": "de"}), model="m", created=12)
    assert (flat["custom_id"], flat["input"]) == (None, {"lang": "de"})

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from specgen.errors import RequestError
from specgen.pipeline.request import ChoiceOutput, PromptRow, RequestOutput
from specgen.request_io import fast_json
from specgen.request_io.record import RESERVED_KEYS, encode, to_record
from specgen.sampling_params import SamplingParams
from specgen.stats import SpeculationStats


@pytest.fixture(autouse=True, params=["fast", "strict"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "strict":
        monkeypatch.setattr(fast_json, "_LOADS", None)
        monkeypatch.setattr(fast_json, "_DUMPS", None)
    elif fast_json._LOADS is None:
        pytest.skip("orjson is not installed")


def choice(index: int = 0, tokens: tuple[int, ...] = (5, 6, 2), text: str = "ab") -> ChoiceOutput:
    stats = SpeculationStats(3)
    stats.add_plain(1)
    stats.add_spec_step(3, 1, 2)
    return ChoiceOutput(index, tokens, text, "stop", None, 90 + index, stats)


def output(*choices: ChoiceOutput, error: Any = None, **extras: Any) -> RequestOutput:
    row = PromptRow(
        4, "0123456789abcdef", 7, "p.jsonl", SamplingParams(), prompt="x", extras=extras
    )
    return RequestOutput(row, (1, 2), choices, error)


def replace_extras(done: RequestOutput, extras: dict[str, Any]) -> RequestOutput:
    return replace(done, row=replace(done.row, extras=extras))


def test_a_row() -> None:
    record = to_record(output(choice(), custom_id="q"))
    assert list(record) == [
        "index", "input_hash", "status", "custom_id", "choices", "usage", "seed", "metrics",
        "error",
    ]  # fmt: skip
    assert record["choices"] == [
        {"index": 0, "text": "ab", "finish_reason": "stop", "stop_reason": None}
    ]
    assert record["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert (record["index"], record["input_hash"]) == (4, "0123456789abcdef")
    assert (record["status"], record["seed"], record["error"]) == ("ok", 90, None)
    assert record["metrics"] == {"speculative_decoding": choice().stats.to_dict()}


def test_token_ids_on_request() -> None:
    record = to_record(output(choice()), return_token_ids=True)
    assert record["choices"][0]["token_ids"] == [5, 6, 2]


def test_several_choices_carry_their_own_metrics_and_the_row_their_sum() -> None:
    record = to_record(output(choice(0), choice(1)))
    assert [c["seed"] for c in record["choices"]] == [90, 91]
    own = [c["metrics"]["speculative_decoding"] for c in record["choices"]]
    row = record["metrics"]["speculative_decoding"]
    assert row["num_spec_steps"] == sum(o["num_spec_steps"] for o in own) == 2
    assert row["acceptance_histogram"] == [0, 2, 0, 0]
    assert record["usage"]["completion_tokens"] == 6


def test_a_failed_row_has_the_same_keys() -> None:
    error = RequestError("prompt_too_long", '"prompt" has 9 tokens')
    record = to_record(output(error=error, custom_id="q"))
    assert list(record) == list(to_record(output(choice(), custom_id="q")))
    assert record["status"] == "error"
    assert record["choices"] == []
    assert record["error"] == {
        "code": "prompt_too_long",
        "message": 'p.jsonl:7: "prompt" has 9 tokens',
        "line": 7,
    }


def test_data_keys_never_replace_the_outputs_own() -> None:
    extras = {key: f"mine {key}" for key in RESERVED_KEYS}
    record = to_record(replace_extras(output(choice()), {**extras, "topic": "t"}))
    assert record["input"] == extras
    assert record["topic"] == "t"
    assert list(record)[:2] == ["index", "input_hash"]
    assert (record["index"], record["status"], record["error"]) == (4, "ok", None)
    plain = to_record(output(choice(), input="x"))
    assert plain["input"] == {"input": "x"}
    assert set(to_record(output(choice()))) <= RESERVED_KEYS


def test_accounts_that_do_not_explain_the_tokens_never_reach_the_output() -> None:
    with pytest.raises(AssertionError, match="completion tokens"):
        to_record(output(choice(tokens=(5, 6, 7, 2))))


def test_a_line_is_one_line_for_every_reader() -> None:
    text = "a\nb\r\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\U0001f600é"
    line = encode({"text": text, text: 1})
    assert line.decode().splitlines() == [line.decode()]
    assert json.loads(line) == {"text": text, text: 1}
    assert "é".encode() in line


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), [1, float("nan")], {"y": [-math.inf]}]
)
def test_what_is_no_json_is_not_written(value: Any) -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode({"x": value})

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specgen.pipeline.request import PromptRow, RequestOutput
from specgen.request_io import fast_json
from specgen.request_io.reader import ReadOptions, parse_line, read_rows
from specgen.request_io.source import RawLine
from specgen.sampling_params import SamplingParams


@pytest.fixture(autouse=True, params=["fast", "strict"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "strict":
        monkeypatch.setattr(fast_json, "_LOADS", None)
        monkeypatch.setattr(fast_json, "_DUMPS", None)
    elif fast_json._LOADS is None:
        pytest.skip("orjson is not installed")


def parse(data: bytes | str | dict[str, Any], **options: Any) -> PromptRow | RequestOutput:
    if isinstance(data, dict):
        data = json.dumps(data)
    if isinstance(data, str):
        data = data.encode()
    return parse_line(RawLine("in.jsonl", 17, data, "0" * 16), 3, ReadOptions(**options))


def good(data: bytes | str | dict[str, Any], **options: Any) -> PromptRow:
    row = parse(data, **options)
    assert isinstance(row, PromptRow), row
    return row


def bad(data: bytes | str | dict[str, Any], **options: Any) -> tuple[str, str]:
    output = parse(data, **options)
    assert isinstance(output, RequestOutput), output
    assert output.error is not None
    assert output.error.line == 17
    assert (output.row.index, output.row.source, output.row.line) == (3, "in.jsonl", 17)
    return output.error.code, output.error.message


def test_the_three_kinds_of_prompt() -> None:
    row = good({"prompt": "hi"})
    assert (row.prompt, row.prompt_token_ids, row.messages) == ("hi", None, None)
    assert (row.index, row.line, row.source, row.input_hash) == (3, 17, "in.jsonl", "0" * 16)
    assert good({"prompt": [1, 2]}).prompt_token_ids == (1, 2)
    assert good({"prompt_token_ids": [0]}).prompt_token_ids == (0,)
    messages = [{"role": "user", "content": "hi"}]
    assert good({"messages": messages}).messages == messages
    assert good({"prompt": " "}).prompt == " "


BAD_LINES = [
    ("nope", "invalid_json", "line is not valid JSON: Expecting value at column 1"),
    ('{"prompt": "a"', "invalid_json", "column 15"),
    ('{"prompt": "a"} x', "invalid_json", "Extra data"),
    ('{"prompt": "a\tb"}', "invalid_json", "Invalid control character at column 14"),
    (b'{"prompt": "\xff"}', "invalid_json", "not valid UTF-8: byte 0xff at 12"),
    (b'{"prompt": "\xed\xa0\x80"}', "invalid_json", "not valid UTF-8"),
    ("[" * 100_000, "invalid_json", "nested too deeply"),
    ('{"prompt": "a", "x": NaN}', "invalid_json", "NaN is no JSON number"),
    ('{"prompt": "a", "x": -Infinity}', "invalid_json", "-Infinity is no JSON number"),
    ('["prompt"]', "not_an_object", "must be a JSON object, got a list"),
    ('"prompt"', "not_an_object", 'got "prompt"'),
    ("null", "not_an_object", "got null"),
    ("{}", "missing_prompt", '"prompt" is missing'),
    ('{"text": "a"}', "missing_prompt", '"prompt" is missing'),
    ('{"prompt": ""}', "empty_prompt", '"prompt" is empty'),
    ('{"prompt": []}', "empty_prompt", '"prompt" is empty'),
    ('{"prompt_token_ids": []}', "empty_prompt", '"prompt_token_ids" is empty'),
    ('{"messages": []}', "empty_prompt", '"messages" is empty'),
    ('{"prompt": null}', "invalid_value", '"prompt" must be a string or token ids, got null'),
    ('{"prompt": 5}', "invalid_value", "got 5"),
    ('{"prompt": true}', "invalid_value", "got true"),
    ('{"prompt": {}}', "invalid_value", "got an object"),
    ('{"prompt": ["a", "b"]}', "invalid_value", '"prompt[0]" must be an integer, got "a"'),
    ('{"prompt": [1, true]}', "invalid_value", '"prompt[1]" must be an integer, got true'),
    ('{"prompt": [1, 2.0]}', "invalid_value", '"prompt[1]" must be an integer, got 2.0'),
    ('{"prompt": [1, -2]}', "invalid_value", '"prompt[1]" is no token id: -2'),
    ('{"prompt": [4294967296]}', "invalid_value", '"prompt[0]" is no token id'),
    ('{"prompt_token_ids": "a"}', "invalid_value", 'must be a list of token ids, got "a"'),
    ('{"prompt": "a", "messages": []}', "invalid_value", "exclude each other"),
    ('{"prompt": "a", "prompt_token_ids": [1]}', "invalid_value", "exclude each other"),
    ('{"prompt": "a", "prompt": "b"}', "duplicate_key", '"prompt" is given twice'),
    ('{"prompt": "a", "x": {"y": 1, "y": 1}}', "duplicate_key", '"y" is given twice'),
    (r'{"prompt": "\ud800"}', "invalid_value", r'"prompt" holds \ud800, half of a surrogate'),
    (r'{"prompt": "a", "x": [{"y": "\uDC00"}]}', "invalid_value", r"holds \udc00"),
    (r'{"prompt": "a", "\udfff": 1}', "invalid_value", r"a key holds \udfff"),
    ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "invalid_value", "does not fit in 64 bits"),
    ('{"prompt": "a", "x": 18446744073709551616}', "invalid_value", "does not fit in 64 bits"),
    ('{"prompt": "a", "x": 1e999}', "invalid_value", "number 1e999 is too large"),
    ('{"prompt": "a", "temperature": -1}', "invalid_value", '"temperature" must be >= 0, got -1'),
    ('{"prompt": "a", "temperature": true}', "invalid_value", "must be a number, got true"),
    ('{"prompt": "a", "logprobs": 5}', "invalid_value", "but for false, got 5"),
    ('{"prompt": "a", "presence_penalty": 1}', "invalid_value", '"presence_penalty" is not'),
    ('{"prompt": "a", "min_p": 0.1}', "invalid_value", '"min_p" is not supported'),
    ('{"prompt": "a", "top_kk": 1}', "invalid_value", '"top_kk" is not a sampling key'),
    ('{"custom_id": "1", "body": {}}', "invalid_value", '"method" must be "POST", got null'),
]


@pytest.mark.parametrize(("line", "code", "message"), BAD_LINES)
def test_bad_lines(line: bytes | str, code: str, message: str) -> None:
    found = bad(line)
    assert found[0] == code
    assert message in found[1]


BAD_MESSAGES: list[tuple[Any, str]] = [
    ("hi", '"messages" must be a list, got "hi"'),
    (["hi"], '"messages[0]" must be an object'),
    ([{"role": "user"}], '"messages[0].content" is missing'),
    ([{"content": "a"}], '"messages[0].role" is missing'),
    ([{"role": 1, "content": "a"}], '"messages[0].role" must be a string, got 1'),
    ([{"role": "user", "content": None}], '"messages[0].content" must be a string, got null'),
    (
        [{"role": "user", "content": "a", "tool_calls": []}],
        '"messages[0].tool_calls" is not supported',
    ),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        '"messages[0].content[0]" must be a text part',
    ),
]


@pytest.mark.parametrize(("messages", "message"), BAD_MESSAGES)
def test_bad_messages(messages: Any, message: str) -> None:
    code, found = bad({"messages": messages})
    assert code == "invalid_value"
    assert message in found


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = good({"messages": [{"role": "user", "content": parts}]})
    assert row.messages == [{"role": "user", "content": "ab"}]


def test_a_pair_of_surrogate_escapes_is_a_character() -> None:
    assert good(r'{"prompt": "\ud83d\ude00"}').prompt == "\U0001f600"


def test_line_separators_stay_in_the_prompt() -> None:
    assert good('{"prompt": "a\u2028b\u2029c\x85d"}').prompt == "a\u2028b\u2029c\x85d"


def test_sampling_goes_over_the_defaults() -> None:
    defaults = SamplingParams(temperature=0.3, max_tokens=9)
    row = good({"prompt": "a", "max_tokens": 2, "stop": "x"}, sampling=defaults)
    assert row.sampling == SamplingParams(temperature=0.3, max_tokens=2, stop=("x",))
    assert row.extras == {}


def test_other_keys_are_carried_also_by_bad_rows() -> None:
    line = {"prompt": "a", "custom_id": "q", "tags": [1, {"x": None}], "index": 5}
    extras = {"custom_id": "q", "tags": [1, {"x": None}], "index": 5}
    assert good(line).extras == extras
    output = parse({**line, "top_p": 7})
    assert isinstance(output, RequestOutput)
    assert output.row.extras == extras


def test_prompt_field() -> None:
    row = good({"question": "a", "prompt": "other"}, prompt_field="question")
    assert row.prompt == "a"
    assert row.extras == {"prompt": "other"}
    assert bad({"prompt": "a"}, prompt_field="question")[1] == '"question" is missing'
    assert good({"question": [1]}, prompt_field="question").prompt_token_ids == (1,)


def test_id_field() -> None:
    assert good({"prompt": "a", "qid": 7}, id_field="qid").extras == {"custom_id": 7}
    assert good({"prompt": "a", "custom_id": 7}, id_field="custom_id").extras == {"custom_id": 7}
    for name in ("qid", "custom_id"):
        code, message = bad({"prompt": "a"}, id_field=name)
        assert code == "missing_id"
        assert f'"{name}" is missing' in message
    assert "custom_id" in bad({"prompt": "a", "qid": 1, "custom_id": 2}, id_field="qid")[1]


def test_chat_template_modes() -> None:
    user = {"role": "user", "content": "a"}
    system = {"role": "system", "content": "S"}
    assert good({"prompt": "a"}, apply_chat_template="always").messages == [user]
    assert good({"prompt": [1]}, apply_chat_template="always").prompt_token_ids == (1,)
    assert "never" in bad({"messages": [user]}, apply_chat_template="never")[1]
    assert good({"prompt": "a"}, system_prompt="S").messages == [system, user]
    assert good({"messages": [user]}, system_prompt="S").messages == [system, user]
    own = [{"role": "system", "content": "mine"}, user]
    assert good({"messages": own}, system_prompt="S").messages == own
    assert "--system-prompt" in bad({"prompt": [1]}, system_prompt="S")[1]


def test_rows_are_numbered_over_all_inputs_and_read_lazily(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text('\n{"prompt": "1"}\nbad\n')
    second.write_text('{"prompt": "2"}\n\n{"prompt": "3"}\n')
    paths = [str(first), str(second)]
    rows = [r.row if isinstance(r, RequestOutput) else r for r in read_rows(paths, ReadOptions())]
    assert [(r.index, r.line) for r in rows] == [(0, 2), (1, 3), (2, 1), (3, 3)]
    assert len(list(read_rows(paths, ReadOptions(limit=2)))) == 2
    assert list(read_rows(paths, ReadOptions(limit=0))) == []
    lazily = read_rows([str(first), str(tmp_path / "missing")], ReadOptions())
    assert isinstance(next(lazily), PromptRow)


@pytest.mark.parametrize("body", [False, True])
def test_options_that_ask_for_nothing_cost_no_row(body: bool) -> None:
    options = {
        "presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0, "min_p": 0,
        "logprobs": False, "top_logprobs": None, "logit_bias": {}, "n": None, "temperature": 0.5,
        "response_format": {"type": "text"}, "tools": [],
    }  # fmt: skip
    line: dict[str, Any] = {"prompt": "a", **options}
    if body:
        line = {"custom_id": "q", "method": "POST", "url": "/v1/completions", "body": line}
    row = good(line)
    assert row.sampling == SamplingParams(temperature=0.5)
    assert row.extras == ({"custom_id": "q"} if body else {})

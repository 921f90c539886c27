from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from specgen.sampling_params import SamplingParams, is_sampling_key, looks_like_sampling_key
from specgen.unsupported_sampling import UNSUPPORTED_KEYS

BAD = [
    ("temperature", -1, '"temperature" must be >= 0, got -1'),
    ("temperature", True, '"temperature" must be a number, got true'),
    ("temperature", "1", '"temperature" must be a number, got "1"'),
    ("temperature", float("nan"), '"temperature" must be a finite number, got nan'),
    ("temperature", float("inf"), '"temperature" must be a finite number, got inf'),
    ("temperature", 1e300, '"temperature" must be <= 1,000,000, got 1e+300'),
    ("temperature", [1], '"temperature" must be a number, got [1]'),
    ("top_p", 0, '"top_p" must be in (0, 1], got 0'),
    ("top_p", 1.5, '"top_p" must be in (0, 1], got 1.5'),
    ("top_k", -2, '"top_k" must be >= -1, got -2'),
    ("top_k", 1.0, '"top_k" must be an integer, got 1.0'),
    ("top_k", 2**31, '"top_k" must be <= 2147483647, got 2147483648'),
    ("max_tokens", 0, '"max_tokens" must be >= 1, got 0'),
    ("max_tokens", True, '"max_tokens" must be an integer, got true'),
    ("n", 0, '"n" must be >= 1, got 0'),
    ("n", 10_001, '"n" must be <= 10000, got 10001'),
    ("seed", 2**63, f'"seed" must be <= {2**63 - 1}, got {2**63}'),
    ("seed", -(2**63) - 1, f'"seed" must be >= {-(2**63)}, got {-(2**63) - 1}'),
    ("seed", 1.5, '"seed" must be an integer, got 1.5'),
    ("stop", 5, '"stop" must be a string or a list of strings, got 5'),
    ("stop", [""], '"stop" must not hold an empty string'),
    ("stop", ["a", 1], '"stop" must hold strings only, got 1'),
    ("stop_token_ids", 3, '"stop_token_ids" must be a list of token ids, got 3'),
    ("stop_token_ids", [-1], '"stop_token_ids" must be >= 0, got -1'),
    ("stop_token_ids", [True], '"stop_token_ids" must be an integer, got true'),
    ("ignore_eos", 1, '"ignore_eos" must be true or false, got 1'),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_bad_value_names_field_and_value(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match="must") as direct:
        SamplingParams(**{name: value})
    assert str(direct.value) == message
    with pytest.raises(ValueError, match="must") as mapped:
        SamplingParams.from_mapping({name: value})
    assert str(mapped.value) == message


def test_boundaries_are_allowed() -> None:
    params = SamplingParams(temperature=0, top_p=1, top_k=2**31 - 1, seed=-(2**63), max_tokens=1)
    assert params.greedy
    assert type(params.temperature) is float
    assert SamplingParams(seed=2**63 - 1).seed == 2**63 - 1
    assert SamplingParams(top_k=-1).top_k == 0
    assert not SamplingParams(temperature=1e-5).greedy


def test_lists_become_tuples_and_it_is_frozen() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[3, 4])  # type: ignore[arg-type]
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3, 4)
    assert hash(params) == hash(dataclasses.replace(params))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_mapping_goes_over_defaults_and_null_means_default() -> None:
    defaults = SamplingParams(temperature=0.5, top_k=7, stop=("x",))
    params = SamplingParams.from_mapping({"temperature": 0.2, "top_k": None}, defaults)
    assert (params.temperature, params.top_k, params.stop) == (0.2, 7, ("x",))
    assert SamplingParams.from_mapping({}, defaults) == defaults


def test_max_completion_tokens_is_max_tokens() -> None:
    assert SamplingParams.from_mapping({"max_completion_tokens": 5}).max_tokens == 5
    same = {"max_completion_tokens": 5, "max_tokens": 5}
    assert SamplingParams.from_mapping(same).max_tokens == 5
    with pytest.raises(ValueError, match="contradict"):
        SamplingParams.from_mapping({"max_completion_tokens": 5, "max_tokens": 6})


def test_speculative_object() -> None:
    params = SamplingParams.from_mapping({"speculative": {"num_speculative_tokens": 0}})
    assert params.num_speculative_tokens == 0
    with pytest.raises(ValueError, match=r"speculative\.rule"):
        SamplingParams.from_mapping({"speculative": {"rule": "block"}})
    with pytest.raises(ValueError, match="must be an object"):
        SamplingParams.from_mapping({"speculative": 3})
    with pytest.raises(ValueError, match="must be an integer, got true"):
        SamplingParams.from_mapping({"speculative": {"num_speculative_tokens": True}})
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        SamplingParams.from_mapping({"num_speculative_tokens": 2})


@pytest.mark.parametrize("key", sorted(UNSUPPORTED_KEYS))
def test_unsupported_keys_are_refused_by_name_unless_they_ask_for_nothing(key: str) -> None:
    assert looks_like_sampling_key(key)
    for value in (7, True, 0, 1, False, "x", [1], {"a": 1}):
        if any(type(value) is type(off) and value == off for off in UNSUPPORTED_KEYS[key]):
            continue
        with pytest.raises(ValueError, match=f'^"{key}" is not supported'):
            SamplingParams.from_mapping({key: value})
    defaults = SamplingParams(temperature=0.5)
    for off in (None, *UNSUPPORTED_KEYS[key]):
        assert SamplingParams.from_mapping({key: off}, defaults) == defaults
        if type(off) is int:
            assert SamplingParams.from_mapping({key: float(off)}, defaults) == defaults


def test_a_refusal_names_the_value_that_would_pass() -> None:
    message = r'^"presence_penalty" is not supported, but for 0, got 0\.5$'
    with pytest.raises(ValueError, match=message):
        SamplingParams.from_mapping({"presence_penalty": 0.5})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("temprature", "temperature"),
        ("Temperature", "temperature"),
        ("topP", "top_p"),
        ("top-k", "top_k"),
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("stop_token_id", "stop_token_ids"),
        ("ignoreEos", "ignore_eos"),
    ],
)
def test_misspelt_keys_are_refused_with_a_suggestion(key: str, meant: str) -> None:
    assert looks_like_sampling_key(key)
    assert not is_sampling_key(key)
    with pytest.raises(ValueError, match="did you mean") as error:
        SamplingParams.from_mapping({key: 1})
    assert f'"{key}"' in str(error.value)
    assert f'"{meant}"' in str(error.value)


@pytest.mark.parametrize(
    "key",
    ["custom_id", "id", "topic", "answer", "label", "N", "source", "model", "user", "metadata",
     "category", "task_id", "reference", "top", "temp", "score", "split", "tokens", "stage"],
)  # fmt: skip
def test_data_keys_are_not_taken_for_sampling(key: str) -> None:
    assert not looks_like_sampling_key(key)


def test_to_dict_is_json_ready() -> None:
    values = SamplingParams(stop=("a",), stop_token_ids=(1,)).to_dict()
    assert values["stop"] == ["a"]
    assert values["stop_token_ids"] == [1]
    assert set(values) == {field.name for field in dataclasses.fields(SamplingParams)}

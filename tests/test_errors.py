from __future__ import annotations

import pickle

import pytest

from specgen import errors
from specgen.errors import (
    EnvironmentProblem,
    InputError,
    ModelError,
    OutputError,
    RequestError,
    SpecgenError,
    UsageError,
)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (SpecgenError, 1),
        (UsageError, 2),
        (InputError, 4),
        (ModelError, 5),
        (EnvironmentProblem, 5),
        (OutputError, 6),
    ],
)
def test_exit_codes(kind: type[SpecgenError], code: int) -> None:
    assert kind("x").exit_code == code


def test_message_and_hint_stand_on_two_lines() -> None:
    error = InputError("a.jsonl: is a directory", "name the files in it")
    assert str(error) == "a.jsonl: is a directory\nhint: name the files in it"
    assert str(InputError("a")) == "a"


@pytest.mark.parametrize("hint", [None, "do that"])
def test_errors_survive_pickling(hint: str | None) -> None:
    error = pickle.loads(pickle.dumps(ModelError("bad", hint)))
    assert (type(error), error.message, error.hint) == (ModelError, "bad", hint)
    row = pickle.loads(pickle.dumps(RequestError("invalid_value", "bad", 7)))
    assert row.to_dict() == {"code": "invalid_value", "message": "bad", "line": 7}


def test_a_row_error_does_not_end_the_run() -> None:
    assert not issubclass(RequestError, SpecgenError)


def test_everything_listed_exists() -> None:
    assert all(hasattr(errors, name) for name in errors.__all__)

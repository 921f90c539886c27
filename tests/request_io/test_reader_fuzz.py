"""A sample of `benchmarks/reader_fuzz.py`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from request_io.fuzzing import CORPUS, check_file, random_file

from specgen.request_io import fast_json
from specgen.request_io.reader import ReadOptions


@pytest.fixture(params=["fast", "strict"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "strict":
        monkeypatch.setattr(fast_json, "_LOADS", None)
        monkeypatch.setattr(fast_json, "_DUMPS", None)


@pytest.mark.usefixtures("parser")
def test_the_corpus(tmp_path: Path) -> None:
    good = check_file(tmp_path / "x", b"\n".join(CORPUS))
    assert good >= 8


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize("seed", range(4))
def test_mutated_files(tmp_path: Path, seed: int) -> None:
    noise = random.Random(seed)
    options = [
        ReadOptions(),
        ReadOptions(prompt_field="text", id_field="custom_id"),
        ReadOptions(system_prompt="S", apply_chat_template="always"),
    ]
    good = 0
    for round_ in range(6):
        good += check_file(tmp_path / "x", random_file(noise, 60), options[round_ % 3])
    assert good


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    parts=st.lists(st.binary(max_size=40) | st.sampled_from(CORPUS), max_size=8),
    ends=st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n"]),
)
def test_any_bytes(tmp_path: Path, parts: list[bytes], ends: bytes) -> None:
    check_file(tmp_path / "x", ends.join(parts))

"""Records of measurements: what they say of themselves, and what they leave out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.record import RESULTS, command_of, stamp_lines


@pytest.mark.parametrize("place", [["--output-dir", "/a/place"], ["--output-dir=/a/place"]])
def test_a_command_is_told_without_the_place_it_wrote_to(place: list[str]) -> None:
    found = command_of(["-m", "benchmarks.x", "--k", "0,3", *place, "--name", "y z"])
    assert found == "python -m benchmarks.x --k 0,3 --name 'y z'"
    assert command_of(["-m", "benchmarks.x", place[0]]) == "python -m benchmarks.x"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_no_record_names_a_place_of_one_machine(path: Path) -> None:
    provenance = json.loads(path.read_text())["provenance"]
    assert "--output-dir" not in provenance["command"]
    assert not re.search(r"(^|[\s=\"'])/(root|home|tmp|opt|work|mnt|data)/", path.read_text())


def test_lines_are_stamped_with_their_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECGEN_COMMIT", "abc1234")
    lines = ['{"tok_s": 1.5, "command": "a"}\n', '{"tok_s": 2}\n']
    first, second = (json.loads(line) for line in stamp_lines(lines))
    assert first == {"tok_s": 1.5, "command": "a", "commit": "abc1234", "date": first["date"]}
    assert second["commit"] == "abc1234"
    assert re.fullmatch(r"[-0-9]{10}T[:0-9]{8}Z", second["date"])

"""Faults that tools of this sort have had, one by one, through the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from models.tiny import make_target

import specgen
from specgen.cli import cli

Rows = list[dict[str, Any]]
Generate = Callable[..., Rows]
LONGEST = 256  # positions of the small model


@pytest.fixture
def generate(
    tmp_path: Path, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Generate:
    """Runs lines through the command line; returns the output rows."""
    monkeypatch.chdir(tmp_path)
    pair = ["--model", str(checkpoints["text"]), "--draft-model", str(checkpoints["text-eagle3"])]

    def call(lines: Sequence[dict[str, Any]], *flags: str, model: Sequence[str] = pair) -> Rows:
        Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        args = ["run", "in.jsonl", "-o", "out", "--overwrite", "--return-token-ids", "--quiet"]
        result = CliRunner().invoke(cli, [*args, *model, "--device", "cpu", *flags])
        assert result.exit_code in (0, 3), result.stderr
        return [json.loads(line) for line in Path("out").read_text().splitlines()]

    return call


def choice(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = row["choices"][0]
    return found


def test_a_chat_template_does_not_bring_a_second_bos(generate: Generate) -> None:
    chat, plain = generate(
        [
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
            {"prompt": "user: hi\nassistant: ", "max_tokens": 1},
        ]
    )
    length = 1 + len("user: hi\nassistant: ")
    assert chat["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] == length
    (ids,) = generate([{"prompt": [5, 6, 7], "max_tokens": 1}])
    assert ids["usage"]["prompt_tokens"] == 3


def test_every_eos_id_ends_a_row(generate: Generate, checkpoints: dict[str, Path]) -> None:
    line = {"prompt": "abc", "max_tokens": 40, "temperature": 0}
    (whole,) = generate([{**line, "ignore_eos": True}])
    ids = choice(whole)["token_ids"]
    extra = next(i for i in ids[3:] if i > 3 and i not in ids[:3])
    shutil.copytree(checkpoints["text"], "model")
    Path("model/generation_config.json").write_text(json.dumps({"eos_token_id": [2, extra]}))
    model = ["--model", "model", "--draft-model", str(checkpoints["text-eagle3"])]
    for flags in (["--num-speculative-tokens", "4"], ["--num-speculative-tokens", "0"]):
        (row,) = generate([line], *flags, model=model)
        end = min(ids.index(i) for i in (2, extra) if i in ids)
        assert choice(row)["token_ids"] == ids[: end + 1]
        assert (choice(row)["finish_reason"], choice(row)["stop_reason"]) == ("stop", None)


@pytest.mark.parametrize("k", ["0", "1", "4"])
def test_stop_strings_over_tokens_and_inside_accepted_runs(generate: Generate, k: str) -> None:
    line = {"prompt": "Hello", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    (whole,) = generate([line], "--num-speculative-tokens", k)
    text, ids = choice(whole)["text"], choice(whole)["token_ids"]
    stops = sorted({text[i : i + 3] for i in range(5, 50, 4)})  # a token is a character here
    rows = generate([{**line, "stop": [stop]} for stop in stops], "--num-speculative-tokens", k)
    for stop, row in zip(stops, rows, strict=True):
        found = choice(row)
        at = text.index(stop)
        assert found["text"] == text[:at], "the text ends before the stop string"
        assert stop in "".join(text)[: at + 3]
        assert found["token_ids"] == ids[: len(found["token_ids"])]
        assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)
        # Ids and counts end with the token that completed the string.
        assert row["usage"]["completion_tokens"] == len(found["token_ids"])
        assert len(found["token_ids"]) >= at + 3
        spec = row["metrics"]["speculative_decoding"]
        explained = spec["num_plain_tokens"] + spec["num_accepted_draft_tokens"]
        assert explained + spec["num_spec_steps"] - len(found["token_ids"]) in (0, 1)


def test_nothing_follows_an_eos_that_was_accepted_in_mid_block(generate: Generate) -> None:
    lines = [{"prompt": f"row {i}", "max_tokens": 50, "seed": i} for i in range(40)]
    plain = generate(lines, "--num-speculative-tokens", "0", "--temperature", "0")
    drafted = generate(lines, "--num-speculative-tokens", "5", "--temperature", "0")
    assert [choice(r) for r in plain] == [choice(r) for r in drafted]
    for row in generate(lines, "--num-speculative-tokens", "5", "--draft-sample", "gumbel"):
        ids = choice(row)["token_ids"]
        assert 2 not in ids[:-1]
        assert (ids[-1] == 2) == (choice(row)["finish_reason"] == "stop")
        assert row["usage"]["completion_tokens"] == len(ids)


def test_prompts_around_the_limit(generate: Generate) -> None:
    lines = [{"prompt": [5] * n} for n in (LONGEST - 2, LONGEST - 1, LONGEST, LONGEST + 1)]
    rows = generate(lines, "--ignore-eos")
    assert [row["status"] for row in rows] == ["ok", "ok", "error", "error"]
    assert [row["usage"]["completion_tokens"] for row in rows[:2]] == [2, 1]
    assert [choice(row)["finish_reason"] for row in rows[:2]] == ["length", "length"]
    assert {row["error"]["code"] for row in rows[2:]} == {"prompt_too_long"}


def test_a_seeded_row_does_not_depend_on_its_neighbours(generate: Generate) -> None:
    line = {"prompt": "seeded", "seed": 11, "max_tokens": 30, "custom_id": "x"}
    (alone,) = generate([line])
    others = [{"prompt": f"row {i}", "max_tokens": 3 + i} for i in range(9)]
    among = generate([*others[:4], line, {"prompt": ""}, *others[4:], line])
    assert choice(among[4]) == choice(among[-1]) == choice(alone)
    eight = generate([{"prompt": "abc", "n": 8, "max_tokens": 20}, {"prompt": "abc"}])
    assert len({c["text"] for c in eight[0]["choices"]}) == 8
    assert eight[0]["seed"] != eight[1]["seed"]


def test_characters_that_are_split_over_tokens(generate: Generate, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = make_target(tmp_path / "bytes", vocab_size=260, num_hidden_layers=2)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", "<pad>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(path)
    by_letter = bytes_by_letter()
    lines = [{"prompt": "é\U0001f600", "max_tokens": 30, "seed": i} for i in range(20)]
    num_compared = 0
    for row in generate(lines, model=["--model", str(path)]):
        assert row["usage"]["prompt_tokens"] == len("é\U0001f600".encode())
        ids = [i for i in choice(row)["token_ids"] if i != 2]
        if min(ids, default=0) > 3:  # others have words of their own
            produced = bytes(by_letter[letters[i - 4]] for i in ids)
            assert choice(row)["text"] == produced.decode("utf-8", "replace")
            num_compared += 1
    assert num_compared > 5


def bytes_by_letter() -> dict[str, int]:
    """The byte that each letter of the byte-level alphabet stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


def test_a_log_holds_no_control_sequences(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "max_tokens": 5}\n' * 20)
    command = [sys.executable, "-m", "specgen", "run", "in.jsonl", "-o", "out", "--device", "cpu"]
    command += ["--model", str(checkpoints["text"])]
    environment = {**os.environ, "PYTHONPATH": str(Path(specgen.__file__).parents[1])}
    environment |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "wb") as log:
        done = subprocess.run(
            ["nohup", *command], cwd=tmp_path, env=environment, stdout=log, stderr=log
        )
    text = (tmp_path / "log").read_text()
    assert done.returncode == 0, text
    assert "Summary" in text
    assert "\x1b" not in text
    assert "\r" not in text

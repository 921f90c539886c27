"""All forms of input and output through the command line, on a small random pair."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from click.testing import CliRunner, Result

from specgen.cli import cli
from specgen.pipeline.model_runner import ModelRunner

Specgen = Callable[..., Result]


def batch(custom_id: str, **body: Any) -> dict[str, Any]:
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    body = {"model": "any", "max_tokens": 12, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


PLAIN = [{"prompt": f"row {i}", "max_tokens": 4 + i % 9, "lang": "de"} for i in range(12)]
BATCH = [
    batch("chat", messages=[{"role": "user", "content": "hi"}], temperature=0.5),
    batch("text", prompt="hello", n=2),
    batch("ids", prompt=[5, 6, 7]),
    batch("tools", prompt="x", tools=[{"type": "function"}]),
]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def specgen(
    tmp_path: Path, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Specgen:
    monkeypatch.chdir(tmp_path)
    Path("plain.jsonl").write_bytes(lines(PLAIN))
    Path("batch.jsonl").write_bytes(lines(BATCH))
    # Two members, the cut in the midst of a line; and two zstd frames.
    whole = lines(PLAIN)
    Path("plain.gz").write_bytes(gzip.compress(whole[:100]) + gzip.compress(whole[100:]))
    frame = zstandard.ZstdCompressor()
    Path("plain.zst").write_bytes(frame.compress(whole[:77]) + frame.compress(whole[77:]))
    pair = ["--model", str(checkpoints["text"]), "--draft-model", str(checkpoints["text-eagle3"])]
    return lambda *args, **more: CliRunner().invoke(
        cli, ["run", *args, *pair, "--device", "cpu", "--quiet"], **more
    )


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def texts(records: list[dict[str, Any]]) -> list[Any]:
    return [[c["text"] for c in record["choices"]] for record in records]


def test_batch_lines_in_both_output_forms(specgen: Specgen) -> None:
    assert specgen("batch.jsonl", "plain.jsonl", "-o", "flat").exit_code == 3
    assert specgen("batch.jsonl", "plain.jsonl", "-o", "open", "--format", "openai").exit_code == 3
    flat, envelopes = read("flat"), read("open")
    assert [r.get("custom_id") for r in flat[:5]] == ["chat", "text", "ids", "tools", None]
    assert [r["custom_id"] for r in envelopes[:5]] == ["chat", "text", "ids", "tools", None]
    assert flat[3]["error"]["code"] == envelopes[3]["error"]["code"] == "invalid_value"
    assert flat[4]["lang"] == envelopes[4]["input"]["lang"] == "de"
    for record, envelope in zip(flat, envelopes, strict=True):
        assert list(envelope)[:3] == ["index", "input_hash", "status"]
        if record["status"] == "error":
            assert envelope["response"] is None
            continue
        body = envelope["response"]["body"]
        answers = [
            c["message"]["content"] if "message" in c else c["text"] for c in body["choices"]
        ]
        assert answers == [c["text"] for c in record["choices"]]
        assert body["usage"] == record["usage"]
        assert body["metrics"] == record["metrics"]
        assert [c["finish_reason"] for c in body["choices"]] == [
            c["finish_reason"] for c in record["choices"]
        ]
    objects = [e["response"]["body"]["object"] for e in envelopes[:3]]
    assert objects == ["chat.completion", "text_completion", "text_completion"]
    assert len(envelopes[1]["response"]["body"]["choices"]) == 2
    stats = [json.loads(CliRunner().invoke(cli, ["stats", name, "--json"]).stdout)
             for name in ("flat", "open")]  # fmt: skip
    assert stats[0] == stats[1]
    assert stats[0]["rows"] == {
        "done": 16, "ok": 15, "failed": 1, "truncated": 0, "errors": {"invalid_value": 1},
    }  # fmt: skip


def test_compressed_several_and_standard_input(specgen: Specgen) -> None:
    assert specgen("plain.jsonl", "-o", "one").exit_code == 0
    one = read("one")
    for name in ("plain.gz", "plain.zst"):
        assert specgen(name, "-o", "x", "--overwrite").exit_code == 0
        assert Path("x").read_bytes() == Path("one").read_bytes()
    both = specgen("plain.gz", "-", "-o", "both", input=io.BytesIO(lines(PLAIN)))
    assert both.exit_code == 0
    assert [r["index"] for r in read("both")] == list(range(24))
    assert texts(read("both")[:12]) == texts(one)
    # Rows at other places have other seeds.
    assert texts(read("both")[12:]) != texts(one)
    out = specgen("-", input=Path("plain.zst").read_bytes())
    rows = sorted(map(json.loads, out.stdout.splitlines()), key=lambda row: int(row["index"]))
    assert texts(rows) == texts(one)


def test_shards_merge_to_the_same_bytes(specgen: Specgen) -> None:
    assert specgen("plain.jsonl", "-o", "one").exit_code == 0
    for number in ("1/3", "2/3", "3/3"):
        assert specgen("plain.jsonl", "-o", number[0], "--shard", number).exit_code == 0
    merged = CliRunner().invoke(cli, ["merge", "3", "1", "2", "-o", "all"])
    assert merged.exit_code == 0, merged.stderr
    assert Path("all").read_bytes() == Path("one").read_bytes()
    assert specgen("plain.jsonl", "-o", "all", "--resume").exit_code == 0


def test_changed_settings_name_what_changed(
    specgen: Specgen, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, calls = ModelRunner.decode, []

    def broken(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) > 20:
            raise RuntimeError("the machine went down")
        return decode(self, *args)

    flags = ["--max-num-seqs", "3", "--format", "openai"]
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "decode", broken)
        assert specgen("plain.jsonl", "-o", "out", *flags).exit_code == 1
    kept = Path("out.partial").read_bytes()
    assert kept.count(b"\n") > 0
    for change, message in [
        (["--seed", "1"], "seed: 0 then, 1 now"),
        (["--temperature", "0.5"], "temperature: 1.0 then, 0.5 now"),
        (["--num-speculative-tokens", "2"], "num_speculative_tokens: 1 then, 2 now"),
        (["--draft-sample", "gumbel"], 'draft_sample: "greedy" then, "gumbel" now'),
        (["--format", "flat"], 'output_format: "openai" then, "flat" now'),
        (["--return-token-ids"], "return_token_ids: false then, true now"),
        (["--system-prompt", "S"], 'system_prompt: null then, "S" now'),
        (["--chat-template", "{{ x }}"], "chat_template: null then, "),
        (["--shard", "1/2"], 'shard: "1/1" then, "1/2" now'),
        (["--max-model-len", "200"], "max_model_len: 256 then, 200 now"),
        (["--tokenizer", "other"], None),
    ]:
        result = specgen("plain.jsonl", "-o", "out", *flags, *change)
        assert result.exit_code == (2 if message else 5), (change, result.stderr)
        assert message is None or message in result.stderr
    assert Path("out.partial").read_bytes() == kept
    # What cannot change the text may change.
    free = ["--max-num-seqs", "5", "--max-num-batched-tokens", "64", "--progress", "none"]
    assert specgen("plain.jsonl", "-o", "out", *flags, *free).exit_code == 0
    assert [r["index"] for r in read("out")] == list(range(12))
    created = {r["response"]["body"]["created"] for r in read("out")}
    assert len(created) == 1


def test_memory_that_runs_out_is_said(specgen: Specgen, monkeypatch: pytest.MonkeyPatch) -> None:
    assert specgen("plain.jsonl", "-o", "one").exit_code == 0
    one = read("one")
    longest = max(one, key=lambda row: int(row["usage"]["completion_tokens"]))["index"]
    decode = ModelRunner.decode

    def tight(self: Any, requests: Any, *args: Any) -> Any:
        if len(requests) > 2 or any(r.row.index == longest for r in requests):
            raise torch.OutOfMemoryError("injected")
        return decode(self, requests, *args)

    monkeypatch.setattr(ModelRunner, "decode", tight)
    assert specgen("plain.jsonl", "-o", "two").exit_code == 3
    two = read("two")
    assert two[longest]["error"]["code"] == "out_of_memory"
    del one[longest], two[longest]
    assert one == two

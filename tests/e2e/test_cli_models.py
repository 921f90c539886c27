"""Faults of other tools that come from what a checkpoint is, through the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from e2e.engines import PLAIN_HEAD, TEXT, TEXT_VOCAB
from models.tiny import edit_config, load_state, make_eagle1, make_target, save_state

from specgen.cli import cli
from specgen.models import weights
from specgen.models.decoder import Decoder

Rows = list[dict[str, Any]]
Command = Callable[..., Result]
NUM_TOKENS = 16
LENGTHS = (5, 31, 70, 120)  # short of the original lengths and windows below, and far past them


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`specgen run` over lines, with `--return-token-ids`, into the file `out`."""
    monkeypatch.chdir(tmp_path)

    def call(lines: Sequence[dict[str, Any]], *flags: str) -> Result:
        Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        args = ["run", "in.jsonl", "-o", "out", "--overwrite", "--return-token-ids", "--quiet"]
        return CliRunner().invoke(cli, [*args, "--device", "cpu", *flags])

    return call


def read() -> Rows:
    """The output's rows; `NaN` and `Infinity`, which are no JSON, are refused."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return [
        json.loads(line, parse_constant=refuse) for line in Path("out").read_text().splitlines()
    ]


def ids_of(rows: Rows) -> list[list[int]]:
    return [choice["token_ids"] for row in rows for choice in row["choices"]]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(4, TEXT_VOCAB, (length,), generator=generator).tolist() for length in LENGTHS
    ]


def greedy(path: Path) -> list[list[int]]:
    """By transformers, each token from a pass over all before it."""
    from transformers import AutoModelForCausalLM

    auto_class: Any = AutoModelForCausalLM
    model = auto_class.from_pretrained(path, attn_implementation="eager").eval()
    found = []
    with torch.inference_mode():
        for prompt in prompts():
            tokens = torch.tensor([prompt])
            for _ in range(NUM_TOKENS):
                logits = model(tokens, use_cache=False).logits[:, -1:]
                tokens = torch.cat((tokens, logits.argmax(-1)), dim=1)
            found.append(tokens[0, len(prompt) :].tolist())
    return found


ROPE = {"rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 = {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DEFAULT = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
#: family, configuration, and one of which the same weights must say something else.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tied lm_head": ("llama", {"tie_word_embeddings": True}, {"tie_word_embeddings": False}),
    "yarn rope": ("llama", {"rope_parameters": {**ROPE, "rope_type": "yarn"}}, DEFAULT),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}, DEFAULT),
    "sliding window": ("mistral", {"sliding_window": 40}, {"sliding_window": None}),
    "window in upper layers": (
        "qwen2",
        {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": False, "layer_types": ["full_attention"] * 3},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_short_prompts_do_not_show(command: Command, name: str) -> None:
    family, overrides, others = MODELS[name]
    path = make_target(Path("model"), family, with_tokenizer=True, **{**TEXT, **overrides})
    head = make_eagle1(Path("head"), path, **PLAIN_HEAD)
    expected = greedy(path)
    assert len({token for row in expected for token in row}) >= 4
    lines = [{"prompt": prompt, "max_tokens": NUM_TOKENS} for prompt in prompts()]
    flags = ["--model", "model", "--temperature", "0", "--ignore-eos"]
    chunks = ["--max-num-batched-tokens", "48", "--max-num-seqs", "3"]
    for draft in ([], ["--draft-model", str(head), "--num-speculative-tokens", "3", *chunks]):
        result = command(lines, *flags, *draft)
        assert result.exit_code == 0, result.stderr
        assert ids_of(read()) == expected
    # And the comparison can tell: without the feature, long prompts go on otherwise.
    edit_config(path, **others)
    assert greedy(path)[-1] != expected[-1]


def test_a_model_in_many_files_says_what_it_says_in_one(command: Command) -> None:
    lines = [{"prompt": prompt, "max_tokens": NUM_TOKENS} for prompt in prompts()]
    texts = []
    for name, size in (("whole", "5GB"), ("sharded", "20KB")):
        make_target(Path(name), with_tokenizer=True, max_shard_size=size, **TEXT)
        assert command(lines, "--model", name).exit_code == 0
        texts.append(ids_of(read()))
    assert len(list(Path("sharded").glob("*.safetensors"))) > 3
    assert texts[0] == texts[1]
    assert len({token for row in texts[0] for token in row}) >= 4


@pytest.fixture
def text_model(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the small model, to be changed."""
    shutil.copytree(checkpoints["text"], tmp_path / "model")
    return tmp_path / "model"


def test_added_tokens_beyond_the_embedding_are_refused_before_weights_are_read(
    command: Command, text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    def fill(slots: Any, checkpoint: Any) -> None:
        raise AssertionError("weights were read")

    auto_class: Any = AutoTokenizer
    tokenizer = auto_class.from_pretrained(text_model)
    assert tokenizer.add_tokens(["<|tool|>"], special_tokens=True) == 1
    tokenizer.save_pretrained(text_model)
    monkeypatch.setattr(weights, "fill_tensors", fill)
    result = command([{"prompt": "a<|tool|>b"}], "--model", "model")
    assert result.exit_code == 5
    assert "the tokenizer has 79 tokens, the model's embedding 78" in result.stderr
    assert not Path("out").exists()


def test_rows_of_the_embedding_beyond_the_tokenizer(command: Command) -> None:
    """Embeddings are padded; their spare rows may be said, and mean nothing."""
    make_target(Path("model"), with_tokenizer=True, **{**TEXT, "vocab_size": 96})
    tokenizer = make_target(Path("other"), with_tokenizer=True, **TEXT)
    lines = [{"prompt": f"row {i}", "max_tokens": 30, "ignore_eos": True} for i in range(8)]
    flags = ["--model", "model", "--tokenizer", str(tokenizer), "--temperature", "3"]
    assert command(lines, *flags).exit_code == 0
    rows = read()
    assert any(token >= TEXT_VOCAB for ids in ids_of(rows) for token in ids)
    assert all(len(ids) == 30 for ids in ids_of(rows))
    assert all(isinstance(choice["text"], str) for row in rows for choice in row["choices"])
    # They may come in, too; what has no embedding at all costs its row.
    assert command([{"prompt": [1, 95]}, {"prompt": [1, 96]}], *flags).exit_code == 3
    assert [(row["error"] or {}).get("code") for row in read()] == [None, "token_id_out_of_range"]


def test_a_model_that_is_too_large_for_float16_gives_error_rows_and_no_text(
    command: Command, text_model: Path
) -> None:
    """Its weights fit, what it computes of them does not."""
    state = load_state(text_model)
    for name in state:
        if "up_proj" in name or "down_proj" in name:
            state[name] *= 60_000 / state[name].abs().max()
    save_state(text_model, state)
    lines = [{"prompt": f"row {i}", "max_tokens": 8} for i in range(6)]
    flags = ["--model", "model"]
    assert command(lines, *flags, "--dtype", "bfloat16").exit_code == 0
    assert all(row["status"] == "ok" for row in read())
    result = command(lines, *flags, "--dtype", "float16")
    assert result.exit_code == 3, result.stderr
    for row in read():
        assert row["choices"] == []
        assert row["error"]["code"] == "bad_logits"
    state["model.norm.weight"] *= 1e6
    save_state(text_model, state)
    result = command(lines, *flags, "--dtype", "float16")
    assert result.exit_code == 5
    assert "values beyond float16\nhint: use --dtype bfloat16 or float32" in result.stderr


@pytest.mark.parametrize("draft", ["greedy", "gumbel"])
def test_tokens_of_no_probability_are_never_said(
    command: Command, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    """Minus infinity among the logits is an answer; the draft knows nothing of it."""
    compute = Decoder.compute_logits
    allowed = torch.arange(TEXT_VOCAB) % 3 == 0

    def masked(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        return compute(self, hidden).masked_fill(~allowed, float("-inf"))

    monkeypatch.setattr(Decoder, "compute_logits", masked)
    lines: list[dict[str, Any]] = [
        {"prompt": f"row {i}", "max_tokens": 30, "ignore_eos": True, **more}
        for i, more in enumerate(
            [{}, {"temperature": 0}, {"top_p": 0.9}, {"top_k": 40}, {"temperature": 2, "n": 2}] * 3
        )
    ]
    pair = ["--model", str(checkpoints["text"]), "--draft-model", str(checkpoints["text-eagle3"])]
    assert command(lines, *pair, "--draft-sample", draft).exit_code == 0
    found = ids_of(read())
    assert all(allowed[token] for ids in found for token in ids)
    assert all(len(ids) == 30 for ids in found)
    spec = [row["metrics"]["speculative_decoding"] for row in read()]
    drafted, accepted = (
        sum(one[name] for one in spec) for name in ("num_draft_tokens", "num_accepted_draft_tokens")
    )
    assert 0 < accepted < drafted


@pytest.mark.parametrize("bad", ["nan", "inf", "all -inf"])
def test_logits_that_are_no_numbers_cost_their_rows(
    command: Command, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    compute = Decoder.compute_logits
    calls = 0

    def spoiled(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        logits = compute(self, hidden).clone()
        calls += 1
        if calls == 4:
            if bad == "all -inf":
                logits[0] = float("-inf")
            else:
                logits[0, 7] = float(bad)
        return logits

    lines = [{"prompt": f"row {i}", "max_tokens": 40, "ignore_eos": True} for i in range(6)]
    pair = ["--model", str(checkpoints["text"]), "--draft-model", str(checkpoints["text-eagle3"])]
    assert command(lines, *pair).exit_code == 0
    good = read()
    monkeypatch.setattr(Decoder, "compute_logits", spoiled)
    result = command(lines, *pair)
    assert result.exit_code == 3
    rows = read()
    (lost,) = [row["index"] for row in rows if row["status"] == "error"]
    assert (rows[lost]["error"]["code"], rows[lost]["choices"]) == ("bad_logits", [])
    del good[lost], rows[lost]
    assert rows == good, "a neighbour changed"

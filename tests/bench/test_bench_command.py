"""`specgen bench`: measurements of the built-in pair, presets, and refusals with numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specgen.bench import fit, presets
from specgen.bench.fit import check_batch, estimate_num_blocks
from specgen.bench.jobs import fixed_job
from specgen.cli import cli
from specgen.config import EngineConfig
from specgen.errors import UsageError
from specgen.models import host_memory
from specgen.models.registry import read_model_config
from specgen.pipeline.loading import activation_bytes
from specgen.resolve import resolve


def bench(*args: str) -> Result:
    return CliRunner().invoke(cli, ["bench", "--device", "cpu", *args])


def lines(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_one_line_a_measurement() -> None:
    first, second = lines(
        bench("--batch-size", "1,3", "--input-len", "6", "--output-len", "40",
              "--synthetic-acceptance", "3", "--num-speculative-tokens", "4")
    )  # fmt: skip
    assert (first["batch"], first["prompts"], first["output_tokens"]) == (1, 1, 40)
    assert (second["batch"], second["input_tokens"], second["output_tokens"]) == (3, 18, 120)
    for line in (first, second):
        assert line["tok_s"] == pytest.approx(line["output_tokens"] / line["seconds"], rel=0.01)
        assert line["seconds"] > 0
        assert 0 < line["startup_s"] <= line["first_step_s"]
        assert line["peak_memory_bytes"] > 0
        # Two drafts are always accepted, the last step may be cut.
        assert line["mean_acceptance_length"] == pytest.approx(3, abs=0.15)
        assert line["faithful"] is False
        assert line["rejection_sample"] == "synthetic"
        assert line["synthetic_rates"] == [1.0, 1.0, 0.0, 0.0]
        assert line["steps"] == 14  # one of prefill, and 39 tokens by threes
        assert line["versions"]["torch"]
        assert line["gpu"] is None


def test_without_a_draft_every_row_takes_one_token_a_step() -> None:
    (line,) = lines(
        bench("--batch-size", "2", "--input-len", "4", "--output-len", "5", "--no-draft",
              "--temperature", "0")
    )  # fmt: skip
    assert line["steps"] == 5
    assert line["faithful"] is True
    assert line["mean_acceptance_length"] is None
    assert (line["draft_model"], line["num_speculative_tokens"]) == (None, 0)


def test_repeated_runs_add_up_and_draw_anew() -> None:
    args = ("--batch-size", "1", "--input-len", "4", "--output-len", "30",
            "--synthetic-acceptance", "2.5", "--num-speculative-tokens", "3")  # fmt: skip
    (once,) = lines(bench(*args))
    (line,) = lines(bench(*args, "--repeat", "3"))
    assert (line["prompts"], line["input_tokens"], line["output_tokens"]) == (3, 12, 90)
    assert (line["input_len"], line["output_len"]) == (4, 30)
    assert len(line["tok_s_of_runs"]) == 3
    assert len(once["tok_s_of_runs"]) == 1
    assert min(line["tok_s_of_runs"]) <= line["tok_s"] <= max(line["tok_s_of_runs"])
    # Three runs of one pattern of acceptance would be of one number of steps each.
    assert line["steps"] == sum(line["decode_steps_by_k"].values()) + 3
    assert line["mean_acceptance_length"] != once["mean_acceptance_length"]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset and its head that run on a CPU in no time, with room for whole jobs."""
    small = {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 90,
    }  # fmt: skip
    for name in ("llama-3.2-1b", "llama-3.2-1b-eagle3"):
        config = {**presets.PRESETS[name], **small}
        if name.endswith("eagle3"):
            config["draft_vocab_size"] = 40
        else:
            config["num_hidden_layers"] = 7
        monkeypatch.setitem(presets.PRESETS, name, config)


@pytest.mark.parametrize("load_format", ["auto", "dummy", "dummy-uniform"])
@pytest.mark.usefixtures("tiny")
def test_a_job_on_a_preset(load_format: str) -> None:
    options = ("--model", "llama-3.2-1b", "--synthetic-acceptance", "2.5", "--num-prompts", "3",
               "--max-num-seqs", "4", "--draft-sample", "gumbel",
               "--load-format", load_format)  # fmt: skip
    (line,) = lines(bench("--job", "shared-prefix", *options))
    assert (line["job"], line["prompts"], line["batch"]) == ("shared-prefix", 3, 3)
    assert (line["input_tokens"], line["output_tokens"]) == (4650, 300)
    assert (line["model"], line["draft_model"]) == ("llama-3.2-1b", "llama-3.2-1b-eagle3")
    assert line["load_format"] == ("dummy" if load_format == "auto" else load_format)
    assert line["mean_acceptance_length"] == pytest.approx(2.5, abs=0.2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--batch-size", "0"), "numbers of rows"),
        (("--input-len", "900", "--output-len", "200"), "give --input-len 824"),
        (("--output-len", "2000"), "give at most 1024 in all"),
        (("--batch-size", "4", "--max-num-seqs", "3"), "--max-num-seqs 3 has fewer at a time"),
        (("--job", "mixed", "--max-num-seqs", "0"), "--max-num-seqs must be at least 1, got 0"),
        (("--batch-size", "100000000"), "numbers of rows to 1,000,000"),
        (
            (
                *("--model", "llama-3.1-8b", "--input-len", "9000", "--batch-size", "1000"),
                *("--num-speculative-tokens", "3"),
            ),
            "give --batch-size 248 with rows of at most 26",
        ),
        (("--synthetic-acceptance", "0.9"), "is the rate of one draft"),
        (("--synthetic-acceptance", "2", "--rejection-sample", "standard"), "contradict"),
        (("--num-speculative-tokens", "auto:99999"), "with N from 1 to 32"),
        (("--job", "mixed"), "rows of 1,955 tokens, the model takes 1,024"),
        (("--job", "mixed", "--batch-size", "4"), "has lengths of its own"),
        (("--job", "mixed", "--input-len", "4"), "rows of one length without --job mixed"),
        (("--num-prompts", "4"), "--num-prompts belongs to --job"),
        (("--no-draft", "--synthetic-acceptance", "2"), "contradict"),
        (("--synthetic-acceptance", "7"), "5 drafts a step yield at most 6 tokens"),
        (("--synthetic-acceptance", "7"), "give --num-speculative-tokens 6"),
        (("--synthetic-acceptance", "100"), "give a length of at most 33"),
        (("--synthetic-acceptance", ",".join(["0.9"] * 33)), "give at most 32"),
        (
            ("--synthetic-acceptance", "0.8,0.5", "--num-speculative-tokens", "3"),
            "leave out --num-speculative-tokens",
        ),
        (("--model", "nowhere"), "no such model directory, and no such preset"),
        (("--model", "llama-3.1-8B"), "hint: presets are llama-3.1-8b, "),
        (("--draft-model", "eagle"), "eagle: no such model directory, and no such preset"),
        (("--job", "mixed", "--num-prompts", "9" * 20), "not in the range 1<=x<=100000"),
        (("--job", "mixed", "--model", "llama-3.2-1b", "--max-num-seqs", "0"), "at least 1"),
        (
            ("--num-speculative-tokens", "0", "--synthetic-acceptance", "2"),
            "--num-speculative-tokens 0 makes none",
        ),
        (("--draft-aux-layers", "0"), "hint: --draft-aux-layers names another number of states"),
        (("--draft-aux-layers", "0,1,99"), "hint: name 3 from 0 to "),
        (("--synthetic-acceptance", "-1"), "one number is a mean length of at least 1"),
        (("--synthetic-acceptance", "nan"), "one number is a mean length of at least 1"),
        (("--synthetic-acceptance", "2,5"), "one number, such as 2.5, is a mean length"),
        (
            ("--model", "llama-3.1-8b", "--batch-size", "8,64"),
            "--batch-size 64: the cache holds 7,936 tokens, that is 15 rows of 512 in blocks of 16",
        ),
        (
            ("--model", "llama-3.1-8b", "--input-len", "9000", "--batch-size", "1"),
            "that is 0 rows of 9,256",
        ),
        (
            ("--model", "llama-3.1-8b", "--input-len", "9000", "--batch-size", "1"),
            "give --batch-size 1 with rows of at most 7",
        ),
    ],
)
def test_refusals_come_at_once_and_name_what_would_fit(
    args: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "available_memory", lambda: 2**40)
    result = bench(*args)
    assert result.exit_code in (2, 5)
    assert message in result.stderr
    assert result.stdout == ""
    assert "loading" not in result.stderr
    assert "specgen-bench-" not in result.stderr


def test_a_preset_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by where its configuration was written for this run."""
    monkeypatch.setattr(host_memory, "available_memory", lambda: 2**30)
    result = bench("--model", "llama-3.1-8b", "--batch-size", "64")
    assert result.exit_code == 5  # before any batch is said to fit
    assert "llama-3.1-8b has 29.92 GiB of weights, and 1.00 GiB" in result.stderr
    assert "--dtype" in result.stderr
    assert "specgen-bench-" not in result.stderr


def test_a_short_target_has_no_usual_boundaries(tmp_path: Path) -> None:
    """Those of heads without a setting do not fit it: the hint says how many and which do."""
    for name in ("llama-3.2-1b", "llama-3.2-1b-eagle3"):
        presets.write_preset(name, tmp_path)
        config_file = tmp_path / name / "config.json"
        config = json.loads(config_file.read_text())
        config.pop("eagle_aux_hidden_state_layer_ids", None)
        if not name.endswith("eagle3"):
            config["num_hidden_layers"] = 6
        config_file.write_text(json.dumps(config))
    result = bench(
        *("--model", str(tmp_path / "llama-3.2-1b"), "--load-format", "dummy", "--batch-size", "1"),
        *("--draft-model", str(tmp_path / "llama-3.2-1b-eagle3")),
    )
    assert result.exit_code == 5
    assert "auxiliary boundaries [2, 3, 3] (default) must be distinct" in result.stderr
    assert "a target of 6 layers has no usual ones: name 3 from 0 to 6" in result.stderr


def test_shapes_without_weights_name_the_way_out(tmp_path: Path) -> None:
    presets.write_preset("llama-3.2-1b", tmp_path)
    result = bench("--model", str(tmp_path / "llama-3.2-1b"), "--batch-size", "1", "--no-draft")
    assert result.exit_code == 5
    assert "no weight file" in result.stderr
    assert "--load-format dummy" in result.stderr


@pytest.mark.parametrize("flags", [("--num-speculative-tokens", "3"), ("--draft-sample", "gumbel")])
def test_settings_of_a_draft_that_is_not_there_are_refused(flags: tuple[str, ...]) -> None:
    result = bench("--no-draft", *flags)
    assert result.exit_code == 2
    assert f"{flags[0]} needs a draft: --no-draft is given" in result.stderr


def test_a_preset_beside_real_weights_needs_to_be_asked_for(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    result = bench("--model", "llama-3.1-8b", "--draft-model", str(tmp_path / "head"))
    assert result.exit_code == 2
    assert "a preset, which has no weights" in result.stderr


def test_the_estimate_counts_weights_steps_and_what_is_kept_of_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fit, "cache_bytes", lambda device, share: 40 << 30)
    config = EngineConfig(
        model=str(presets.write_preset("llama-3.1-8b", tmp_path)),
        draft_model=str(presets.write_preset("llama-3.1-8b-eagle3", tmp_path)),
        load_format="dummy", dtype="bfloat16", device="cpu", max_num_seqs=64,
        max_num_batched_tokens=8192, draft_sample="gumbel", num_speculative_tokens=3,
    )  # fmt: skip
    config = replace(resolve(config), device="cuda")
    width, inner = 4096, 14336
    head = 3 * width**2 + 2 * width * 6144 + width**2 + 3 * width * inner + 4 * width
    head += 32000 * width
    room = (40 << 30) - 2 * (8_030_261_248 + head)
    room -= activation_bytes(config, read_model_config(config.model_dir))
    max_blocks = -(-(config.max_model_len + 2 * 3 + 1) // 16)
    room -= 65 * (3 * 32000 * 2 + 4 * (max_blocks + 3 + 8))  # drafts' logits, and the ids of a row
    per_token = 2 * 2 * (32 + 1) * 8 * 128
    assert estimate_num_blocks(config) == room // (16 * per_token)
    assert estimate_num_blocks(replace(config, num_kv_blocks=77)) == 77


def test_a_batch_is_held_at_its_full_length_with_the_drafts_look_ahead() -> None:
    config = resolve(EngineConfig(device="cpu", max_num_seqs=4, num_speculative_tokens=3))
    check_batch([fixed_job(4, 16, 10)], config, 8)  # 26 + 2k tokens are two blocks
    with pytest.raises(UsageError, match="that is 2 rows of 27"):
        check_batch([fixed_job(4, 16, 11)], config, 8)
    check_batch([fixed_job(40, 16, 10)], config, 8)  # no more than four run at a time
    with pytest.raises(UsageError) as caught:
        check_batch([fixed_job(4, 16, 10)], replace(config, device="cuda"), 7)
    assert caught.value.hint is not None
    assert "--batch-size 3" in caught.value.hint
    assert "--gpu-memory-utilization" in caught.value.hint

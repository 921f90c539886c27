"""Flags, checkpoint facts and hardware become one config; contradictions are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.config import EngineConfig, ResolvedConfig
from specgen.errors import EnvironmentProblem, ModelError, UsageError
from specgen.resolve import eos_remark, generation_defaults, ignored_generation_keys, resolve

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 7,
    "torch_dtype": "bfloat16",
}


def write_model(path: Path, generation: dict[str, Any] | None = None, **changes: Any) -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return str(path)


def test_defaults_follow_the_checkpoint(tmp_path: Path) -> None:
    config = resolve(EngineConfig(model=write_model(tmp_path), device="cpu"))
    assert config.max_model_len == 128
    assert config.dtype == "float32"
    assert config.eos_token_ids == (7,)
    assert config.draft_dir is None
    assert config.num_speculative_tokens == 0
    assert not config.cuda_graphs


def test_every_eos_id_of_the_generation_config_counts(tmp_path: Path) -> None:
    model = write_model(tmp_path, {"eos_token_id": [9, 5]})
    assert resolve(EngineConfig(model=model, device="cpu")).eos_token_ids == (5, 9)


def test_the_built_in_draft_stays_with_the_built_in_target(tmp_path: Path) -> None:
    assert resolve(EngineConfig(model=write_model(tmp_path), device="cpu")).draft_dir is None


def test_scaled_ropes_carry_a_model_past_its_positions(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 3.0}
    model = write_model(tmp_path, rope_scaling=rope)
    assert resolve(EngineConfig(model=model, device="cpu")).max_model_len == 128
    longest = resolve(EngineConfig(model=model, device="cpu", max_model_len=384))
    assert longest.max_model_len == 384
    with pytest.raises(UsageError, match="--max-model-len 385 is beyond the model's 384"):
        resolve(EngineConfig(model=model, device="cpu", max_model_len=385))


def test_a_length_beyond_the_model_is_refused_with_the_limit(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--max-model-len 129 is beyond the model's 128"):
        resolve(EngineConfig(model=write_model(tmp_path), device="cpu", max_model_len=129))


@pytest.mark.parametrize("name", ["./nothing", "/no/such/dir", "nothing", "a/b/c"])
def test_an_unknown_path_is_not_sent_to_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="no such model directory"):
        resolve(EngineConfig(model=name, device="cpu"))


def test_no_draft_contradicts_a_draft(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    with pytest.raises(UsageError, match="contradict"):
        resolve(EngineConfig(model=model, draft_model=model, no_draft=True, device="cpu"))


def test_cuda_without_a_gpu_is_an_environment_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentProblem, match="--device cuda"):
        resolve(EngineConfig(model=write_model(tmp_path), device="cuda"))


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": True}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"max_new_tokens": 50}, {"max_tokens": 50}),
        ({"top_k": None}, {}),
        ({}, {}),
    ],
)
def test_generation_defaults(
    tmp_path: Path, stored: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert generation_defaults(write_model(tmp_path, stored)) == expected


@pytest.mark.parametrize("value", ["x", [2, "x"], True, 1.5, {"id": 2}, -1])
def test_eos_ids_that_are_none_are_not_passed_over(tmp_path: Path, value: Any) -> None:
    """A row would run on to its limit for a sequence that never ends."""
    write_model(tmp_path, generation={"eos_token_id": value})
    with pytest.raises(ModelError, match=r'generation_config\.json: "eos_token_id" must be'):
        resolve(EngineConfig(model=str(tmp_path), device="cpu"))


def test_a_broken_generation_config_names_the_file(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json: cannot be read"):
        generation_defaults(model)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_speculative_tokens", -1, "--num-speculative-tokens must be at least 0, got -1"),
        ("num_speculative_tokens", 33, "--num-speculative-tokens must be at most 32, got 33"),
        ("max_num_seqs", 0, "--max-num-seqs must be at least 1, got 0"),
        ("gpu_memory_utilization", 1.5, "at most 1, got 1.5"),
        ("draft_sample", "best", "--draft-sample must be one of greedy, gumbel, got 'best'"),
        ("seed", 2**63, "--seed must fit in 64 bits"),
        ("block_size", 12, "--block-size must be a power of two, got 12"),
        ("draft_aux_layers", (2, 2, 5), r"--draft-aux-layers must be distinct .*, got \[2, 2, 5\]"),
        ("draft_aux_layers", (), "--draft-aux-layers must be distinct"),
        ("draft_rope_theta", 0.0, "--draft-rope-theta must be a finite number above 0, got 0.0"),
    ],
)
def test_flags_out_of_range_are_usage_errors(field: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EngineConfig(**{field: value})


@pytest.mark.parametrize("field", ["revision", "draft_revision"])
def test_a_revision_needs_something_from_the_hub(tmp_path: Path, field: str) -> None:
    model = write_model(tmp_path)
    config = EngineConfig(model=model, draft_model=model, device="cpu", **{field: "main"})
    flag = "--" + field.replace("_", "-")
    with pytest.raises(UsageError, match=f"{flag} main: nothing that it could belong to"):
        resolve(config)


def test_what_a_generation_config_asks_in_vain(tmp_path: Path) -> None:
    stored = {
        "temperature": 0.7,
        "repetition_penalty": 1.05,
        "num_beams": 1,
        "no_repeat_ngram_size": 0,
        "suppress_tokens": [5],
        "typical_p": None,
        "bad_words_ids": [],
        "transformers_version": "5.0",
    }
    model = write_model(tmp_path, stored)
    asked = {"repetition_penalty": 1.05, "suppress_tokens": [5]}
    assert ignored_generation_keys(model, 256) == asked
    assert ignored_generation_keys(write_model(tmp_path / "other"), 256) == {}


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ({"max_length": 255}, True),
        ({"max_length": 256}, False),  # as long as any row can be
        ({"max_length": 20, "max_new_tokens": 9}, False),  # the second counts
        ({"max_length": "20"}, True),
        ({"num_return_sequences": 3}, True),
        ({"num_return_sequences": 1}, False),
    ],
)
def test_lengths_and_numbers_of_texts_that_are_not_applied(
    tmp_path: Path, stored: dict[str, Any], named: bool
) -> None:
    ignored = ignored_generation_keys(write_model(tmp_path, stored), 256)
    assert ignored == ({next(iter(stored)): next(iter(stored.values()))} if named else {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", True),
        ("max_new_tokens", 0),
        ("do_sample", "maybe"),
    ],
)
def test_sampling_out_of_range_names_file_field_value_and_a_way_out(
    tmp_path: Path, key: str, value: Any
) -> None:
    model = write_model(tmp_path, {key: value})
    with pytest.raises(ModelError) as refused:
        generation_defaults(model)
    assert refused.value.message.startswith(f'{tmp_path}/generation_config.json: "{key}" must be')
    assert json.dumps(value) in refused.value.message.replace("'", '"').replace("True", "true")
    assert "--generation-config none" in str(refused.value.hint)


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "x"}'])
def test_what_the_flag_none_cannot_leave_out_has_another_way_out(
    tmp_path: Path, content: str
) -> None:
    """End-of-sequence ids count in any case."""
    model = write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    for flag in ("auto", "none"):
        with pytest.raises(ModelError) as refused:
            resolve(EngineConfig(model=model, device="cpu", generation_config=flag))
        assert f"{tmp_path}/generation_config.json" in refused.value.message
        assert "remove it" in str(refused.value.hint)
    (tmp_path / "generation_config.json").unlink()
    resolve(EngineConfig(model=model, device="cpu"))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_eos_ids_beyond_the_vocabulary(tmp_path: Path, file: str) -> None:
    model = write_model(tmp_path)
    size = resolve(EngineConfig(model=model, device="cpu")).vocab_size

    def resolved(*ids: int) -> ResolvedConfig:
        path = tmp_path / file
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**values, "eos_token_id": ids}))
        return resolve(EngineConfig(model=model, device="cpu"))

    assert eos_remark(resolved(2, size - 1)) is None
    remark = eos_remark(resolved(2, size))
    assert remark is not None
    assert remark.startswith(f'{tmp_path}/{file}: "eos_token_id" {size}: no row can end so')
    with pytest.raises(ModelError, match=f'{file}: "eos_token_id" {size}, {size + 1}: no row can'):
        resolved(size + 1, size)
    resolve(EngineConfig(model=model, device="cpu", load_format="dummy"))  # for shapes alone


@pytest.mark.parametrize("value", ["false", 0, 1, [], {}])
def test_a_choice_of_greedy_decoding_that_is_no_boolean(tmp_path: Path, value: Any) -> None:
    model = write_model(tmp_path, {"do_sample": value})
    with pytest.raises(ModelError, match=r'generation_config\.json: "do_sample" must be true or'):
        generation_defaults(model)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_of_a_thousand_levels_is_refused(tmp_path: Path, name: str) -> None:
    model = write_model(tmp_path)
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        resolve(EngineConfig(model=model, device="cpu"))

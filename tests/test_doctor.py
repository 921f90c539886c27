from __future__ import annotations

import gc
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from models import layouts
from models.tiny import (
    edit_config,
    load_state,
    make_eagle1,
    make_eagle3,
    make_llama,
    make_target,
    save_state,
    write_tokenizer,
)

from specgen import doctor, resolve
from specgen.cli import cli
from specgen.config import EngineConfig
from specgen.doctor import examine, versions
from specgen.doctor_finding import Finding
from specgen.errors import EnvironmentProblem, ModelError
from specgen.kernels import select_kernels
from specgen.models.transformers_target import TransformersTarget
from specgen.models.weights import load_target
from specgen.pipeline import kv_cache
from specgen.pipeline.engine import Engine


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    target = make_llama(directory / "target", with_tokenizer=True)
    return target, make_eagle3(directory / "draft", target)


def look(
    model: Path | str, draft: Path | str | None = None, *lengths: int, **config: Any
) -> dict[tuple[str, str], Finding]:
    draft_model = None if draft is None else str(draft)
    asked = EngineConfig(model=str(model), draft_model=draft_model, device="cpu", **config)
    return look_up(list(examine(asked, lengths or None)))


def look_up(findings: list[Finding]) -> dict[tuple[str, str], Finding]:
    return {(finding.section, finding.name): finding for finding in findings}


def test_versions_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions()["torch"]
    monkeypatch.setattr(doctor, "_PACKAGES", ("surely-not-installed",))
    assert versions()["surely-not-installed"] is None
    (missing,) = [f for f in doctor._software() if f.status == "problem"]
    assert missing.name == "surely-not-installed"


def test_a_pair_that_fits(pair: tuple[Path, Path]) -> None:
    found = look(*pair)
    assert found["target", "num_layers"].value == "7"
    assert found["target", "architecture"].value == "LlamaForCausalLM"
    assert found["draft", "layout"].value == "eagle3"
    assert found["draft", "fits the target"].value == "yes"
    assert not [f for f in found.values() if f.status == "problem"]


def test_a_target_alone(pair: tuple[Path, Path]) -> None:
    assert not [section for section, _ in look(pair[0]) if section == "draft"]


def test_a_draft_that_does_not_fit(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = make_llama(tmp_path / "other", hidden_size=64)
    result = CliRunner().invoke(
        cli, ["doctor", "--model", str(other), "--draft-model", str(pair[1])]
    )
    assert result.exit_code == 5
    assert "PROBLEM" in result.stdout


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["doctor", "--model", str(tmp_path / "no"), "--json"])
    assert result.exit_code == 5
    report = json.loads(result.stdout)
    assert report["ok"] is False
    (problem,) = [f for f in report["findings"] if f["status"] == "problem"]
    assert problem["section"] == "target"
    assert "no such model directory" in problem["value"]


def test_an_unsupported_model(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = make_llama(tmp_path / "other")
    edit_config(other, architectures=["MambaForCausalLM"], model_type="mamba")
    (problem,) = [f for f in look(other).values() if f.status == "problem"]
    assert "mamba" in problem.value.lower()


def test_the_built_in_pair(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resolve, "BUILTIN_TARGET", pair[0])
    monkeypatch.setattr(resolve, "BUILTIN_DRAFT", pair[1])
    found = look_up(list(examine()))
    assert found["target", "built-in pair"].value == "present"
    assert found["draft", "fits the target"].value == "yes"
    monkeypatch.setattr(resolve, "BUILTIN_DRAFT", tmp_path)
    missing = look_up(list(examine()))["target", "built-in pair"]
    assert (missing.value, missing.status) == ("missing", "problem")


def test_what_is_recognised_of_a_draft(pair: tuple[Path, Path]) -> None:
    found = look(*pair)
    for name, value in {
        "embed_tokens": "shared with the target",
        "lm_head": "its own",
        "vocabulary map": "d2t, t2d",
        "position limit": "none: goes on past its 64 positions of training",
        "aux_layers": "2, 3, 4",
    }.items():
        assert found["draft", name].value == value
    recognised = found["draft", "recognised"].value
    for part in ("official layout", "[2, 3, 4] (default)", "48 of 96 tokens", "rope theta 10000"):
        assert part in recognised
    assert found["target", "tokenizer"].value == "96 tokens, adds a BOS"
    assert found["target", "chat template"].value == "present"
    assert found["target", "end of sequence"].value == "2"


def test_a_cpu_needs_memory_for_the_rows_that_fit_not_for_all_that_are_asked(
    pair: tuple[Path, Path],
) -> None:
    found = look(pair[0], max_num_seqs=999_999)
    text = found["memory", "working memory"].value
    rows = int(text.split()[-2])
    assert 1 < rows < 999_999
    fewer = look(pair[0], max_num_seqs=rows)
    assert fewer["memory", "working memory"].value == text


def test_memory_is_counted_from_headers(pair: tuple[Path, Path]) -> None:
    found = look(*pair, 100, 200, 9999, max_num_seqs=3)
    target = sum(tensor.numel() for tensor in load_state(pair[0]).values())
    head = {n: t for n, t in load_state(pair[1]).items() if n not in ("d2t", "t2d")}
    draft = sum(tensor.numel() for tensor in head.values())
    for name, count in (("target", target), ("draft", draft)):
        expected = f"{count * 4 / 2**20:.2f} MiB: {count:,} in float32"
        assert found["memory", f"{name} weights"].value == expected
    # Keys and values of 7 layers and the draft's one, 2 heads of 16 in float32.
    assert found["memory", "cache of a token"].value == f"{8 * 2 * 2 * 16 * 4 / 1024:.1f} KiB"
    blocks = -(-(100 + 2 * 3 + 1) // 16)
    row = blocks * 16 * 8 * 2 * 2 * 16 * 4
    expected = f"{row / 2**20:.2f} MiB a row; 3 of 3 rows fit at a time"
    assert found["memory", "rows of 100 tokens"].value == expected
    assert ("memory", "rows of 256 tokens") in found, "the longest row is always said"
    assert "9999" in found["memory", "lengths"].value


def test_rows_that_do_not_fit_are_a_problem(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "_CPU_CACHE_BYTES", 100_000)
    found = look(*pair, 16, 200)
    assert found["memory", "rows of 16 tokens"].status == "ok"
    assert "1 of 16 rows" in found["memory", "rows of 16 tokens"].value
    assert found["memory", "rows of 200 tokens"].status == "problem"
    assert found["memory", "rows of 256 tokens"].status == "problem"


@pytest.mark.parametrize("layout", ["speculators", "wrapped", "eagle1"])
def test_other_layouts(pair: tuple[Path, Path], tmp_path: Path, layout: str) -> None:
    target = pair[0]
    if layout == "speculators":
        head = layouts.to_speculators(make_eagle3(tmp_path / "head", target))
    else:
        head = make_eagle1(tmp_path / "head", target)
        if layout == "wrapped":
            layouts.to_wrapped(head)
    found = look(target, head)
    assert not [f for f in found.values() if f.status == "problem"]
    name = "official" if layout == "eagle1" else layout
    assert f"{name} layout" in found["draft", "recognised"].value


def test_a_draft_that_asks_for_a_flag_gets_it(pair: tuple[Path, Path], tmp_path: Path) -> None:
    head = make_eagle3(tmp_path / "head", pair[0], norm_output=True)
    args = ["doctor", "--model", str(pair[0]), "--draft-model", str(head), "--device", "cpu"]
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 5
    assert "--draft-norm-output false" in result.stdout
    result = CliRunner().invoke(cli, [*args, "--draft-norm-output", "false", "--lengths", "64"])
    assert result.exit_code == 0, result.stdout
    assert "raw feedback (override)" in result.stdout
    assert "rows of 64 tokens" in result.stdout
    assert CliRunner().invoke(cli, [*args, "--lengths", "0"]).exit_code == 2


def test_tensors_are_checked_by_their_headers(pair: tuple[Path, Path], tmp_path: Path) -> None:
    head = make_eagle3(tmp_path / "head", pair[0])
    state = load_state(head)
    del state["norm.weight"]
    save_state(head, state)
    problems = [f for f in look(pair[0], head).values() if f.status == "problem"]
    (problem,) = problems
    assert '"norm.weight" is missing' in problem.value


def test_what_a_generation_config_asks_is_said(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target = Path(shutil.copytree(pair[0], tmp_path / "target"))
    values = {"temperature": 0.6, "repetition_penalty": 1.05, "eos_token_id": [3, 2]}
    (target / "generation_config.json").write_text(json.dumps(values))
    found = look(target)
    assert found["target", "sampling defaults"].value == "temperature=0.6"
    assert found["target", "not applied"].value == "repetition_penalty=1.05"
    assert found["target", "not applied"].status == "note"
    assert found["target", "end of sequence"].value == "2, 3"


@pytest.mark.parametrize(
    "asked", [{"temperature": "0.7"}, {"top_p": 0}, {"do_sample": "no"}, {"max_new_tokens": 0}]
)
def test_sampling_that_a_run_refuses_is_a_problem(
    pair: tuple[Path, Path], tmp_path: Path, asked: dict[str, Any]
) -> None:
    model = Path(shutil.copytree(pair[0], tmp_path / "m"))
    (model / "generation_config.json").write_text(json.dumps(asked))
    finding = look(model)[("target", "sampling defaults")]
    assert finding.status == "problem"
    assert "must be" in finding.value
    assert "--generation-config none" in str(finding.hint)


@pytest.mark.parametrize(
    "flags",
    [
        {"revision": "v1"},
        {"draft_revision": "v1"},
        {"draft_aux_layers": (1, 2, 3)},
        {"draft_rope_theta": 1e6},
        {"draft_norm_output": False},
        {"draft_norm_before_residual": True},
    ],
)
def test_flags_that_a_run_refuses_are_a_problem(
    pair: tuple[Path, Path], flags: dict[str, Any]
) -> None:
    finding = look(pair[0], **flags)[("machine", "settings")]
    assert finding.status == "problem"
    assert "--" + next(iter(flags)).replace("_", "-") in finding.value


def test_a_tokenizer_of_another_vocabulary(pair: tuple[Path, Path], tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 78)
    assert look(pair[0], tokenizer=str(tmp_path))["target", "tokenizer"].status == "ok"
    write_tokenizer(tmp_path, 120)
    problem = look(pair[0], tokenizer=str(tmp_path))["target", "tokenizer"]
    assert problem.status == "problem"
    assert "120 tokens, the model's embedding 96" in problem.value


def test_a_target_that_transformers_runs(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = GPTNeoXConfig(vocab_size=96, num_hidden_layers=3, max_position_embeddings=64, **sizes)
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 96)
    found = look(tmp_path)
    assert found["target", "backend"].value == "transformers"
    count = sum(tensor.numel() for tensor in load_state(tmp_path).values())
    assert f"{count:,} in float32" in found["memory", "target weights"].value
    assert "runs through transformers" in found["target", "remark"].value
    assert not [f for f in found.values() if f.status == "problem"]
    state = load_state(tmp_path)
    for name, tensor, part in (
        ("gpt_neox.final_layer_norm.weight", torch.ones(31), "[31], expected [32]"),
        ("gpt_neox.final_layer_norm.bias", None, "missing"),
        ("extra", torch.ones(1), "unexpected"),
    ):
        changed = {n: t for n, t in {**state, name: tensor}.items() if t is not None}
        save_state(tmp_path, changed)
        problem = look(tmp_path)["target", "weights"]
        assert problem.status == "problem"
        assert name in problem.value
        assert part in problem.value


# What only our own decoder gives a meaning.
OUR_FIELDS = {"rms_norm_eps", "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "intermediate_size"}
THROUGH_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "cohere": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "gemma2": {"sliding_window": 9, "attn_logit_softcapping": 2.0},
    "gemma3": {"sliding_window": 9},
    "gpt_neox": {"rotary_pct": 0.5},
    "olmo2": {"sliding_window": 9},  # a key of other classes
    "phi3": {"sliding_window": 9},
    "llama": {"hidden_act": "gelu", "sliding_window": 9},
}


@pytest.mark.parametrize("family", THROUGH_TRANSFORMERS)
def test_of_a_target_that_transformers_runs_only_what_is_so_is_said(
    tmp_path: Path, family: str
) -> None:
    from transformers import AutoConfig

    target = make_target(tmp_path, family, with_tokenizer=True, **THROUGH_TRANSFORMERS[family])
    said = {name: f.value for (section, name), f in look(target).items() if section == "target"}
    assert said["backend"] == "transformers"
    assert not OUR_FIELDS & set(said)
    config = AutoConfig.from_pretrained(target)
    by_kind = {
        f"rope of {kind}": rope
        for kind, rope in config.rope_parameters.items()
        if isinstance(rope, dict)
    }
    ropes = by_kind or {"rope": config.rope_parameters}
    assert {name for name in said if name.startswith("rope")} == set(ropes)
    for name, rope in ropes.items():
        assert said[name] == ", ".join(f"{key}={value}" for key, value in rope.items())
    # What the loaded class hands to its attention.
    loaded = load_target(target, device="cpu", kernels=select_kernels("cpu"))
    assert isinstance(loaded, TransformersTarget)
    assert said["num_kv_heads"] == str(loaded.num_kv_heads)
    assert said["head_dim"] == str(loaded.head_dim)
    calls = loaded._pass.calls
    windows = [call.window for call in calls if call.window]
    expected = f"9 in {len(windows)} of 7 layers" if windows else None
    assert said.get("layer_windows") == expected
    caps = {call.softcap for call in calls if call.softcap}
    assert said.get("softcap of scores") == (str(caps.pop()) if caps else None)
    assert "only when it is loaded" in said["probe"]


def write_bert(path: Path) -> Path:
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = BertConfig(vocab_size=96, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    BertLMHeadModel(config).save_pretrained(path)
    write_tokenizer(path, 96)
    return path


PARTIAL = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
NOT_RUN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no decoder": (write_bert, '"is_decoder" is false'),
    "both ways": (
        lambda path: make_target(path, "gemma3", use_bidirectional_attention=True),
        '"use_bidirectional_attention" is true',
    ),
    "both ways, of a native family": (
        lambda path: make_target(path, "llama", is_causal=False),
        '"is_causal" must be true (or absent), got False',
    ),
    "rope of half a head": (
        lambda path: make_target(path, "llama", rope_parameters=PARTIAL),
        '"partial_rotary_factor" must be 1',
    ),
}


@pytest.mark.parametrize("kind", NOT_RUN)
def test_what_a_loaded_class_shows_without_its_values_is_a_problem_before(
    tmp_path: Path, kind: str
) -> None:
    make, text = NOT_RUN[kind]
    target = make(tmp_path)
    found = look(target, skip_tokenizer_init=True).values()
    (problem,) = [finding for finding in found if finding.status == "problem"]
    assert text in f"{problem.value} {problem.hint}"
    with pytest.raises(ModelError) as refused:
        load_target(target, device="cpu", kernels=select_kernels("cpu"))
    assert text in f"{refused.value.message} {refused.value.hint}"


def test_experts_have_shapes_without_values(tmp_path: Path) -> None:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    sizes |= {"vocab_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64}
    config = OlmoeConfig(num_experts=4, num_experts_per_tok=2, eos_token_id=2, **sizes)
    OlmoeForCausalLM(config).save_pretrained(tmp_path)
    found = look(tmp_path, skip_tokenizer_init=True)
    assert found["target", "head_dim"].value == "8"
    assert not [f for f in found.values() if f.status == "problem"]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("is_stored", [True, False])
def test_a_tied_head_that_is_stored_is_said_to_be_compared_later(
    tmp_path: Path, family: str, is_stored: bool
) -> None:
    target = make_target(tmp_path, family, with_tokenizer=True, tie_word_embeddings=True)
    state = load_state(target)
    if is_stored:
        save_state(target, {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()})
    found = look(target)
    assert (("target", "lm_head") in found) == is_stored
    if is_stored:
        assert found["target", "lm_head"].status == "note"
        assert "when the weights are read" in found["target", "lm_head"].value


def test_a_draft_for_a_target_that_transformers_runs(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", "gemma2", with_tokenizer=True)
    draft = make_eagle3(tmp_path / "draft", target)
    assert look(target, draft)["draft", "fits the target"].value == "yes"
    state = load_state(draft)
    del state["midlayer.hidden_norm.weight"]
    save_state(draft, state)
    problem = look(target, draft)["draft", "weights"]
    assert (problem.status, "hidden_norm" in problem.value) == ("problem", True)


@pytest.mark.parametrize(
    ("family", "keys", "name", "text"),
    [
        ("mistral", {"sliding_window": 9}, "layer_windows", "9 in 7 of 7 layers"),
        (
            "qwen2",
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3},
            "layer_windows",
            "9 in 4 of 7 layers",
        ),
        (
            "qwen3_moe",
            {"norm_topk_prob": True, "mlp_only_layers": [2]},
            "experts",
            "8 of inner size 24, 3 a token, probabilities scaled to sum to 1, in 6 layers",
        ),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                }
            },
            "rope",
            "short_factors=8, long_factors=8",
        ),
    ],
)
def test_long_facts_are_counted(
    tmp_path: Path, family: str, keys: dict[str, Any], name: str, text: str
) -> None:
    target = make_target(tmp_path / "target", family, with_tokenizer=True, **keys)
    found = look(target)
    assert text in found["target", name].value
    for (section, _), finding in found.items():
        assert section != "target" or not {"(", "{", "["} & set(finding.value), finding


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_rope_that_is_fixed_by_the_length_is_named(tmp_path: Path, family: str) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    keys = {"head_dim": 8} if family == "llama" else {}
    target = make_target(
        tmp_path / "target",
        family,
        with_tokenizer=True,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
        original_max_position_embeddings=64,
        **keys,
    )
    findings = list(examine(EngineConfig(model=str(target), device="cpu", max_model_len=80)))
    remarks = [f.value for f in findings if f.name == "remark"]
    assert any("longrope rope fixed" in text and "max_model_len 80" in text for text in remarks)


def test_code_and_templates_beside_a_model(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target = Path(shutil.copytree(pair[0], tmp_path / "target"))
    (target / "chat_template.jinja").unlink()
    (target / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert look(target)["target", "chat template"].value == "none"
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    args = ["doctor", "--model", str(target), "--device", "cpu", "--json"]
    template = ["--chat-template", str(tmp_path / "own.jinja")]
    found = json.loads(CliRunner().invoke(cli, [*args, *template]).stdout)["findings"]
    assert [f["value"] for f in found if f["name"] == "chat template"] == ["present"]
    edit_config(target, model_type="odd", architectures=["Odd"], auto_map={"AutoConfig": "odd.C"})
    (target / "odd.py").write_text("from pathlib import Path\nPath(__file__ + '.ran').touch()\n")
    refused = CliRunner().invoke(cli, args)
    assert refused.exit_code == 5
    assert "--trust-remote-code" in refused.stdout
    assert not (target / "odd.py.ran").exists()
    trusted = CliRunner().invoke(cli, [*args, "--trust-remote-code"])
    assert trusted.exit_code == 5  # there is no such class, but the code was looked at
    assert "--trust-remote-code" not in trusted.stdout


@pytest.mark.parametrize(
    "template",
    ["{{ x", "{{ nothing() }}", "{{ raise_exception('no users') }}", "{% if false %}x{% endif %}"],
)
def test_a_template_that_renders_nothing_is_not_just_present(
    pair: tuple[Path, Path], tmp_path: Path, template: str
) -> None:
    target = Path(shutil.copytree(pair[0], tmp_path / "target"))
    (target / "chat_template.jinja").write_text(template)
    finding = look(target)["target", "chat template"]
    assert finding.status == "note"
    assert "renders no message of a user" in finding.value
    assert "--chat-template" in str(finding.hint)


def fake_torch(bf16: bool) -> Any:
    facts = SimpleNamespace(name="H200", major=9, minor=0)
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_properties=lambda index: facts,
        mem_get_info=lambda index: (3 * 2**30, 4 * 2**30),
        is_bf16_supported=lambda including_emulation: bf16 and not including_emulation,
    )
    return SimpleNamespace(
        cuda=cuda,
        version=SimpleNamespace(cuda="12.8"),
    )


class FakeDriver:
    """The driver's library: one function, which writes through a pointer and returns an error."""

    def __init__(self, version: int, error: int = 0) -> None:
        self._version, self._error = version, error

    def cuDriverGetVersion(self, pointer: Any) -> int:  # noqa: N802 - its name there
        pointer._obj.value = self._version
        return self._error


def no_library(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("open_library", "text"),
    [
        (lambda name: FakeDriver(13000), "for CUDA 13.0"),
        (lambda name: FakeDriver(12080), "for CUDA 12.8"),
        (lambda name: FakeDriver(0), "unknown"),
        (lambda name: FakeDriver(13000, error=100), "unknown"),
        (lambda name: SimpleNamespace(), "unknown"),
        (no_library, "unknown"),
    ],
)
def test_the_driver_is_asked_itself(
    monkeypatch: pytest.MonkeyPatch, open_library: Any, text: str
) -> None:
    monkeypatch.setattr(doctor.ctypes, "CDLL", open_library)
    assert look_up(list(doctor._machine(fake_torch(True))))["machine", "driver"].value == text


def test_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.ctypes, "CDLL", lambda name: FakeDriver(12080))
    found = look_up(list(doctor._machine(fake_torch(bf16=True))))
    assert found["machine", "driver"].value == "for CUDA 12.8"
    gpu = found["machine", "GPU 1"].value
    assert gpu == "H200, compute capability 9.0, 3.0 of 4.0 GiB free"
    assert found["machine", "bfloat16"].value == "yes"
    old = look_up(list(doctor._machine(fake_torch(bf16=False))))["machine", "bfloat16"]
    assert (old.value, old.status) == ("no", "note")


def test_triton_is_tried_and_not_just_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from specgen.errors import EnvironmentProblem
    from specgen.kernels import trial

    def attempt(problem: EnvironmentProblem | None) -> None:
        if problem is not None:
            raise problem

    for problem, status, text in (
        (EnvironmentProblem("Triton does not work: cc", "see cc"), "problem", "does not work: cc"),
        (None, "ok", "compiles and runs"),
    ):
        monkeypatch.setattr(trial, "try_triton", lambda problem=problem: attempt(problem))
        triton = look_up(list(doctor._kernels(fake_torch(bf16=True))))["kernels", "triton"]
        assert triton.status == status
        assert triton.value.endswith(text)
        assert triton.hint == (problem and problem.hint)


def test_what_the_table_shows(pair: tuple[Path, Path]) -> None:
    result = CliRunner().invoke(cli, ["doctor", "--model", str(pair[0])])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "software",
        "machine",
        "kernels",
        "target",
        "memory",
    ]
    assert any(line.split()[:2] == ["ok", "python"] for line in lines)
    assert any("backend" in line for line in lines)


def test_a_gpu_that_is_not_there_gets_a_hint_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from specgen.config import EngineConfig
    from specgen.doctor_pair import examine_pair

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    *_, last = examine_pair(EngineConfig(device="cuda"))
    assert (last.name, last.status) == ("settings", "problem")
    assert last.hint is not None
    assert "--device cpu" in last.hint
    assert "doctor" not in last.hint


def without_head(root: Path) -> tuple[Path, None]:
    return make_llama(root / "target", with_tokenizer=True), None


def with_head(root: Path) -> tuple[Path, Path]:
    target = make_llama(root / "target", with_tokenizer=True)
    return target, make_eagle3(root / "draft", target, head_dim=32)


def through_transformers(root: Path) -> tuple[Path, None]:
    return make_target(root / "target", "gemma2", with_tokenizer=True), None


def with_head_through_transformers(root: Path) -> tuple[Path, Path]:
    target, _ = through_transformers(root)
    return target, make_eagle1(root / "draft", target)


@pytest.mark.parametrize("length", [None, "auto"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "gumbel"])
@pytest.mark.parametrize(
    "make", [without_head, with_head, through_transformers, with_head_through_transformers]
)
def test_an_engine_allocates_what_was_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], tuple[Path, Path | None]],
    sampled: bool,
    length: str | None,
) -> None:
    target, draft = make(tmp_path)
    settings: dict[str, Any] = {"max_model_len": 200, "max_num_seqs": 9, "device": "cpu"}
    settings["num_speculative_tokens"] = length if draft is not None else None
    if sampled and draft is not None:
        settings["draft_sample"] = "gumbel"
    # Room for some rows of full length, but not for all.
    monkeypatch.setattr(kv_cache, "_CPU_CACHE_BYTES", 2_000_000)
    asked = EngineConfig(model=str(target), draft_model=draft and str(draft), **settings)
    found = look_up(list(examine(asked, (10, 77))))
    engine = Engine(asked)
    pipeline, described = engine._pipeline, engine.describe()

    tensors = [t for layer in (*pipeline.caches.target, *pipeline.caches.draft) for t in layer]
    tokens = (described["num_kv_blocks"] + 1) * engine.config.block_size  # and the spare block
    per_token = sum(tensor.nbytes for tensor in tensors) / tokens
    assert found["memory", "cache of a token"].value == f"{per_token / 1024:.1f} KiB"

    for name, model in (("target", pipeline.target), ("draft", pipeline.draft)):
        if model is not None:
            weights: Any = model
            count = sum(weight.numel() for weight in weights.parameters())
            assert f"{count:,} in float32" in found["memory", f"{name} weights"].value

    lookahead = 2 * engine.config.num_speculative_tokens + 1
    for length in (10, 77, 200):
        blocks = -(-(length + lookahead) // engine.config.block_size)
        fitting = min(described["num_kv_blocks"] // blocks, 9)
        text = found["memory", f"rows of {length} tokens"].value
        assert f"; {fitting} of 9 rows fit at a time" in text
        assert text.startswith(f"{blocks * 16 * per_token / 2**20:.2f} MiB a row")
    assert 0 < fitting < 9, "else nothing limits them"

    held = vars(pipeline.state)
    state = [v for v in (*held.values(), *(held["kept_pairs"] or ())) if torch.is_tensor(v)]
    large = sum(t.nbytes for t in state if t.dim() > 1)
    kept = found["memory", "device rows"].value
    assert kept.startswith(f"{large / 2**20:.2f} MiB")
    assert (
        ("logits" in kept) == (described["draft_logits_bytes"] > 0) == ("draft_sample" in settings)
    )
    assert ("features" in kept) == engine.config.auto_draft_length


@pytest.mark.parametrize("make", [with_head, with_head_through_transformers])
@pytest.mark.parametrize(
    ("room", "settings"),
    [
        (150_000, {"max_num_seqs": 2, "max_model_len": 256}),  # not one row of cache
        (2_000_000, {"max_num_seqs": 40_000, "max_model_len": 200}),  # none beside the rows
    ],
)
def test_what_an_engine_refuses_for_its_memory_is_a_problem_and_the_advice_helps_both(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], tuple[Path, Path]],
    room: int,
    settings: dict[str, Any],
) -> None:
    monkeypatch.setattr(kv_cache, "_CPU_CACHE_BYTES", room)
    target, draft = make(tmp_path)
    options: dict[str, Any] = {"model": str(target), "draft_model": str(draft), "device": "cpu"}

    def problems(**settings: Any) -> list[Finding]:
        found = examine(EngineConfig(**options | settings), (10,))
        return [f for f in found if f.status == "problem"]

    with pytest.raises(EnvironmentProblem) as refused:
        Engine(EngineConfig(**options | settings))
    assert {finding.section for finding in problems(**settings)} == {"memory"}
    advice = re.search(r"--(max-[a-z-]+) (\d+) or less", str(refused.value.hint))
    assert advice is not None
    mended = settings | {advice[1].replace("-", "_"): int(advice[2])}
    Engine(EngineConfig(**options | mended))
    assert problems(**mended) == []


def test_every_flag_of_a_run_that_is_about_models_is_one_of_doctor_too() -> None:
    from specgen.commands.doctor import doctor as doctor_command
    from specgen.commands.run import run as run_command

    known = {field.name for field in fields(EngineConfig)} - {"seed", "overlong"}  # of rows
    wanted = {p.name: p.to_info_dict() for p in run_command.params if p.name in known}
    offered = {p.name: p.to_info_dict() for p in doctor_command.params if p.name in known}
    assert len(wanted) > 25
    assert offered == wanted


def lose_tokenizer(target: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (target / file).unlink()


def lose_weights(target: Path) -> None:
    (target / "model.safetensors").unlink()


def ask_for_odd_sampling(target: Path) -> None:
    (target / "generation_config.json").write_text('{"temperature": "warm"}')


@pytest.mark.parametrize(
    ("spoil", "flags", "text"),
    [
        (lose_tokenizer, ["--skip-tokenizer-init"], "not loaded: prompts must be token ids"),
        (lose_weights, ["--load-format", "dummy"], ""),
        (ask_for_odd_sampling, ["--generation-config", "none"], "left out: --generation-config"),
    ],
)
def test_a_flag_that_lets_a_run_begin_mends_what_doctor_says(
    pair: tuple[Path, Path], tmp_path: Path, spoil: Any, flags: list[str], text: str
) -> None:
    target = Path(shutil.copytree(pair[0], tmp_path / "target"))
    spoil(target)
    line = {"prompt_token_ids": [5, 6], "max_tokens": 2}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    models = ["--model", str(target), "--draft-model", str(pair[1]), "--device", "cpu"]
    looked = CliRunner().invoke(cli, ["doctor", *models])
    assert looked.exit_code == 5
    assert CliRunner().invoke(cli, ["run", str(tmp_path / "in.jsonl"), *models]).exit_code != 0
    looked = CliRunner().invoke(cli, ["doctor", *models, *flags])
    assert looked.exit_code == 0, looked.stdout
    assert text in looked.stdout
    ran = CliRunner().invoke(cli, ["run", str(tmp_path / "in.jsonl"), *models, *flags])
    assert ran.exit_code == 0, ran.stderr


def test_what_a_process_is_set_to_is_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes of the look, garbage is collected behind it as before."""
    seen = []

    def broken(*_: Any) -> Any:
        seen.append(gc.isenabled())
        raise RuntimeError

    monkeypatch.setattr(doctor, "examine", broken)
    for is_enabled in (True, False):
        (gc.enable if is_enabled else gc.disable)()
        try:
            assert CliRunner().invoke(cli, ["doctor"]).exit_code == 1
            assert gc.isenabled() == is_enabled
        finally:
            gc.enable()
            gc.unfreeze()
    assert seen == [False, False]


def test_no_draft_looks_at_no_draft() -> None:
    result = CliRunner().invoke(cli, ["doctor", "--no-draft", "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.stdout
    sections = {finding["section"] for finding in json.loads(result.stdout)["findings"]}
    assert "target" in sections
    assert "draft" not in sections


@pytest.mark.parametrize(
    "flags",
    [
        ["--no-draft", "--draft-sample", "gumbel"],
        ["--no-draft", "--num-speculative-tokens", "2"],
        ["--no-draft", "--draft-model", "d"],
        ["--draft-rope-theta", "1e5", "--no-draft"],
        ["--rejection-sample", "synthetic"],
        ["--synthetic-acceptance", "2", "--rejection-sample", "synthetic", "--no-draft"],
        ["--synthetic-acceptance", "9", "--rejection-sample", "synthetic"],
        ["--draft-norm-output", "true", "--draft-model", "."],
        ["--skip-tokenizer-init", "--tokenizer", "t"],
    ],
)
def test_flags_that_a_run_refuses_are_refused_in_the_same_words(flags: list[str]) -> None:
    ran = CliRunner().invoke(cli, ["run", __file__, "--device", "cpu", *flags])
    assert ran.exit_code not in (0, 1, 3)
    looked = CliRunner().invoke(cli, ["doctor", "--device", "cpu", *flags])
    assert looked.exit_code in (2, 5)
    message = ran.stderr.splitlines()[0].removeprefix("error: ").split(";")[0]
    assert message in looked.output

"""Checkpoints that cannot be run, from the shell's side: one early error, nothing left behind."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from e2e.engines import TEXT
from models import layouts
from models.tiny import edit_config, load_state, make_target, save_state, write_tokenizer

from specgen.cli import cli
from specgen.models import checkpoint, weights


@pytest.fixture
def case(checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with copies of a target and its heads, to be spoiled."""
    monkeypatch.chdir(tmp_path)
    for name in ("text", "text-eagle1", "text-eagle3"):
        shutil.copytree(checkpoints[name], tmp_path / name)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "max_tokens": 2}\n')
    return tmp_path


def run(draft: str | None = "text-eagle3", *flags: str) -> Result:
    args = ["run", "in.jsonl", "--model", "text", "--device", "cpu", "-o", "out"]
    args += [] if draft is None else ["--draft-model", draft]
    return CliRunner().invoke(cli, [*args, *flags])


def refused(before: list[str], result: Result, *parts: str) -> None:
    assert result.exit_code == 5, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    for part in parts:
        assert part in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert sorted(os.listdir()) == before, "something was left behind"


def change(directory: Path, **tensors: torch.Tensor | None) -> None:
    state = load_state(directory)
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        if tensor is None:
            del state[name]
        else:
            state[name] = tensor
    save_state(directory, state)


def truncate_target(case: Path) -> None:
    file = case / "text" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def truncate_head(case: Path) -> None:
    head = case / "text-eagle3"
    save_state(head, load_state(head), as_bin=True)
    file = head / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-1000])


def misshape_target(case: Path) -> None:
    change(case / "text", model__norm__weight=torch.ones(31))


def misshape_head(case: Path) -> None:
    change(case / "text-eagle3", norm__weight=torch.ones(31))


def lose_a_shard(case: Path) -> None:
    shutil.rmtree(case / "text")
    make_target(case / "text", with_tokenizer=True, max_shard_size="30KB", **TEXT)
    sorted((case / "text").glob("*.safetensors"))[1].unlink()


def take_a_wider_target(case: Path) -> None:
    shutil.rmtree(case / "text")
    make_target(case / "text", with_tokenizer=True, vocab_size=78, hidden_size=64)


def lose_the_map(case: Path) -> None:
    change(case / "text-eagle3", d2t=None)


def misread_the_map(case: Path) -> None:
    d2t = load_state(case / "text-eagle3")["d2t"]
    change(case / "text-eagle3", d2t=d2t + torch.arange(len(d2t)))


def lose_a_tensor_of_the_head(case: Path) -> None:
    change(case / "text-eagle3", midlayer__hidden_norm__weight=None)


class _RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("it-ran"),)


def put_code_into_the_head(case: Path) -> None:
    (case / "text-eagle3" / "model.safetensors").unlink()
    content = pickle.dumps({"norm.weight": _RunsCode()})
    (case / "text-eagle3" / "pytorch_model.bin").write_bytes(content)


def name_an_unknown_architecture(case: Path) -> None:
    edit_config(case / "text", architectures=["HyenaForCausalLM"], model_type="hyena")


def reach_beyond_the_target(case: Path) -> None:
    edit_config(case / "text-eagle3", eagle_aux_hidden_state_layer_ids=[2, 18, 33])


def leave_the_residual_open(case: Path) -> None:
    layouts.to_speculators(case / "text-eagle3", norm_before_residual=...)


def be_a_parallel_head(case: Path) -> None:
    change(case / "text-eagle3", mask_hidden=torch.zeros(32))


def quantize(case: Path) -> None:
    edit_config(case / "text-eagle3", quantization_config={"quant_method": "fp8"})


BAD: dict[Callable[[Path], None], tuple[str, ...]] = {
    truncate_target: ("text/model.safetensors", "not a complete safetensors file"),
    truncate_head: ("text-eagle3/pytorch_model.bin",),
    misshape_target: ('"model.norm.weight"', "[31]", "[32]"),
    misshape_head: ('"norm.weight"', "[31]", "[32]"),
    lose_a_shard: ("model-00002-of-", "missing", "fetch the missing shard"),
    take_a_wider_target: ('"fc.weight"', "the head was made for another target"),
    lose_the_map: ('"d2t" is missing',),
    misread_the_map: ('"d2t"', "look like absolute target ids"),
    lose_a_tensor_of_the_head: ('"midlayer.hidden_norm.weight" is missing',),
    put_code_into_the_head: ("nothing but tensors is read from a pickle",),
    name_an_unknown_architecture: ("text", "hyena"),
    reach_beyond_the_target: ("[2, 18, 33]", "0..3", "--draft-aux-layers"),
    leave_the_residual_open: ('"norm_before_residual"', "--draft-norm-before-residual"),
    be_a_parallel_head: ("P-EAGLE", "supported drafts"),
    quantize: ("quantization_config", "fp8"),
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__)
def test_one_error_before_anything_starts(case: Path, spoil: Callable[[Path], None]) -> None:
    spoil(case)
    before = sorted(os.listdir())
    refused(before, run(), *BAD[spoil])
    assert not Path("it-ran").exists()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("spoil", [lose_a_tensor_of_the_head, misread_the_map])
def test_a_head_that_is_amiss_shows_before_the_weights_are_read(
    case: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None], family: str
) -> None:
    if family != "llama":
        shutil.rmtree(case / "text")
        make_target(case / "text", family, with_tokenizer=True, **TEXT)
    read_tensor = checkpoint.read_tensor

    def read(file: Path, stored: Any) -> Any:
        assert file.parent.name != "text", "weights were read"
        return read_tensor(file, stored)

    monkeypatch.setattr(checkpoint, "read_tensor", read)
    spoil(case)
    refused(sorted(os.listdir()), run(), *BAD[spoil])


@pytest.mark.parametrize("size", [50, 110])
def test_a_tokenizer_of_another_vocabulary(case: Path, size: int) -> None:
    write_tokenizer(case / "other", size)
    before = sorted(os.listdir())
    result = run("text-eagle3", "--tokenizer", "other")
    refused(
        before, result, f"other: the tokenizer has {size} tokens", "embedding 78", "--tokenizer"
    )


def test_code_beside_a_tokenizer_is_not_run(case: Path) -> None:
    custom = case / "custom"
    custom.mkdir()
    values = {"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": ["odd.Odd", None]}}
    (custom / "tokenizer_config.json").write_text(json.dumps(values))
    (custom / "odd.py").write_text("from pathlib import Path\nPath('it-ran').touch()\n")
    before = sorted(os.listdir())
    refused(before, run("text-eagle3", "--tokenizer", "custom"), "custom: no usable tokenizer")
    assert not Path("it-ran").exists()


def drop_template(case: Path) -> None:
    (case / "text" / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((case / "text" / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (case / "text" / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("flags", [("--apply-chat-template", "always"), ("--system-prompt", "Be")])
def test_flags_that_need_a_template_are_refused_before_a_row_fails(
    case: Path, flags: tuple[str, str]
) -> None:
    drop_template(case)
    before = sorted(os.listdir())
    refused(before, run("text-eagle3", *flags), f"{flags[0]}", "no chat template")
    found = CliRunner().invoke(cli, ["validate", "in.jsonl", "--model", "text", *flags])
    assert found.exit_code == 5
    assert "--chat-template" in found.stderr


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
ENVELOPE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
PROMPT = {"prompt": "a", "max_tokens": 2}


def write_lines(*lines: dict[str, Any], path: str = "in.jsonl") -> None:
    Path(path).write_text("\n" + "".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("template", [None, "{% for m in messages %}\n{% if %}"])
@pytest.mark.parametrize("first", [CHAT, ENVELOPE])
def test_a_file_that_begins_with_messages_needs_a_template_before_weights_are_read(
    case: Path, first: dict[str, Any], template: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_template(case)
    if template is not None:
        (case / "text" / "chat_template.jinja").write_text(template)
    write_lines(first, PROMPT)
    write_lines(PROMPT, CHAT, path="other.jsonl")
    before = sorted(os.listdir())
    said = "not a Jinja template" if template else "no chat template"
    with monkeypatch.context() as patch:
        patch.setattr(weights, "fill_tensors", lambda *_: pytest.fail("weights were read"))
        result = run()
        refused(before, result, 'in.jsonl:2: "messages" for text', said, "--chat-template FILE")
        assert "warning" not in result.stderr
        args = ["other.jsonl", "in.jsonl", "-o", "out", "--model", "text", "--device", "cpu"]
        refused(before, CliRunner().invoke(cli, ["run", *args]), "in.jsonl:2", said)
    assert run("text-eagle3", "--chat-template", "{{ messages[0].content }}").exit_code == 0


@pytest.mark.parametrize(
    ("lines", "flags", "code"),
    [
        ((PROMPT, CHAT), (), "no_chat_template"),
        ((CHAT, PROMPT), ("--apply-chat-template", "never"), "invalid_value"),
        ((CHAT, PROMPT), ("--skip-tokenizer-init",), "no_tokenizer"),
        ((CHAT, PROMPT), ("--limit", "0"), None),
    ],
)
def test_lines_that_cannot_be_rendered_cost_their_rows_alone(
    case: Path, lines: tuple[dict[str, Any], ...], flags: tuple[str, ...], code: str | None
) -> None:
    drop_template(case)
    write_lines(*lines)
    result = run("text-eagle3", *flags)
    assert result.exit_code == (0 if code is None else 3), result.stderr
    rows = [json.loads(line) for line in Path("out").read_text().splitlines()]
    found = [row["error"]["code"] for row in rows if row["error"]]
    assert set(found) == (set() if code is None else {code})
    if code == "no_chat_template":
        assert [row["status"] for row in rows] == ["ok", "error"]
        assert "--chat-template" in rows[1]["error"]["message"]


def test_a_pipe_is_not_read_ahead_for_its_messages(case: Path) -> None:
    drop_template(case)
    lines = json.dumps(CHAT) + "\n" + json.dumps(PROMPT) + "\n"
    args = ["run", "-", "-o", "piped", "--device", "cpu", "--model", "text"]
    result = CliRunner().invoke(cli, args, input=lines)
    assert result.exit_code == 3
    rows = [json.loads(line) for line in Path("piped").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["error", "ok"]


def warnings_of(result: Result) -> list[str]:
    """Those that came before the first row."""
    lines = result.stderr.splitlines()
    end = next((i for i, line in enumerate(lines) if "in.jsonl:" in line), len(lines))
    return [line for line in lines[:end] if line.startswith("warning: ")]


BROKEN = "{% for m in messages %}\n{{ m['content'] }}\n{% if %}"


@pytest.mark.parametrize("flags", [("--apply-chat-template", "always"), ("--system-prompt", "Be")])
def test_flags_that_need_the_template_are_refused_when_it_is_broken(
    case: Path, flags: tuple[str, str]
) -> None:
    (case / "text" / "chat_template.jinja").write_text(BROKEN)
    before = sorted(os.listdir())
    refused(before, run("text-eagle3", *flags), flags[0], "not a Jinja template", "(line 3)")
    found = CliRunner().invoke(cli, ["validate", "in.jsonl", "--model", "text", *flags])
    assert found.exit_code == 5
    assert "(line 3)" in found.stderr


def test_a_broken_template_is_said_once_with_its_line(case: Path) -> None:
    (case / "text" / "chat_template.jinja").write_text(BROKEN)
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (PROMPT, CHAT, CHAT)))
    result = run()
    assert result.exit_code == 3
    rows = [json.loads(line) for line in Path("out").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["ok", "error", "error"]
    assert "(line 3)" in rows[1]["error"]["message"]
    said = "the model's chat template is not a Jinja template"
    (warning,) = [line for line in warnings_of(result) if said in line]
    assert "(line 3)" in warning
    assert result.stderr.count(said) == 1
    replaced = run("text-eagle3", "--chat-template", "{{ messages[0].content }}", "--overwrite")
    assert replaced.exit_code == 0, replaced.stderr
    assert said not in replaced.stderr


def test_what_a_model_asks_in_vain_is_said_and_kept(case: Path) -> None:
    values = {"temperature": 0.5, "repetition_penalty": 1.05, "eos_token_id": [2, 9]}
    (case / "text" / "generation_config.json").write_text(json.dumps(values))
    result = run()
    assert result.exit_code == 0
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert "repetition_penalty 1.05: not applied" in line
    assert "end-of-sequence ids alone" in result.stderr, "what the flag leaves of the file"
    settings = json.loads(Path("out.meta.json").read_text())["settings"]
    assert settings["generation_config_ignored"] == {"repetition_penalty": 1.05}
    assert settings["sampling"]["temperature"] == 0.5
    assert settings["eos_token_ids"] == [2, 9]
    result = run("text-eagle3", "--generation-config", "none", "--overwrite")
    assert "repetition_penalty" not in result.stderr.replace('"repetition_penalty"', "")
    settings = json.loads(Path("out.meta.json").read_text())["settings"]
    assert settings["sampling"]["temperature"] == 1.0
    assert settings["eos_token_ids"] == [2, 9]


def spoil_sampling(case: Path) -> None:
    (case / "text" / "generation_config.json").write_text('{"temperature": "hot"}')


def spoil_choice(case: Path) -> None:
    (case / "text" / "generation_config.json").write_text('{"do_sample": "maybe"}')


def spoil_eos(case: Path) -> None:
    (case / "text" / "generation_config.json").write_text('{"eos_token_id": [5000]}')


@pytest.mark.parametrize("spoil", [spoil_sampling, spoil_choice, spoil_eos])
def test_run_and_doctor_refuse_a_value_in_the_same_words(
    case: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(case)
    before = sorted(os.listdir())
    result = run()
    refused(before, result, "config.json: ", "hint: correct")
    message, hint = result.stderr.splitlines()[-2:]
    looked = CliRunner().invoke(cli, ["doctor", "--model", "text", "--device", "cpu"])
    assert looked.exit_code == 5
    assert message.removeprefix("error: ") in looked.stdout
    assert hint in looked.stdout


def add_eos(case: Path) -> None:
    (case / "text" / "generation_config.json").write_text('{"eos_token_id": [2, 5000]}')


def name_another_verifier(case: Path) -> None:
    verifier = {"name_or_path": "org/other", "architectures": ["Qwen3ForCausalLM"]}
    layouts.to_speculators(case / "text-eagle3")
    edit_config(case / "text-eagle3", speculators_config={"verifier": verifier})


def add_window(case: Path) -> None:
    edit_config(case / "text", sliding_window=16)


@pytest.mark.parametrize(
    ("spoil", "said", "is_warning"),
    [
        (add_eos, '"eos_token_id" 5000: no row can end so', True),
        (name_another_verifier, "for a Qwen3ForCausalLM, the target is a LlamaForCausalLM", True),
        (add_window, '"sliding_window" of config.json has no effect', False),
    ],
)
def test_what_is_odd_and_can_run_is_said_by_run_and_doctor(
    case: Path, spoil: Callable[[Path], None], said: str, is_warning: bool
) -> None:
    spoil(case)
    result = run("text-eagle3", "--progress", "plain")
    assert result.exit_code == 0, result.stderr
    assert said in json.dumps(json.loads(Path("out.meta.json").read_text())).replace('\\"', '"')
    (line, *others) = [line for line in result.stderr.splitlines() if said in line]
    assert any(text.startswith("warning: ") for text in (line, *others)) == is_warning
    args = ["doctor", "--model", "text", "--draft-model", "text-eagle3", "--device", "cpu"]
    looked = CliRunner().invoke(cli, args)
    assert looked.exit_code == 0, looked.stdout
    (line,) = [line for line in looked.stdout.splitlines() if said in line]
    assert line.split()[0] == "note"


@pytest.mark.parametrize("how", ["template", "text", "plain"])
def test_no_prompt_gets_two_bos(case: Path, how: str) -> None:
    """The template writes one, and a prompt that was rendered elsewhere may hold one."""
    lines: dict[str, dict[str, Any]] = {
        "template": {"messages": [{"role": "user", "content": "hi"}]},
        "text": {"prompt": "<s>user: hi\nassistant: "},
        "plain": {"prompt": "user: hi\nassistant: "},
    }
    for name in ("template", how):
        Path("in.jsonl").write_text(json.dumps({**lines[name], "max_tokens": 1}) + "\n")
        assert run("text-eagle3", "--overwrite").exit_code == 0
        usage = json.loads(Path("out").read_text())["usage"]
        assert usage["prompt_tokens"] == 1 + len("user: hi\nassistant: ")


def test_a_head_that_accepts_nothing_is_named(case: Path) -> None:
    """A head of random weights loads, and drafts noise."""
    state = load_state(case / "text-eagle3")
    generator = torch.Generator().manual_seed(1)
    noise = {
        name: torch.randn(tensor.shape, generator=generator)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in state.items()
    }
    save_state(case / "text-eagle3", noise)
    lines = '{"prompt": "abc", "max_tokens": 60, "ignore_eos": true}\n' * 10
    Path("in.jsonl").write_text(lines)
    result = run("text-eagle3", "--summary", "sum.json")
    assert result.exit_code == 0
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    summary = json.loads(Path("sum.json").read_text())["speculative_decoding"]
    drafted, accepted = summary["drafted_per_position"][0], summary["accepted_per_position"][0]
    assert drafted >= 300
    assert (accepted < 0.05 * drafted) == bool(warnings) == bool(summary["warning"])
    assert warnings, f"{accepted} of {drafted}: choose another noise"
    assert "first drafts were accepted" in warnings[0]


def test_random_weights_are_said_to_be_random(case: Path) -> None:
    result = run("text-eagle3", "--load-format", "dummy")
    assert result.exit_code == 0
    assert "warning: --load-format dummy: the weights are random" in result.stderr


def test_a_directory_without_a_configuration_is_named(case: Path) -> None:
    Path("bare").mkdir()
    for name, place in (("bare", case / "bare"), (".", case)):
        result = CliRunner().invoke(cli, ["run", "in.jsonl", "-o", "-", "--model", name])
        assert result.exit_code == 5
        assert f"{place}{os.sep}config.json: missing" in result.stderr

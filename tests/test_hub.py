"""Checkpoints by hub id, with the real client against a server that answers as the hub does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_hub import COMMIT, FakeHub, serve_hub
from models.tiny import load_state, make_eagle1, make_eagle3, make_llama, save_state
from safetensors import safe_open

import specgen
from specgen.errors import ModelError
from specgen.hub import is_hub_id, locate
from specgen.models.checkpoint import Checkpoint

SCRIPT = """
import json, sys, tempfile
from pathlib import Path
import specgen.sparse_copy
from specgen.errors import ModelError
from specgen.hub import fetch_headers, locate
for call in json.loads(sys.argv[1]):
    try:
        if call[0] == "locate":
            path = locate(*call[1:])
        elif call[0] == "with code":
            path = locate(call[1], with_code=True)
        elif call[0] == "texts":
            path = locate(call[1], with_weights=False)
        else:
            specgen.sparse_copy._FIRST_BYTES = int(call[2])
            path = fetch_headers(call[1], Path(tempfile.mkdtemp(dir=sys.argv[2])))
        print(json.dumps([path, sorted(file.name for file in Path(path).iterdir())]))
    except ModelError as error:
        print(json.dumps([None, str(error)]))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    root = tmp_path_factory.mktemp("hub")
    model = make_llama(root / "org" / "model", with_tokenizer=True, max_shard_size="200KB")
    for name in ("head", "bare"):
        make_eagle3(root / "org" / name, model)
    for name in ("head", "model"):
        (root / "org" / name / "odd.py").write_text("raise SystemExit")
    make_eagle1(root / "org" / "pickled", model, as_bin=True)
    gated = make_eagle3(root / "org" / "gated", model)
    (gated / ".gated").touch()
    (root / "org" / "texts").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (root / "org" / "texts" / name).write_bytes((model / name).read_bytes())
    (model / "pytorch_model.bin").write_bytes(b"the same weights again")
    (model / "consolidated.safetensors").write_bytes(b"and again")
    with serve_hub(root) as hub:
        yield hub


def environment(hub: FakeHub, home: Path, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(specgen.__file__).parents[1]),
        **more,
    }


def ask(
    hub: FakeHub, home: Path, calls: list[list[str]], **env: str
) -> list[tuple[str | None, str | list[str]]]:
    """Directory and files of each call, or None and the error's text."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(calls), str(home)],
        env=environment(hub, home, **env),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_what_is_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("org/model")
    for name in ("./org/model", "/org/model", "~/model", "model", "a/b/c"):
        assert not is_hub_id(name)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert not is_hub_id("org/model")
    assert locate("org/model") == "org/model"
    with pytest.raises(ModelError, match="no such model directory") as found:
        locate("model")
    assert "specgen bench" not in found.value.hint
    with pytest.raises(ModelError, match="no such model directory") as found:
        locate("llama-3.1-8b")
    assert "for specgen bench alone" in found.value.hint


def test_what_is_fetched_and_what_is_said(hub: FakeHub, tmp_path: Path) -> None:
    home = tmp_path / "online"
    home.mkdir()
    calls = [
        ["locate", "org/model"],
        ["locate", "org/pickled"],
        ["locate", "org/gated"],
        ["locate", "org/none"],
        ["locate", "org/model", "v9"],
        ["locate", "org/model", COMMIT],
        ["with code", "org/head"],
    ]
    model, pickled, gated, none, revision, commit, trusted = ask(hub, home, calls)
    assert model[0] is not None
    assert COMMIT in model[0]
    hub.fetched.clear()
    assert ask(hub, home, [["headers", "org/model", "100"]]) == [model]
    assert hub.fetched == [], "what is cached was fetched again"
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < set(model[1])
    assert not {"pytorch_model.bin", "consolidated.safetensors"} & set(model[1])
    assert set(pickled[1]) == {"config.json", "pytorch_model.bin"}
    assert gated[0] is None
    assert "org/gated: is gated" in gated[1]
    assert f"{hub.url}/org/gated" in gated[1]
    assert "HF_TOKEN" in gated[1]
    assert "org/none: no such model directory, and no such repository" in none[1]
    assert "org/model: has no revision 'v9'" in revision[1]
    assert commit[0] == model[0]
    assert "odd.py" not in model[1]
    assert "odd.py" in trusted[1]
    # What is cached needs no network; the rest says so.
    offline = [["locate", "org/model"], ["locate", "org/bare"], ["headers", "org/bare", "1000"]]
    of_revision = [["locate", "org/bare", "v2"]]
    ((_, text),) = ask(hub, home, of_revision, HF_HUB_OFFLINE="1")
    assert "hf download org/bare --revision v2" in text
    model_again, *absent = ask(hub, home, offline, HF_HUB_OFFLINE="1")
    assert model_again == model
    for path, text in absent:
        assert path is None
        assert "not complete in the hub's cache" in text
        assert "HF_HUB_OFFLINE is set" in text
        assert "hf download org/bare" in text
    dead = [["locate", "org/model"], ["locate", "org/bare"]]
    model_again, head = ask(hub, home, dead, HF_ENDPOINT="http://127.0.0.1:9")
    assert model_again == model
    assert "the hub cannot be reached" in head[1]


def test_a_cache_that_lacks_what_nobody_needs_is_enough(hub: FakeHub, tmp_path: Path) -> None:
    ((path, _),) = ask(hub, tmp_path, [["locate", "org/model"]])
    assert path is not None
    (Path(path) / "generation_config.json").unlink()
    ((again, _),) = ask(hub, tmp_path, [["locate", "org/model"]], HF_HUB_OFFLINE="1")
    assert again == path
    # A shard that is missing is found by name when the checkpoint is opened.
    shard = sorted(Path(path).glob("*.safetensors"))[1]
    shard.unlink()
    ((again, _),) = ask(hub, tmp_path, [["locate", "org/model"]], HF_HUB_OFFLINE="1")
    assert again == path
    with pytest.raises(ModelError, match=f"{shard.name}: missing"):
        Checkpoint.open(path)


@pytest.mark.parametrize("revision", ["main", COMMIT])
def test_a_cache_of_an_older_client_is_enough(hub: FakeHub, tmp_path: Path, revision: str) -> None:
    """Files, links and a ref, and no list of what a commit has; a commit may be asked for whole."""
    cached = tmp_path / "hub" / "models--org--head"
    snapshot = cached / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_bytes((hub.root / "org" / "head" / name).read_bytes())
    calls = [["locate", "org/head", revision]]
    for env in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        assert ask(hub, tmp_path, calls, **env) == [
            (str(snapshot), ["config.json", "model.safetensors"])
        ]
    (snapshot / "model.safetensors").unlink()
    ((path, text),) = ask(hub, tmp_path, calls, HF_HUB_OFFLINE="1")
    assert path is None
    assert "not complete in the hub's cache" in text


@pytest.mark.parametrize("repository", ["org/bare", "org/texts", "org/pickled"])
def test_texts_in_the_cache_are_no_model(hub: FakeHub, tmp_path: Path, repository: str) -> None:
    """Whoever looked at a tokenizer or a configuration once has its texts in the cache."""
    ((texts, files),) = ask(hub, tmp_path, [["texts", repository]])
    assert texts is not None
    assert not any(name.endswith((".safetensors", ".bin")) for name in files)
    calls = [["texts", repository], ["locate", repository], ["headers", repository, "1000"]]
    again, *absent = ask(hub, tmp_path, calls, HF_HUB_OFFLINE="1")
    assert again == (texts, files)
    for path, text in absent:
        assert path is None
        assert f"{repository}: no such model directory, not complete in the hub's cache" in text
        assert f"hf download {repository}" in text
    (dead,) = ask(hub, tmp_path, [["locate", repository]], HF_ENDPOINT="http://127.0.0.1:9")
    assert dead[0] is None
    assert f"{repository}: no" in dead[1]
    if repository == "org/texts":
        ((path, text),) = ask(hub, tmp_path, [["locate", repository]])
        assert path is None
        assert "org/texts: no config.json with a weight file" in text
        assert "pytorch_model*.bin" in text


def specgen_command(hub: FakeHub, home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specgen", *args],
        env=environment(hub, home),
        capture_output=True,
        text=True,
        check=False,
        cwd=home,
    )


def test_what_needs_no_weights_fetches_none(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "hi", "max_tokens": 2}\n')
    (tmp_path / "own").mkdir()
    head = make_llama(tmp_path / "own" / "model")
    texts = ["org/model", "org/head"]
    run = ["run", "in.jsonl", "--device", "cpu", "--max-model-len", "32"]
    for args in (
        ["validate", "in.jsonl", "--model", "org/model"],
        [*run, "--model", *texts[:1], "--draft-model", texts[1], "--load-format", "dummy"],
        [*run, "--model", str(head), "--tokenizer", "org/model"],
        ["doctor", "--model", texts[0], "--draft-model", texts[1], "--load-format", "dummy"],
        ["doctor", "--model", "org/texts", "--load-format", "dummy"],  # which has none
    ):
        hub.fetched.clear()
        done = specgen_command(hub, tmp_path, *args)
        assert done.returncode == 0, done.stdout + done.stderr
        weights = [name for name in hub.fetched if name.endswith((".safetensors", ".bin"))]
        assert not weights, args


def test_a_revision_is_the_models_before_the_tokenizers(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "hi"}\n')
    args = ["validate", "in.jsonl", "--revision", "v9"]
    refused = specgen_command(hub, tmp_path, *args, "--model", "org/model")
    assert "org/model: has no revision 'v9'" in refused.stderr
    built_in = specgen_command(hub, tmp_path, *args, "--tokenizer", "org/model")
    assert "org/model: has no revision 'v9'" in built_in.stderr
    (hub.root / "org" / "texts" / ".untagged").touch()
    alone = ["--tokenizer", "org/texts", "--revision", "v1"]
    refused = specgen_command(hub, tmp_path, "validate", "in.jsonl", *alone)
    assert "org/texts: has no revision" in refused.stderr
    pair = ["--model", "org/model", "--tokenizer", "org/texts", "--revision", "v1"]
    done = specgen_command(hub, tmp_path, "validate", "in.jsonl", *pair)
    assert done.returncode == 0, done.stderr


def test_doctor_takes_the_tokenizer_at_its_revision(hub: FakeHub, tmp_path: Path) -> None:
    target = make_llama(tmp_path / "target")
    args = ["doctor", "--model", str(target), "--tokenizer", "org/texts", "--device", "cpu"]
    done = specgen_command(hub, tmp_path, *args, "--revision", "v9")
    assert done.returncode == 5
    assert "org/texts: has no revision 'v9'" in done.stdout
    done = specgen_command(hub, tmp_path, *args)
    assert done.returncode == 0, done.stdout + done.stderr


def test_doctor_reads_headers_alone(hub: FakeHub, tmp_path: Path) -> None:
    def doctor(model: str, draft: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "specgen", "doctor", "--model", model, "--draft-model", draft],
            env=environment(hub, tmp_path),
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    code, text = doctor("org/model", "org/head")
    assert code == 0, text
    assert "EAGLE-3 head (official layout)" in text
    assert "fits the target" in text
    code, text = doctor("org/model", "org/pickled")
    assert code == 0, text
    assert "EAGLE-1 head (official layout)" in text


def test_pickles_come_without_their_tensors_too(hub: FakeHub, tmp_path: Path) -> None:
    old = {"d2t": torch.zeros(3, dtype=torch.int64)}
    target = make_llama(tmp_path / "target")
    repo = make_eagle3(hub.root / "org" / "wide", target, intermediate_size=9000)
    state = load_state(repo)
    save_state(repo, state, as_bin=True)
    torch.save(old, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    ancient = make_eagle1(hub.root / "org" / "ancient", target)
    save_state(ancient, {})
    (ancient / "model.safetensors").unlink()
    (ancient / "pytorch_model.bin").write_bytes((tmp_path / "old.bin").read_bytes())
    hub.bytes_sent = 0
    calls = [["headers", "org/wide", "0"], ["headers", "org/ancient", "0"]]
    (path, _), (nothing, text) = ask(hub, tmp_path, calls)
    assert path is not None
    shown = Checkpoint.open(path)
    assert {n: info.shape for n, info in shown.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }
    for name in ("d2t", "t2d"):
        assert torch.equal(shown.load(name), state[name])
    assert hub.bytes_sent < (repo / "pytorch_model.bin").stat().st_size / 8
    assert nothing is None
    assert "pytorch_model.bin: has no table of contents" in text


@pytest.mark.parametrize("first_bytes", ["100", "8000"])
def test_headers_come_without_their_tensors(hub: FakeHub, tmp_path: Path, first_bytes: str) -> None:
    """In one request a file, or in two where the header is longer than was guessed."""
    hub.bytes_sent = 0
    hub.fetched.clear()
    ((path, files),) = ask(hub, tmp_path, [["headers", "org/model", first_bytes]])
    assert path is not None
    shown = Checkpoint.open(path)
    truth = {
        file.name: file
        for file in (hub.root / "org" / "model").iterdir()
        if file.name.startswith("model-")
    }
    assert {name for name in files if name.startswith("model-")} == set(truth)
    for file in truth.values():
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                assert list(shown.tensors[name].shape) == opened.get_slice(name).get_shape()
    ((head, _),) = ask(hub, tmp_path, [["headers", "org/head", first_bytes]])
    assert head is not None
    stored, kept = Checkpoint.open(hub.root / "org" / "head"), Checkpoint.open(head)
    for name in ("d2t", "t2d"):
        assert torch.equal(kept.load(name), stored.load(name)), "the maps are worth fetching"
    assert not kept.load("lm_head.weight").any()
    fetched = [name for name in hub.fetched if "org/model/model-" in name]
    assert len(fetched) == len(truth) * (2 if first_bytes == "100" else 1)
    tensors = sum(file.stat().st_size for file in truth.values())
    texts = sum(file.stat().st_size for file in (hub.root / "org" / "model").glob("*.j*"))
    assert hub.bytes_sent < texts + tensors / 4

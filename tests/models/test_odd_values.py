"""Any value under any key of a configuration gives a model or one error of our own."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from models import layouts
from models.tiny import make_eagle1, make_eagle3, make_target

from specgen.errors import SpecgenError
from specgen.kernels import select_kernels
from specgen.models.registry import read_model_config
from specgen.models.weights import inspect_draft, load_draft, load_target
from specgen.pipeline.tokenization import Tokenizer

ODD: tuple[Any, ...] = (..., None, -1, 0, 1, "x", [1], {"a": 1}, {}, True, float("nan"), 1e-30)
META: dict[str, Any] = {"device": "meta", "kernels": select_kernels("cpu")}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
LONGROPE |= {"original_max_position_embeddings": 64}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
WINDOW = {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2}
FEW = {"num_hidden_layers": 3}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"rope_parameters": YARN, "sliding_window": 9}),
    "qwen2": ("qwen2", {"rope_parameters": LONGROPE, **WINDOW}),
    "qwen3_moe": ("qwen3_moe", {}),
    "gemma2": ("gemma2", {}),
}
IDS = "eagle_aux_hidden_state_layer_ids"


def eagle3(path: Path, target: Path) -> Path:
    nested = {IDS: [1, 0, 2], "use_aux_hidden_state": True}
    return make_eagle3(path, target, eagle_config=nested, sliding_window=6, rope_parameters=YARN)


def speculators(path: Path, target: Path) -> Path:
    keys: dict[str, Any] = {"norm_before_residual": True, "norm_output": True, IDS: [0, 1, 2]}
    return layouts.to_speculators(make_eagle3(path, target, fc_norms="whole", **keys))


def wrapped(path: Path, target: Path) -> Path:
    return layouts.to_wrapped(make_eagle1(path, target, store_lm_head=True))


HEADS: dict[str, Callable[[Path, Path], Path]] = {
    "eagle1": make_eagle1,
    "eagle3": eagle3,
    "speculators": speculators,
    "speculators-eagle1": lambda p, t: layouts.to_speculators_eagle1(make_eagle1(p, t)),
    "wrapped": wrapped,
}


def changed(config: dict[str, Any], whole: dict[str, Any] | None = None) -> Iterator[Any]:
    """The configuration with each key, also of the objects in it, of each odd value in turn."""
    whole = config if whole is None else whole
    for key, usual in list(config.items()):
        if isinstance(usual, dict):
            yield from changed(usual, whole)
        for value in ODD:
            if value is ...:
                del config[key]
            else:
                config[key] = value
            yield key, value, copy.deepcopy(whole)
            config[key] = usual


def try_all(directory: Path, load: Callable[[], object]) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    num_loaded, refusals = 0, []
    for key, value, data in changed(config):
        file.write_text(json.dumps(data))
        try:
            load()
            num_loaded += 1
        except SpecgenError as error:
            refusals.append(error.message)
        except Exception as error:
            raise AssertionError(f"{key} = {value!r}: {error!r}") from error
    assert min(num_loaded, len(refusals)) > 20, "as good as none was loaded, or none refused"
    assert not [message for message in refusals if "\n" in message]


@pytest.mark.parametrize("name", TARGETS)
def test_targets(tmp_path: Path, name: str) -> None:
    family, keys = TARGETS[name]
    path = make_target(tmp_path / "t", family, **FEW, **keys)
    try_all(path, lambda: load_target(path, max_model_len=64, **META))


@pytest.mark.parametrize("name", HEADS)
def test_heads(tmp_path: Path, name: str) -> None:
    path = make_target(tmp_path / "target", **FEW)
    config = read_model_config(path)
    head = HEADS[name](tmp_path / "head", path)

    def load() -> None:
        aux_layers = inspect_draft(head, config).aux_layers
        load_draft(head, load_target(path, aux_layers=aux_layers, max_model_len=64, **META), **META)

    try_all(head, load)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b'{"model": {}}'),
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\n"),
        ("tokenizer.json", b"\xff\xfe\x00"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"tokenizer_class": 5}'),
        ("special_tokens_map.json", b'{"bos_token": 5}'),
        ("added_tokens.json", b'{"x": "y"}'),
        ("config.json", b"[]"),
    ],
)
def test_tokenizers(tmp_path: Path, file: str, content: bytes) -> None:
    path = make_target(tmp_path / "t", with_tokenizer=True, **FEW)
    (path / file).write_bytes(content)
    with pytest.raises(SpecgenError, match="no usable tokenizer"):
        Tokenizer(str(path))

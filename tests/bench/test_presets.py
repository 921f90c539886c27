"""Presets have the sizes of the models they are named after, and heads that fit them."""

from __future__ import annotations

from pathlib import Path

import pytest

from specgen.bench.presets import PRESETS, head_of, write_preset
from specgen.kernels import select_kernels
from specgen.models.registry import read_model_config
from specgen.models.weights import inspect_draft, load_draft, load_target

# As their authors count them.
NUM_PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "qwen3-8b": 8_190_735_360,
}


def test_every_target_has_a_head() -> None:
    assert set(PRESETS) == {*NUM_PARAMETERS, *(f"{name}-eagle3" for name in NUM_PARAMETERS)}
    assert head_of("llama-3.1-8b") == "llama-3.1-8b-eagle3"
    assert head_of("llama-3.1-8b-eagle3") is None


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_sizes(name: str, tmp_path: Path) -> None:
    directory, head = write_preset(name, tmp_path), head_of(name)
    assert head is not None
    head_directory = write_preset(head, tmp_path)
    config = read_model_config(directory)
    draft_config = inspect_draft(head_directory, config, load_format="dummy")
    assert draft_config.draft_vocab_size == 32000
    options = {
        "device": "meta",
        "dtype": "bfloat16",
        "kernels": select_kernels("cpu", "reference"),
        "load_format": "dummy",
    }
    target = load_target(directory, aux_layers=draft_config.aux_layers, **options)  # type: ignore[arg-type]
    assert sum(p.numel() for p in target.parameters()) == NUM_PARAMETERS[name]
    draft = load_draft(head_directory, target, **options)  # type: ignore[arg-type]
    assert draft.layout == "eagle3" if hasattr(draft, "layout") else draft.features == "aux"

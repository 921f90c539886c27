"""Loading must not hold a second copy of the weights in host memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from models.tiny import load_state, make_eagle3, make_target, save_shards

import specgen

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMS: dict[str, dict[str, Any]] = {
    "safetensors": {},
    "bin": {"as_bin": True},
    # As torch wrote files before 1.6, which cannot be mapped.
    "old-bin": {"as_bin": True, "_use_new_zipfile_serialization": False},
}
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4096, "head_dim": 128}
SCRIPT = """
import gc, json, sys
from pathlib import Path
import torch
from specgen.kernels import select_kernels
from specgen.models.registry import read_model_config
from specgen.models.weights import inspect_draft, load_draft, load_target

def status(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024

dtype, device, target, *head = sys.argv[1:]
options = {"device": device, "dtype": dtype, "kernels": select_kernels(device)}

def load_head():
    inspect_draft(head[0], read_model_config(target))
    return load_draft(head[0], loaded, **options)

# What the first load brings with it: libraries, and kernels that are compiled for its shapes.
if head:
    aux_layers = inspect_draft(head[0], read_model_config(target)).aux_layers
    loaded = load_target(target, aux_layers=aux_layers, **options)
    load = load_head
else:
    load = lambda: load_target(target, **options)
load()
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
model = load()
held = sum(p.numel() * p.element_size() for p in model.parameters())
on_host = held if device == "cpu" else 0
print(json.dumps({"extra": status("VmHWM") - before - on_host, "held": held}))
"""
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc"
)


def check_peak(device: str, shards: list[Path], *models: Path) -> None:
    """Load the last of `models` in a process of its own, once the others are there."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "bfloat16", device, *map(str, models)],
        env={
            "PATH": os.environ["PATH"],  # Triton's compiler looks for its linker there
            "PYTHONPATH": os.pathsep.join((str(Path(specgen.__file__).parents[1]), *sys.path)),
            "OMP_NUM_THREADS": "1",
            # Freed memory goes back at once, as that of tensors of real sizes does anyway.
            "MALLOC_MMAP_THRESHOLD_": "65536",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    sizes = [file.stat().st_size for file in shards]
    assert len(sizes) >= 3
    assert measured["held"] > max(sizes), "small enough to hide a second copy"
    assert measured["extra"] < 1.3 * max(sizes), (measured, sizes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # native, and through transformers
def test_peak_stays_below_the_largest_shard(
    tmp_path: Path, family: str, form: str, device: str
) -> None:
    path = make_target(tmp_path / "big", family, num_hidden_layers=6, **SIZES)
    check_peak(device, save_shards(path, load_state(path), **FORMS[form]), path)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("embedding", ["same", "own"])
def test_of_a_head_too(tmp_path: Path, embedding: str, form: str, device: str) -> None:
    # An embedding that is the target's stands in memory until that is known.
    target = make_target(tmp_path / "target", num_hidden_layers=3, **SIZES | {"vocab_size": 2048})
    head = make_eagle3(tmp_path / "head", target, intermediate_size=8192, store_embedding=embedding)
    check_peak(
        device, save_shards(head, load_state(head), num_shards=4, **FORMS[form]), target, head
    )

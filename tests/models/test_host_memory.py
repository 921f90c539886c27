"""Loading must not hold a second copy of the weights in host memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from models.tiny import make_target

import specgen

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SCRIPT = """
import gc, json, sys
from pathlib import Path
import torch
from specgen.kernels import select_kernels
from specgen.models.weights import load_target

def status(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024

device = sys.argv[3]
kernels = select_kernels(device)
# What the first load brings with it: libraries, and kernels that are compiled for its shapes.
load_target(sys.argv[1], device=device, dtype=sys.argv[2], kernels=kernels)
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
model = load_target(sys.argv[1], device=device, dtype=sys.argv[2], kernels=kernels)
held = sum(p.numel() * p.element_size() for p in model.parameters())
on_host = held if device == "cpu" else 0
print(json.dumps({"extra": status("VmHWM") - before - on_host, "held": held}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # native, and through transformers
def test_peak_stays_below_the_largest_shard(tmp_path: Path, family: str, device: str) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4096, "head_dim": 128}
    path = make_target(
        tmp_path / "big", family, num_hidden_layers=6, max_shard_size="50MB", **sizes
    )
    shards = [file.stat().st_size for file in path.glob("*.safetensors")]
    assert len(shards) >= 3
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), "bfloat16", device],
        env={
            "PATH": os.environ["PATH"],  # Triton's compiler looks for its linker there
            "PYTHONPATH": os.pathsep.join((str(Path(specgen.__file__).parents[1]), *sys.path)),
            "OMP_NUM_THREADS": "1",
            # Freed memory goes back at once, as that of tensors of real sizes does anyway.
            "MALLOC_MMAP_THRESHOLD_": "1000000",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["held"] > max(shards), "small enough to hide a second copy"
    assert measured["extra"] < 1.3 * max(shards), (measured, shards)

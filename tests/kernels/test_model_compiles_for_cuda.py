"""The model and batch kernels compile for a GPU: compilers refuse what interpreters let pass."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import specgen.kernels

SCRIPT = Path(__file__).with_name("compile_model_for_cuda.py")
MODULES = (
    "prefill_attention",
    "attention_parts",
    "row_attention",
    "shared_attention",
    "linear",
    "norm",
    "pairs",
    "kept_pairs",
    "rotary",
    "activation",
    "grouped",
    "batch_inputs",
    "commit",
)


def kernel_names(module: str) -> set[str]:
    """Kernels of a module, by their name: device functions are compiled as parts of them."""
    path = Path(specgen.kernels.__file__).with_name(f"{module}.py")
    functions = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
    return {
        f"specgen.kernels.{module}.{f.name}"
        for f in functions
        if f.decorator_list and f.name.endswith("_kernel")
    }


@pytest.fixture(scope="module")
def compiled() -> set[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    package = str(Path(specgen.kernels.__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([package, environment.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return set(json.loads(result.stdout))


@pytest.mark.parametrize("module", MODULES)
def test_every_kernel_compiles(compiled: set[str], module: str) -> None:
    names = kernel_names(module)
    assert names
    assert names <= compiled

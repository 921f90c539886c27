"""Kernels: one file a subject, in Triton here and in plain torch under ``reference/``.

Both sets have the same file names, function names and signatures. The torch set is the
specification, the oracle of the tests and the product's path on a CPU; the Triton set is the path
on a GPU. Callers take a :class:`Kernels` and never import a kernel module themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

KERNEL_MODULES = (
    "rng",
    "gumbel",
    "logits",
    "lane_noise",
    "rejection",
    "attention",
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


@dataclass(frozen=True)
class Kernels:
    """One full set of kernel modules; ``backend`` is ``"triton"`` or ``"reference"``."""

    backend: str
    rng: Any
    gumbel: Any
    logits: Any
    lane_noise: Any
    rejection: Any
    attention: Any
    linear: Any
    norm: Any
    pairs: Any
    kept_pairs: Any
    rotary: Any
    activation: Any
    grouped: Any
    batch_inputs: Any
    commit: Any


def select_kernels(device: torch.device | str, backend: str = "auto") -> Kernels:
    """Return the kernel set for ``device``.

    ``"auto"`` takes Triton on CUDA and the torch twins elsewhere. ``"triton"`` on a CPU works only
    in Triton's interpreter (``TRITON_INTERPRET=1``), which is what the tests use.

    Raises:
        ValueError: ``backend`` is none of ``auto``, ``triton``, ``reference``.
    """
    if backend == "auto":
        backend = "triton" if torch.device(device).type == "cuda" else "reference"
    if backend not in ("triton", "reference"):
        raise ValueError(f"kernel backend must be auto, triton or reference, got {backend!r}")
    package = "specgen.kernels" if backend == "triton" else "specgen.kernels.reference"
    modules = {name: import_module(f"{package}.{name}") for name in KERNEL_MODULES}
    return Kernels(backend=backend, **modules)

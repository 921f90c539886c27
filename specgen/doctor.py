"""What this machine offers, and whether a target and a draft fit together.

Reads configurations and headers only; no weights are loaded.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from specgen import __version__
from specgen.config import EngineConfig
from specgen.doctor_finding import Finding
from specgen.errors import EnvironmentProblem
from specgen.wording import first_line

__all__ = ["Finding", "examine", "gpu_names", "versions"]

_PACKAGES = ("torch", "triton", "transformers", "safetensors", "numpy")


def versions() -> dict[str, str | None]:
    """Versions of specgen, Python and what specgen builds on; None where it is not installed."""
    found: dict[str, str | None] = {"specgen": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def gpu_names() -> list[str]:
    """Names of the CUDA devices torch sees."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def examine(
    config: EngineConfig | None = None, lengths: Sequence[int] | None = None
) -> Iterator[Finding]:
    """Look at everything, slowest last.

    Args:
        config: what an engine would be asked for; None examines the built-in pair.
        lengths: tokens of rows whose memory is to be said; None takes usual ones.
    """
    yield from _software()
    try:
        import torch
    except Exception as error:
        yield Finding("software", "torch import", first_line(error), "problem", "reinstall torch")
        return
    yield from _machine(torch)
    yield from _kernels(torch)
    from specgen.doctor_pair import examine_pair

    yield from examine_pair(config or EngineConfig(), lengths)


def _software() -> Iterator[Finding]:
    for name, version in versions().items():
        if version is not None:
            yield Finding("software", name, version)
        elif name == "triton":
            yield Finding("software", name, "not installed", "note", "needed on a GPU only")
        else:
            yield Finding("software", name, "not installed", "problem", f"pip install {name}")


def _machine(torch: Any) -> Iterator[Finding]:
    yield Finding("machine", "system", platform.platform())
    yield Finding("machine", "CPU cores", str(_num_cores()))
    yield Finding("machine", "memory", _memory())
    yield Finding("machine", "CUDA of torch", torch.version.cuda or "none (CPU build)")
    if not torch.cuda.is_available():
        hint = "runs on the CPU, which is right for small models only"
        yield Finding("machine", "GPU", "none", "note", hint)
        return
    yield Finding("machine", "driver", _driver_version())
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield Finding(
            "machine",
            f"GPU {index}",
            f"{facts.name}, compute capability {facts.major}.{facts.minor}, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
        )
    if torch.cuda.is_bf16_supported(including_emulation=False):
        yield Finding("machine", "bfloat16", "yes")
    else:
        yield Finding("machine", "bfloat16", "no", "note", "give --dtype float16 or float32")


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> str:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return "unknown"
    return f"{total / 2**30:.1f} GiB"


def _driver_version() -> str:
    """Which CUDA the driver is for, as it says itself: not every build of torch asks it."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return "unknown"
    if failed or version.value <= 0:
        return "unknown"
    return f"for CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def _kernels(torch: Any) -> Iterator[Finding]:
    has_gpu = torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    yield Finding("kernels", "device", device)
    if not has_gpu:
        yield Finding("kernels", "backend", "reference (torch)")
        return
    from specgen.kernels.trial import try_triton

    try:
        try_triton()
    except EnvironmentProblem as problem:
        yield Finding("kernels", "triton", problem.message, "problem", problem.hint)
        return
    yield Finding("kernels", "triton", "compiles and runs")
    yield Finding("kernels", "backend", "triton")

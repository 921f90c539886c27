"""What this machine offers, and whether a target and a draft fit together.

Reads configurations and headers only; no weights are loaded.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from specgen import __version__
from specgen.errors import SpecgenError

__all__ = ["Finding", "examine", "gpu_names", "versions"]

Status = Literal["ok", "note", "problem"]
_PACKAGES = ("torch", "triton", "transformers", "safetensors", "numpy")


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact.

    Attributes:
        section: what it is about: software, machine, kernels, target, draft.
        name: what was looked at.
        value: what was found, for people.
        status: `problem` if it keeps specgen from running, `note` if it limits it.
        hint: what to do about it.
    """

    section: str
    name: str
    value: str
    status: Status = "ok"
    hint: str | None = None

    def to_dict(self) -> dict[str, str | None]:
        """All fields."""
        return asdict(self)


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


def examine(model: str | None = None, draft_model: str | None = None) -> Iterator[Finding]:
    """Look at everything, slowest last.

    Args:
        model: directory of a target; None examines the built-in pair.
        draft_model: directory of a draft for it.
    """
    yield from _software()
    try:
        import torch
    except Exception as error:
        yield Finding("software", "torch import", _first_line(error), "problem", "reinstall torch")
        return
    yield from _machine(torch)
    yield from _kernels(torch)
    yield from _pair(model, draft_model)


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
    yield Finding("machine", "driver", _driver_version(torch))
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


def _driver_version(torch: Any) -> str:
    try:
        version = torch._C._cuda_getDriverVersion()
    except (AttributeError, RuntimeError):
        return "unknown"
    return f"for CUDA {version // 1000}.{version % 1000 // 10}"


def _kernels(torch: Any) -> Iterator[Finding]:
    has_gpu = torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    yield Finding("kernels", "device", device)
    if not has_gpu:
        yield Finding("kernels", "backend", "reference (torch)")
        return
    try:
        difference = _try_triton(torch)
    except Exception as error:
        yield Finding(
            "kernels",
            "triton",
            f"does not work: {_first_line(error)}",
            "problem",
            "check the C compiler and the driver, or run with --device cpu",
        )
        return
    if difference > 1e-5:
        yield Finding("kernels", "triton", f"wrong results, off by {difference:g}", "problem")
        return
    yield Finding("kernels", "triton", "compiles and runs")
    yield Finding("kernels", "backend", "triton")


def _try_triton(torch: Any) -> float:
    """Compile and run one real kernel; the largest difference to its torch twin."""
    from specgen.kernels import select_kernels

    x = torch.randn(4, 64, device="cuda")
    weight = torch.ones(64, device="cuda")
    ours = select_kernels("cuda").norm.rms_norm(x, weight, 1e-5)
    twin = select_kernels("cuda", "reference").norm.rms_norm(x, weight, 1e-5)
    return float((ours - twin).abs().max())


def _pair(model: str | None, draft_model: str | None) -> Iterator[Finding]:
    from specgen.resolve import BUILTIN_DRAFT, BUILTIN_TARGET

    builtin = model is None
    if model is None and draft_model is None:
        present = (BUILTIN_TARGET / "config.json").is_file() and (
            BUILTIN_DRAFT / "config.json"
        ).is_file()
        if not present:
            hint = "reinstall specgen, or give --model"
            yield Finding("target", "built-in pair", "missing", "problem", hint)
            return
        yield Finding("target", "built-in pair", "present")
    directory = BUILTIN_TARGET if model is None else Path(model)
    draft = Path(draft_model) if draft_model is not None else BUILTIN_DRAFT if builtin else None

    from specgen.models.registry import read_model_config
    from specgen.models.weights import inspect_draft

    target_config, findings = _read("target", directory, lambda: read_model_config(directory))
    yield from findings
    if target_config is None or draft is None:
        return
    draft_config, findings = _read("draft", draft, lambda: inspect_draft(draft, target_config))
    yield from findings
    if draft_config is not None:
        yield Finding("draft", "fits the target", "yes")


def _read(
    section: str, directory: Path, read: Callable[[], Any]
) -> tuple[Any | None, list[Finding]]:
    try:
        config = read()
    except SpecgenError as error:
        return None, [Finding(section, str(directory), error.message, "problem", error.hint)]
    facts = [Finding(section, "directory", str(directory))]
    facts += [Finding(section, name, text) for name, text in _facts(config)]
    return config, facts


def _facts(config: Any) -> Iterator[tuple[str, str]]:
    """The fields of a frozen config, nested ones left out where they hold nothing."""
    for name, value in asdict(config).items():
        if value in (None, (), [], {}, ""):
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{k}={v}" for k, v in value.items() if v not in (None, (), ""))
        elif isinstance(value, tuple | list | frozenset):
            value = ", ".join(
                sorted(map(str, value)) if isinstance(value, frozenset) else map(str, value)
            )
        yield name, str(value)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

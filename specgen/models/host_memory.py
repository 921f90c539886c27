"""What the host's memory holds, asked before weights are put into it."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from specgen.errors import EnvironmentProblem

__all__ = ["available_memory", "refuse_what_does_not_fit"]


def available_memory() -> int:
    """Bytes of host memory that programs can still have; without an answer, all there could be."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 2**63


def refuse_what_does_not_fit(skeleton: nn.Module, name: str) -> None:
    """Check that a model's parameters fit the host's memory.

    Args:
        skeleton: the model, of tensors without memory in the dtype that it will have.
        name: of the model, for the message.

    Raises:
        EnvironmentProblem: they do not; a system would end the process without a word.
    """
    num_bytes = sum(weight.nbytes for weight in skeleton.parameters())
    available = available_memory()
    if num_bytes > available:
        raise EnvironmentProblem(
            f"{name} has {num_bytes / 2**30:.2f} GiB of weights, and {available / 2**30:.2f} GiB "
            "of memory are available",
            "use a smaller --dtype, such as bfloat16, a machine with more memory, or a GPU",
        )

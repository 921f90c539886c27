"""Whether Triton compiles and computes on this machine, tried on one small kernel.

Triton needs a C compiler and a driver at run time. Without this trial the first kernel of a run
would fail somewhere inside a model.
"""

from __future__ import annotations

import torch

from specgen.errors import EnvironmentProblem
from specgen.kernels import select_kernels
from specgen.wording import first_line

__all__ = ["try_triton"]

_TOLERANCE = 1e-5


def try_triton(device: str = "cuda") -> None:
    """Compile one kernel, run it, compare it with its torch twin.

    Raises:
        EnvironmentProblem: what came instead.
    """
    x = torch.linspace(-2.0, 3.0, 256, device=device).view(4, 64)  # no generator is touched
    weight = torch.ones(64, device=device)
    twin = select_kernels(device, "reference").norm.rms_norm(x, weight, 1e-5)
    try:
        ours = select_kernels(device, "triton").norm.rms_norm(x, weight, 1e-5)
        difference = float((ours - twin).abs().max())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers, linkers and drivers each have their own
        raise EnvironmentProblem(
            f"Triton does not work: {first_line(error)}",
            "check the C compiler, the linker and the driver, or run with --device cpu",
        ) from error
    if not difference <= _TOLERANCE:
        raise EnvironmentProblem(
            f"Triton computes wrong results, off by {difference:g}",
            "check the driver, or run with --device cpu",
        )

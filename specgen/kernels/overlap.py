"""Kernels of a pass that start while the one before them still runs.

A step is a chain of hundreds of short kernels, and between two of them a GPU would drain and fill
again. From capability 9.0 on, a kernel may be launched early (programmatic dependent launch): it
does what does not depend on the kernel before, such as fetching weights, then waits for that one's
end. Every kernel that is launched so calls :func:`enter` or :func:`wait` in all its programs, so
that "the kernel before has ended" means all earlier ones have, too.

A kernel that waits before it releases the next lets that one read, without waiting, what those
before both have written.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def release(OVERLAP: tl.constexpr):
    """Let the next kernel be launched once all programs of this one have come so far."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Wait for the end of the kernel before."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def enter(OVERLAP: tl.constexpr):
    """What a kernel starts with that reads and writes nothing before it has waited."""
    release(OVERLAP)
    wait(OVERLAP)


@triton.jit
def fetch_ahead(pointers, SIZE: tl.constexpr):
    """Begin to fetch SIZE elements behind each pointer into the L2 cache, in lines of 128 bytes."""
    LINE: tl.constexpr = 1024 // pointers.dtype.element_ty.primitive_bitwidth
    for first in tl.static_range(0, SIZE, LINE):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [pointers + first],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def overlap_options(x: Tensor) -> dict[str, bool]:
    """Launch options of a kernel that overlaps with its predecessor where x's device can do so."""
    if x.is_cuda and _can_overlap(x.device.index):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@functools.cache
def _can_overlap(device_index: int) -> bool:
    """A fact of the hardware."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device_index)[0] >= 9


def register_options(max_registers: int | None) -> dict[str, int]:
    """Launch options of a kernel whose threads are to have so many registers at most.

    Fewer registers a thread let more programs run on a multiprocessor at a time.
    """
    return {} if max_registers is None else {"maxnreg": max_registers}

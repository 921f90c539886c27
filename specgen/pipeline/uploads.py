"""Small host arrays to the device, in stream order and without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["pinned", "upload", "upload_together"]

_ALIGNMENT = 16  # bytes; kernels are compiled for pointers that have it


def pinned(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """The array as a host tensor that ``device`` can read by itself.

    CUDA copies from other memory only after the stream has come to its end: one such copy a step
    would have the device wait for the host at every step. torch hands the memory out again only
    once the copies from it are done.
    """
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" and array.size else host


def upload_together(
    arrays: Sequence[np.ndarray[Any, Any]], device: torch.device
) -> list[torch.Tensor]:
    """Arrays of one dtype in a single copy; the tensors are parts of one."""
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT // array.itemsize
    packed = np.zeros(end, dtype=arrays[0].dtype)
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.size] = array.ravel()
    on_device = upload(packed, device)
    return [
        on_device[start : start + array.size].view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def upload(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """The array on ``device``; on a CPU it may share the array's memory."""
    return pinned(array, device).to(device, non_blocking=True)

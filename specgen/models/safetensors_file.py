"""Reading safetensors files: the header alone, then one tensor at a time into memory of its own.

Files are read, not mapped: a mapping of a whole file is charged against the memory of the machine,
which refuses it for files that are larger, and nothing but one tensor need be in memory at a time.

Format: eight bytes of header length, little-endian; a JSON header of name -> dtype, shape and
offsets from the header's end; the tensors.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specgen.errors import ModelError

__all__ = ["StoredTensor", "read_header", "read_tensor", "refuse_pointer"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LONGEST_HEADER = 100_000_000
_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor stands in its file, and what it is."""

    dtype: torch.dtype | str
    """A name where torch has no such dtype, or none that is read here."""
    shape: tuple[int, ...]
    start: int
    """First byte, from the beginning of the file."""
    num_bytes: int


def refuse_pointer(file: Path) -> None:
    """Refuse what git leaves in the place of a large file that it did not fetch.

    Raises:
        ModelError: the file is such a pointer.
    """
    try:
        with open(file, "rb") as opened:
            is_pointer = opened.read(len(_POINTER)) == _POINTER
    except OSError:
        return  # whoever reads it says so
    if is_pointer:
        raise ModelError(
            f"{file}: holds a pointer of git-lfs, not the weights",
            hint="fetch them: git lfs pull in the repository, or hf download",
        )


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of a file, by name; its values are not touched.

    Raises:
        ModelError: the file cannot be read, or is cut short or damaged.
    """
    refuse_pointer(file)
    try:
        return _parse(file)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        reason = str(error) if isinstance(error, ValueError | OSError) else "damaged header"
        raise ModelError(
            f"{file}: not a complete safetensors file: {reason}",
            hint="the download was cut short or the file is damaged: fetch it again",
        ) from error


def read_tensor(file: Path, stored: StoredTensor) -> torch.Tensor:
    """The values of one tensor, on the CPU.

    Raises:
        ModelError: the file cannot be read, or its dtype cannot.
    """
    if isinstance(stored.dtype, str):
        raise ModelError(f"{file}: tensors of type {stored.dtype} are not supported")
    values = torch.empty(stored.num_bytes, dtype=torch.uint8)
    view = values.numpy().data
    try:
        with open(file, "rb", buffering=0) as opened:
            opened.seek(stored.start)
            done = 0
            while done < stored.num_bytes:
                count = opened.readinto(view[done:])
                if not count:
                    raise OSError("it ends before its last tensor")
                done += count
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error
    return values.view(stored.dtype).reshape(stored.shape)


def _parse(file: Path) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise ValueError(f"{size} bytes do not hold a header of {length}")
        header = json.loads(opened.read(length))
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensors[name] = _entry(name, entry, 8 + length, size)
    return tensors


def _entry(name: str, entry: dict[str, Any], base: int, size: int) -> StoredTensor:
    shape = tuple(int(n) for n in entry["shape"])
    start, end = (int(offset) for offset in entry["data_offsets"])
    dtype = _DTYPES.get(entry["dtype"], str(entry["dtype"]))
    if not 0 <= start <= end or base + end > size:
        raise ValueError(f'tensor "{name}" ends at byte {base + end} of {size}')
    if isinstance(dtype, torch.dtype) and math.prod(shape) * dtype.itemsize != end - start:
        raise ValueError(f'tensor "{name}" of shape {list(shape)} has {end - start} bytes')
    return StoredTensor(dtype, shape, base + start, end - start)

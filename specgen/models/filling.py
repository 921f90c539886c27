"""Filling parameters from a checkpoint, strictly.

Strict means that every tensor of the checkpoint is used, every parameter is filled, and every shape
fits, all of it checked from the file headers before any weight is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from specgen.errors import ModelError
from specgen.models.checkpoint import Checkpoint, TensorInfo

__all__ = [
    "FLOATS",
    "check_narrowed",
    "check_shape",
    "check_tensors",
    "copy_converted",
    "fill_tensors",
    "named_dtype",
    "refuse_quantized",
]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Rope frequencies that old checkpoints store; they follow from the configuration.
_DERIVED_SUFFIX = "rotary_emb.inv_freq"
_ELEMENTS_AT_ONCE = 1 << 20
# What GPTQ, AWQ, FP8, compressed-tensors, bitsandbytes and MLX store beside or instead of weights.
_QUANTIZED_SUFFIXES = (
    ".SCB",
    ".absmax",
    ".biases",
    ".g_idx",
    ".input_scale",
    ".qweight",
    ".qzeros",
    ".quant_map",
    ".scales",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_zero_point",
)


def named_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """The dtype of a name such as ``"bfloat16"``."""
    resolved = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert isinstance(resolved, torch.dtype), dtype
    return resolved


def check_tensors(
    slots: Mapping[str, torch.Tensor], checkpoint: Checkpoint, spare: set[str]
) -> None:
    """Compare names, shapes and dtypes of the whole checkpoint with what is to be filled.

    Args:
        slots: checkpoint name -> the tensor to copy into.
        checkpoint: its headers are looked at.
        spare: names that may stand there besides.

    Raises:
        ModelError: a tensor is missing, left over, of another shape, or quantized.
    """
    tensors = checkpoint.tensors
    missing = [name for name in slots if name not in tensors]
    extra = [
        name
        for name in tensors
        if name not in slots and name not in spare and not name.endswith(_DERIVED_SUFFIX)
    ]
    refuse_quantized(checkpoint.path, extra)
    if missing:
        hint = "the checkpoint is incomplete, or its config.json is of another model"
        if extra:
            hint += f"; it holds {_listed(extra)} instead"
        raise ModelError(f"{checkpoint.path}: tensor {_listed(missing)} is missing", hint=hint)
    if extra:
        raise ModelError(
            f"{tensors[extra[0]].file}: tensor {_listed(extra)} is not part of the model that "
            "config.json describes",
            hint="a tensor left unused changes what the model computes: check config.json",
        )
    for name, slot in slots.items():
        check_shape(name, tensors[name], tuple(slot.shape))


def refuse_quantized(path: Path, names: Iterable[str]) -> None:
    """Name a quantized checkpoint whose configuration does not say so.

    Args:
        path: its directory.
        names: tensors that the model has no use for.

    Raises:
        ModelError: one of them is a part of quantized weights.
    """
    name = next((name for name in names if name.endswith(_QUANTIZED_SUFFIXES)), None)
    if name is not None:
        raise ModelError(
            f'{path}: tensor "{name}" belongs to quantized weights, which are not supported',
            hint="use the unquantized checkpoint (float32, bfloat16 or float16)",
        )


def check_shape(name: str, info: TensorInfo, shape: tuple[int, ...]) -> None:
    """Compare one stored tensor with the shape it must have.

    Raises:
        ModelError: another shape, or no float type.
    """
    if info.shape != shape:
        raise ModelError(
            f'{info.file}: tensor "{name}" has shape {list(info.shape)}, expected {list(shape)}',
            hint="config.json and weights are of different models",
        )
    if info.dtype not in FLOATS:
        raise ModelError(
            f'{info.file}: tensor "{name}" has dtype {info.dtype}, expected a float type',
            hint="quantized weights are not supported",
        )


def fill_tensors(slots: Mapping[str, torch.Tensor], checkpoint: Checkpoint) -> None:
    """Copy the checkpoint's tensors into their slots, one at a time.

    Raises:
        ModelError: a value does not fit float16.
    """
    for name, tensor in checkpoint.stream(set(slots)):
        copy_converted(slots[name], tensor)
        check_narrowed(f'{checkpoint.tensors[name].file}: tensor "{name}"', tensor, slots[name])
        del tensor  # not to be held while the next file is read


def copy_converted(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into a tensor that may be elsewhere and of another dtype, without a second copy.

    On its way to a GPU torch converts a tensor as a whole, and on the host: in parts, that costs
    next to nothing.

    Args:
        target: any shape, dtype and device.
        source: of that shape.
    """
    if source.dim() == 0 or source.dtype == target.dtype:
        target.copy_(source)
        return
    num_rows = max(1, _ELEMENTS_AT_ONCE // max(1, source[:1].numel()))
    for target_rows, rows in zip(target.split(num_rows), source.split(num_rows), strict=True):
        target_rows.copy_(rows)


def check_narrowed(what: str, stored: torch.Tensor, narrowed: torch.Tensor) -> None:
    """Compare a tensor with its copy in another dtype, which may be too narrow for its values.

    Raises:
        ModelError: a finite value became infinite; it begins with ``what``.
    """
    if narrowed.dtype != torch.float16 or stored.dtype == torch.float16:
        return
    if not torch.isfinite(narrowed).all() and torch.isfinite(stored).all():
        raise ModelError(
            f"{what} has values beyond float16", hint="use --dtype bfloat16 or float32"
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(f'"{name}"' for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} (and {len(names) - 3} more)"

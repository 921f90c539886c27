"""Filling a model of transformers from a checkpoint, one tensor at a time.

transformers itself renames, fuses and splits what a checkpoint stores, as each of its classes
needs it. It is handed tensors that are read when it asks for their values, and that go straight to
the device, so that host memory never holds more than one of them.
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any

import torch

from specgen.errors import ModelError
from specgen.models.checkpoint import Checkpoint
from specgen.models.filling import FLOATS, check_narrowed, copy_converted, refuse_quantized

__all__ = ["fill_from_checkpoint"]


class _Reader:
    """Reads tensors of a checkpoint to a device, whoever asks one after the other."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._lock = Lock()  # transformers asks from several threads

    def read(self, name: str, dtype: torch.dtype | None) -> torch.Tensor:
        info = self._checkpoint.tensors[name]
        if info.dtype not in FLOATS and (dtype is None or dtype.is_floating_point):
            raise ModelError(
                f'{info.file}: tensor "{name}" has dtype {info.dtype}, expected a float type',
                hint="quantized weights are not supported",
            )
        if self._device.type == "meta":
            return torch.empty(info.shape, dtype=dtype or torch.float32, device="meta")
        with self._lock:
            stored = self._checkpoint.load(name)
            # A pickle's tensors are pages of its file: those are not to be the model's.
            if info.file.suffix == ".safetensors" and self._device.type == "cpu":
                tensor = stored.to(dtype=dtype)
            else:
                tensor = torch.empty_like(stored, dtype=dtype, device=self._device)
                copy_converted(tensor, stored)
            check_narrowed(f'{info.file}: tensor "{name}"', stored, tensor)
            del stored  # before the next thread reads
        return tensor


class _StoredTensor:
    """What transformers takes for a tensor of a state dict: sliced whole, then moved."""

    def __init__(self, reader: _Reader, name: str) -> None:
        self._reader, self._name = reader, name

    def __getitem__(self, index: Any) -> _StoredTensor:
        assert index is Ellipsis, index
        return self

    def to(self, *, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values, in ``dtype``, on the reader's device: transformers means the host's."""
        del device
        return self._reader.read(self._name, dtype)


def fill_from_checkpoint(
    model_class: Any,
    config: Any,
    path: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    attn_implementation: str,
) -> Any:
    """A model of a class of transformers, with a checkpoint's weights on a device, strictly.

    Args:
        model_class: the class, with a lm_head.
        config: its configuration object.
        path: directory of the checkpoint.
        device: where the weights go; on ``"meta"`` names and shapes are compared, and none is read.
        dtype: of the parameters.
        attn_implementation: name of the attention function.

    Raises:
        ModelError: a tensor is missing, left over or of another shape or kind, or the files are
            damaged.
    """
    checkpoint = Checkpoint.open(path)
    reader = _Reader(checkpoint, torch.device(device))
    try:
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict={name: _StoredTensor(reader, name) for name in checkpoint.tensors},
            dtype=dtype,
            attn_implementation=attn_implementation,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, and an error below
        )
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # anything at all comes out of a configuration that is amiss
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
        raise ModelError(f"{path}: transformers cannot load it: {reason}") from error
    _check_report(path, report)
    return model


def _check_report(path: str | Path, report: dict[str, Any]) -> None:
    refuse_quantized(Path(path), sorted(report.get("unexpected_keys") or ()))
    mismatched = sorted(report.get("mismatched_keys") or ())
    if mismatched:
        name, stored, expected = mismatched[0]
        more = f" (and {len(mismatched) - 1} more)" if len(mismatched) > 1 else ""
        raise ModelError(
            f'{path}: tensor "{name}" has shape {list(stored)}, expected {list(expected)}{more}',
            hint="config.json and weights are of different models",
        )
    for kind, hint in (
        ("missing", "the checkpoint is incomplete, or its config.json is of another model"),
        ("unexpected", "a tensor left unused changes what the model computes: check config.json"),
    ):
        names = sorted(report.get(f"{kind}_keys") or ())
        if names:
            shown = ", ".join(f'"{name}"' for name in names[:3])
            raise ModelError(f"{path}: {len(names)} {kind} tensors: {shown}", hint=hint)

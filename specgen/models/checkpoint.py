"""Reading the tensor files of a checkpoint directory, one tensor at a time.

Known files: ``model.safetensors``, sharded with ``model.safetensors.index.json`` or single, else
``pytorch_model.bin``, likewise. Pickles are read with ``weights_only=True``: a file that wants to
run code is refused.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specgen.errors import ModelError
from specgen.models.safetensors_file import (
    StoredTensor,
    read_header,
    read_tensor,
    refuse_pointer,
)
from specgen.wording import first_line

__all__ = ["Checkpoint", "TensorInfo"]

_NOT_FLAT = (
    "weights are tensors by name, without anything around or beside them: of a checkpoint of "
    "training, store the model's state dictionary alone"
)


@dataclass(frozen=True)
class TensorInfo:
    """What a file says of one tensor, without its values."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    """A name where torch has no such dtype, or the safetensors file uses one unknown here."""
    stored: StoredTensor | None = None
    """Where it stands in a safetensors file."""


class Checkpoint:
    """The tensors of one directory: their headers at once, their values on demand."""

    def __init__(self, path: Path, tensors: dict[str, TensorInfo]) -> None:
        self.path = path
        self.tensors = tensors
        self._opened: tuple[Path, dict[str, torch.Tensor]] | None = None

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read the headers of every file.

        Raises:
            ModelError: no weight file, a missing shard, a damaged file, an index that disagrees
                with its shards, or a pickle that holds more than tensors.
        """
        directory = Path(path)
        tensors: dict[str, TensorInfo] = {}
        for file in _find_files(directory):
            for name, info in _read_headers(file).items():
                if name in tensors:
                    raise ModelError(
                        f'{file}: tensor "{name}" is also in {tensors[name].file.name}',
                        hint="remove the shard that is left over from another download",
                    )
                tensors[name] = info
        _check_index(directory, tensors)
        return cls(directory, tensors)

    def load(self, name: str) -> torch.Tensor:
        """One tensor on the CPU."""
        ((_, tensor),) = self.stream({name})
        return tensor

    def stream(self, names: set[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors file by file; of safetensors one at a time is in memory, of pickles one file."""
        wanted = set(self.tensors) if names is None else names
        files = dict.fromkeys(info.file for name, info in self.tensors.items() if name in wanted)
        for file in files:
            mine = [n for n, info in self.tensors.items() if info.file == file and n in wanted]
            if file.suffix == ".safetensors":
                for name in mine:
                    stored = self.tensors[name].stored
                    assert stored is not None, name
                    yield name, read_tensor(file, stored)
            else:
                for name in mine:
                    yield name, self._state(file)[name]

    def close(self) -> None:
        """Let go of a pickle's memory; what is asked for later is read again."""
        self._opened = None

    def _state(self, file: Path) -> dict[str, torch.Tensor]:
        """The tensors of a pickle, of which one is held; a caller that keeps them holds two."""
        if self._opened is None or self._opened[0] != file:
            self._opened = None  # the last one, before the next is read
            self._opened = (file, _load_pickle(file))
        return self._opened[1]


def _find_files(directory: Path) -> list[Path]:
    for stem, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (directory / index).is_file():
            shards = sorted(set(_read_weight_map(directory / index).values()))
            for shard in shards:
                if Path(shard).name != shard:
                    raise ModelError(
                        f'{directory / index}: shard name "{shard}" is not a plain name'
                    )
                if not (directory / shard).is_file():
                    raise ModelError(
                        f"{directory / shard}: missing, but {index} lists it",
                        hint="the download is incomplete: fetch the missing shard",
                    )
            return [directory / shard for shard in shards]
        if (directory / stem).is_file():
            return [directory / stem]
    raise ModelError(
        f"{directory}: no weight file",
        hint="looked for model.safetensors and pytorch_model.bin, single and sharded; "
        "--load-format dummy needs none",
    )


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        good = all(isinstance(name, str) for name in weight_map.values()) and len(weight_map) > 0
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ModelError(f'{index}: no usable "weight_map": {error!r}') from error
    if not good:
        raise ModelError(f'{index}: "weight_map" must map tensor names to file names')
    return dict(weight_map)


def _check_index(directory: Path, tensors: dict[str, TensorInfo]) -> None:
    """Every tensor of the index in use stands in the shard that the index names."""
    files = {info.file.suffix for info in tensors.values()}
    stem = "model.safetensors" if files == {".safetensors"} else "pytorch_model.bin"
    index = directory / f"{stem}.index.json"
    if not index.is_file():
        return
    for name, shard in _read_weight_map(index).items():
        if name not in tensors or tensors[name].file.name != shard:
            raise ModelError(
                f'{directory / shard}: tensor "{name}" is missing, but {index.name} has it there',
                hint="index and shards are of different downloads: fetch the checkpoint again",
            )


def _read_headers(file: Path) -> dict[str, TensorInfo]:
    if file.suffix != ".safetensors":
        return {
            name: TensorInfo(file, tuple(tensor.shape), tensor.dtype)
            for name, tensor in _load_pickle(file).items()
        }
    return {
        name: TensorInfo(file, stored.shape, stored.dtype, stored)
        for name, stored in read_header(file).items()
    }


def _load_pickle(file: Path) -> dict[str, torch.Tensor]:
    refuse_pointer(file)
    try:
        if file.stat().st_size == 0:
            raise EOFError("it is empty")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of how old a file is: nothing that a user can act on
            state = _unpickle(file)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{file}: refused or damaged, nothing but tensors is read from a pickle: "
            f"{_why_refused(error)}",
            hint="fetch it again, or convert it to safetensors on a machine that trusts it",
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes are opcodes too, and anything at all comes of them
        raise ModelError(
            f"{file}: not a complete PyTorch file: {first_line(error)}",
            hint="the download was cut short or the file is damaged: fetch it again",
        ) from error
    if not isinstance(state, dict):
        raise ModelError(
            f"{file}: holds a {type(state).__name__}, not a dictionary of tensors", _NOT_FLAT
        )
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ModelError(
                f'{file}: entry "{name}" is a {type(value).__name__}, not a tensor', _NOT_FLAT
            )
        if value.is_meta or value.layout != torch.strided:
            kind = "without values" if value.is_meta else f"of layout {value.layout}"
            raise ModelError(
                f'{file}: entry "{name}" is a tensor {kind}: not supported',
                "store the values as plain tensors, in safetensors for instance",
            )
    # Parameters were saved as such where somebody stored a model's own, not its state.
    return {name: value.detach() for name, value in state.items()}


def _unpickle(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        # Files of torch before 1.6 cannot be mapped.
        return torch.load(file, map_location="cpu", weights_only=True)


def _why_refused(error: pickle.UnpicklingError) -> str:
    """The part of torch's text that is about the file; the rest is how to run its code."""
    text = " ".join(str(error).split())
    found = re.search(r"GLOBAL ([\w.]+)", text)
    return "not a pickle of tensors" if found is None else f"it asks for {found[1]}"

"""Copies of far weight files that hold their headers, and holes where the tensors would be.

A copy opens like the file itself; only the values of large tensors are missing, and read as zeros.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specgen.errors import ModelError
from specgen.models.safetensors_file import read_header

__all__ = ["SparseCopy", "copy_headers"]

_FIRST_BYTES = 1 << 18
_MAPS = ("d2t", "t2d", "token_map")
# Entries of a zip archive up to this size come whole: the pickle, and vocabulary maps.
_SMALL = 1 << 20
# A local header with its name and the padding that aligns what follows.
_LOCAL_HEADER = 512


class SparseCopy(io.RawIOBase):
    """A far file as a file object: what is read of it is fetched, and kept at its place.

    Args:
        path: the copy, made as long as the original.
        size: bytes of the original.
        fetch: bytes ``first .. last`` of the original.
    """

    def __init__(self, path: Path, size: int, fetch: Callable[[int, int], bytes]) -> None:
        super().__init__()
        self.path = path
        self.size = size
        self._fetch = fetch
        self._position = 0
        self._file = open(path, "wb")  # noqa: SIM115 - closed with this object
        self._file.truncate(size)

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As for any file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fetch what fits ``buffer``, or what is left of the file."""
        count = min(len(buffer), self.size - self._position)
        if count <= 0:
            return 0
        data = self._fetch(self._position, self._position + count - 1)[:count]
        self._file.seek(self._position)
        self._file.write(data)
        self._file.flush()
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        """Close the copy."""
        self._file.close()
        super().close()


def copy_headers(path: Path, size: int, fetch: Callable[[int, int], bytes]) -> None:
    """Make a copy that shows names, shapes and dtypes, and the values of vocabulary maps.

    Args:
        path: the copy; its suffix says which format it has.
        size: bytes of the original.
        fetch: bytes ``first .. last`` of the original.

    Raises:
        ModelError: not a whole safetensors file, or a pickle of torch before 1.6, which has no
            table of contents.
    """
    with SparseCopy(path, size, fetch) as copy:
        if path.suffix == ".safetensors":
            _copy_safetensors(copy)
        else:
            _copy_zip(copy)


def _copy_safetensors(copy: SparseCopy) -> None:
    head = copy.read(_FIRST_BYTES) or b""
    missing = 8 + int.from_bytes(head[:8], "little") - len(head)
    if 0 < missing <= copy.size - len(head):
        copy.read(missing)
    for name, stored in read_header(copy.path).items():
        if name in _MAPS:
            copy.seek(stored.start)
            copy.read(stored.num_bytes)


def _copy_zip(copy: SparseCopy) -> None:
    try:
        with zipfile.ZipFile(copy) as archive:
            entries = archive.infolist()
    except zipfile.BadZipFile as error:
        raise ModelError(
            f"{copy.path.name}: has no table of contents that could be read alone: {error}",
            "fetch it first (hf download), or examine a directory",
        ) from error
    for entry in entries:
        copy.seek(entry.header_offset)
        copy.read(_LOCAL_HEADER + (entry.file_size if entry.file_size <= _SMALL else 0))

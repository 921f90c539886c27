"""Small files that are there whole or not at all, locks, and renames that outlast a crash."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specgen.request_io.place import beside
from specgen.wording import legible

__all__ = ["lock", "read_json", "sync_directory", "what_is_wrong", "write_json"]


def lock(fd: int) -> None:
    """Take the file for this process, where the file system knows locks.

    Raises:
        BlockingIOError: another process has it.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def what_is_wrong(path: Path) -> str:
    """Of a file that `read_json` does not take."""
    return f"{path.name} is {'damaged' if path.exists() else 'missing'}"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Put an object in place as readable JSON; names of files may be no UTF-8, this is."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    _write_file(path, legible(text).encode())


def _write_file(path: Path, data: bytes) -> None:
    """Put a small file in place whole, or not at all."""
    scratch = beside(path, ".tmp")
    try:
        with open(scratch, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(scratch, path)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise


def sync_directory(directory: Path) -> None:
    """Make a rename durable, where the file system can."""
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

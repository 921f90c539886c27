"""Where an output lies, what stands beside it, and what must not be there already."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from specgen.errors import OutputError, UsageError
from specgen.request_io.lines import write_failed

__all__ = ["Stream", "beside", "check_apart", "files_of", "find_place", "is_written_for"]

_FD_PATH = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
_COMPRESSED = (".gz", ".zst")
# All that a run or a merge writes, moves or removes beside its output.
_SUFFIXES = (
    ".partial",
    ".partial.meta.json",
    ".partial.meta.json.tmp",
    ".meta.json",
    ".meta.json.tmp",
    ".sorted",
    ".rescued",
    ".merging",
)


@dataclass(frozen=True, slots=True)
class Stream:
    """An output that is no regular file: nothing stands beside it, and it is written directly.

    Attributes:
        path: name for messages; None is standard output.
        fd: descriptor to write to; None is that of standard output.
        owned: whether the descriptor was opened for this output, and is to be closed.
    """

    path: str | None
    fd: int | None = None
    owned: bool = False


def beside(target: Path, suffix: str) -> Path:
    """The file next to an output that carries its name and a suffix."""
    return target.with_name(target.name + suffix)


def files_of(target: Path) -> tuple[Path, ...]:
    """The output's file and all that are written beside it, now and then."""
    return (target, *(beside(target, suffix) for suffix in _SUFFIXES))


def find_place(path: str | None) -> Path | Stream:
    """What an `-o` argument means: a regular file, there or to be made, or a stream, opened.

    Args:
        path: as given; None and `-` are standard output. Symbolic links are resolved.

    Raises:
        OutputError: it is a directory, or one stands where a file beside it will be written, or it
            cannot be opened.
        UsageError: its name promises compression, which outputs do not have.
    """
    if path in (None, "-", "/dev/stdout"):
        return Stream(None)
    assert path is not None
    if found := _FD_PATH.fullmatch(path):
        return Stream(path, int(found.group(1)))
    try:
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode if target.exists() else None
        if not path or path.endswith(os.sep) or (mode is not None and stat.S_ISDIR(mode)):
            raise OutputError(f"{path or '(empty)'}: is a directory", "give a file name")
        if mode is not None and not stat.S_ISREG(mode):
            return Stream(path, os.open(target, os.O_WRONLY), owned=True)
        if mode is None and target.suffix in _COMPRESSED:
            raise UsageError(
                f"{path}: outputs are not compressed", f"choose {path.removesuffix(target.suffix)}"
            )
        for file in files_of(target):
            if file.is_dir():  # better now than when all rows are done
                raise OutputError(
                    f"{path}: needs the name {file}, and that is a directory", "choose another -o"
                )
    except (OSError, ValueError) as error:
        raise write_failed(path, "cannot be created", error) from error
    return target


def is_written_for(path: str, target: Path) -> bool:
    """Whether a path is the output, or a file that is written, moved or removed beside it."""
    resolved = Path(os.path.realpath(path))
    for file in files_of(target):
        if resolved == file:
            return True
        try:
            if os.path.samefile(resolved, file):  # by a hard link, or in other letters
                return True
        except (OSError, ValueError):  # one of them does not exist
            continue
    return False


def check_apart(path: str, target: Path, others: Iterable[str], what: str) -> None:
    """Refuse an output that would be written over what is still needed.

    Args:
        path: of the output, for messages.
        target: of the output, resolved.
        others: paths of what is needed.
        what: they are, in a sentence that begins with their name: `is an input of this run`.

    Raises:
        UsageError: the output, or a file beside it, is one of them.
    """
    for other in others:
        if not is_written_for(other, target):
            continue
        here = os.path.realpath(other) == str(target)
        message = f"{path}: {what}" if here else f"{other}: {what}, and {path} would overwrite it"
        raise UsageError(message, "choose another -o")

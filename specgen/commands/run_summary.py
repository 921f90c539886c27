"""The file of `specgen run --summary`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from specgen.commands.run_options import RunOptions
from specgen.errors import OutputError, UsageError


def check_summary(options: RunOptions) -> None:
    """Find out now, not after hours, that the summary cannot be written."""
    if options.summary is None:
        return
    if options.summary == "-":
        raise UsageError(
            "--summary -: must be a file", "--progress json reports the figures on standard error"
        )
    path = Path(options.summary)
    _check_summary_apart(options, options.summary)
    try:
        existed = path.exists()
        with open(path, "a", encoding="utf-8"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise OutputError(f"--summary {path}: cannot be written: {error.strerror}") from error


def _check_summary_apart(options: RunOptions, summary: str) -> None:
    """Refuse a summary that would be written over an input, the output or a file beside it."""
    from specgen.request_io.place import is_written_for

    apart = not any(os.path.realpath(path) == os.path.realpath(summary) for path in options.inputs)
    if apart and options.output not in (None, "-"):
        assert options.output is not None
        apart = not is_written_for(summary, Path(os.path.realpath(options.output)))
    if not apart:
        raise UsageError(
            f"--summary {summary}: is an input or the output of this run, or a file beside it",
            "choose another name",
        )


def write_summary(options: RunOptions, summary: dict[str, Any], *, complete: bool) -> None:
    """Write the figures of a run, if asked to; OutputError where they cannot be written."""
    if options.summary is None:
        return
    content = {"complete": complete, **summary}
    try:
        with open(options.summary, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
    except OSError as error:
        raise OutputError(f"{options.summary}: cannot be written: {error.strerror}") from error

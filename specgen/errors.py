"""Every problem specgen reports, with the exit code of the process it ends.

Two kinds exist. A `SpecgenError` ends the run: it carries a message, an optional hint for what to
do next, and the exit code of the command line. A `RequestError` belongs to one input line: it
becomes that line's error row and the run goes on.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

__all__ = [
    "EnvironmentProblem",
    "ExitCode",
    "InputError",
    "ModelError",
    "OutputError",
    "RequestError",
    "SpecgenError",
    "UsageError",
]


class ExitCode(IntEnum):
    """Exit codes of the command line; scripts branch on them, so they never change meaning."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    FAILED_ROWS = 3
    INPUT = 4
    ENVIRONMENT = 5
    OUTPUT = 6
    INTERRUPTED = 130
    CLOSED_PIPE = 141
    TERMINATED = 143


class SpecgenError(Exception):
    """A problem that ends the run.

    Args:
        message: what is wrong, naming file, line, field and value where they are known.
        hint: what to do about it, printed on a line of its own.
    """

    exit_code: ClassVar[int] = ExitCode.INTERNAL

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.reported = False
        """Whether whoever follows the run has been told already."""

    def __str__(self) -> str:
        """The message, and the hint on a line of its own."""
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"

    def __reduce__(self) -> tuple[type[SpecgenError], tuple[str, str | None]]:
        """Pickle by the constructor's arguments; the default would drop the hint."""
        return type(self), (self.message, self.hint)


class UsageError(SpecgenError):
    """Flags or arguments that make no sense, alone or together."""

    exit_code = ExitCode.USAGE


class InputError(SpecgenError):
    """An input that cannot be read at all (a bad line is a `RequestError` instead)."""

    exit_code = ExitCode.INPUT


class ModelError(SpecgenError):
    """A checkpoint that is missing, incomplete, unsupported, or does not fit its partner."""

    exit_code = ExitCode.ENVIRONMENT


class EnvironmentProblem(SpecgenError):  # noqa: N818 - EnvironmentError is a builtin
    """A machine that lacks what was asked for: no GPU, too little memory, an old library."""

    exit_code = ExitCode.ENVIRONMENT


class OutputError(SpecgenError):
    """An output that cannot be written."""

    exit_code = ExitCode.OUTPUT


class RequestError(Exception):
    """One bad row. It becomes an error row of the output and never ends the run.

    Args:
        code: a short stable word for programs, such as `invalid_value` or `prompt_too_long`.
        message: what is wrong, for people, naming the field and the value.
        line: line number in the input file, from 1; None for a prompt that came from no file.
    """

    def __init__(self, code: str, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.line = line

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str, int | None]]:
        """Pickle by the constructor's arguments; the default would call it with the message."""
        return type(self), (self.code, self.message, self.line)

    def to_dict(self) -> dict[str, str | int | None]:
        """The `error` object of an output line."""
        return {"code": self.code, "message": self.message, "line": self.line}

"""The command line: parse, call, and turn every problem into a message and an exit code.

Nothing here, nor in the modules of `specgen.commands` at import time, imports torch: `--help` and
usage errors answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from specgen import __version__
from specgen.commands.bench import bench
from specgen.commands.doctor import doctor
from specgen.commands.merge import merge
from specgen.commands.run import run
from specgen.commands.stats import stats
from specgen.commands.validate import validate
from specgen.errors import ExitCode, OutputError, SpecgenError
from specgen.interrupts import Interrupts, StopRun

__all__ = ["cli"]


class _Cli(click.Group):
    """A group that maps every way to fail to the exit codes of `specgen.errors`."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and exit."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        _let_stdout_take_all_text()
        # Commands that can be taken up again say how.
        extra["obj"] = tuple(sys.argv[1:] if args is None else args)
        try:
            # Folders and files that a command has made for itself go when it is stopped, too.
            with Interrupts():
                result = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
                _flush_stdout()
            code = result if isinstance(result, int) else ExitCode.OK
        except click.ClickException as error:
            error.show()
            code = error.exit_code
        except click.Abort:
            code = ExitCode.INTERRUPTED
        except StopRun as stop:
            with contextlib.suppress(OSError, ValueError):
                click.echo("stopped before the end", err=True)
            code = stop.exit_code
        except SpecgenError as error:
            if not error.reported:
                _print_error(error.message, error.hint)
            code = error.exit_code
        except SystemExit as stop:
            # Without standalone mode click exits by itself only for shell completion (0) and with
            # a 1 of its own when standard output has been closed.
            if stop.code != 1:
                raise
            code = ExitCode.CLOSED_PIPE
        except BrokenPipeError:
            code = ExitCode.CLOSED_PIPE
        except MemoryError:
            _print_error("out of memory", "give a smaller --max-num-seqs or --max-model-len")
            code = ExitCode.ENVIRONMENT
        except Exception as error:
            code = _unexpected(error)
        _settle_streams()
        sys.exit(int(code))


def _unexpected(error: Exception) -> int:
    # torch is not imported here; its out-of-memory error is known by name.
    if type(error).__name__ == "OutOfMemoryError":
        _print_error(
            f"out of GPU memory: {str(error).strip().splitlines()[0]}",
            "give a smaller --max-num-seqs, --max-model-len or --gpu-memory-utilization",
        )
        return ExitCode.ENVIRONMENT
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        # Files of the run report by themselves; what is left is what a command prints.
        _print_error(f"cannot write: {error.strerror}", "free some space")
        return ExitCode.OUTPUT
    traceback.print_exc()
    _print_error(f"internal error: {type(error).__name__}: {error}", "please report it")
    return ExitCode.INTERNAL


def _print_error(message: str, hint: str | None) -> None:
    with contextlib.suppress(OSError, ValueError):
        click.echo(f"error: {message}", err=True)
        if hint is not None:
            click.echo(f"hint: {hint}", err=True)


def _let_stdout_take_all_text() -> None:
    """Names and ids may hold letters that its encoding has not; rows are written as bytes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _flush_stdout() -> None:
    """Write out what a command printed, while a failure can still be reported."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"<stdout>: cannot be written: {error.strerror}") from error


def _settle_streams() -> None:
    """Let go of streams that cannot be written, or Python's own flush at exit changes the code."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="specgen")
def cli() -> None:
    """Generate completions for files of prompts, with speculative decoding and its statistics."""


cli.add_command(run)
cli.add_command(validate)
cli.add_command(stats)
cli.add_command(merge)
cli.add_command(doctor)
cli.add_command(bench)

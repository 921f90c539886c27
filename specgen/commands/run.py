"""`specgen run`: prompts in, completions and their statistics out."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from specgen.commands.flags import (
    DATA,
    DRAFT,
    JOB,
    MODEL,
    SAMPLING,
    TOKENIZER,
    with_options,
)
from specgen.commands.run_options import RunOptions, sampling_of
from specgen.commands.run_summary import check_summary, write_summary
from specgen.commands.run_warnings import warn_after, warn_before
from specgen.errors import ExitCode, SpecgenError, UsageError
from specgen.interrupts import Interrupts, StopRun
from specgen.wording import counted, legible

if TYPE_CHECKING:
    from specgen.display import Display
    from specgen.job import Job
    from specgen.pipeline.engine import Engine
    from specgen.pipeline.request import RequestOutput
    from specgen.request_io.writer import RowWriter
    from specgen.sampling_params import SamplingParams

__all__ = ["run"]


_NOTHING_DONE = "no row was finished in this run: to go on, give the same command again"


@click.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@with_options(TOKENIZER, MODEL, DRAFT, SAMPLING, DATA, JOB)
def run(inputs: tuple[str, ...], **flags: Any) -> int:
    """Generate a completion for each prompt line of INPUT (JSONL, gzip, zstd; - is stdin).

    A run with -o that was stopped, killed or cut off goes on when the same command is given again.

    Exit codes: 0 all rows ok, 1 a fault of specgen, 2 usage, 3 some rows failed, 4 input, 5 model
    or machine, 6 output, 129, 130 and 143 stopped (143 by the time limit too), 141 closed pipe.
    """
    limit = flags.pop("time_limit")
    deadline = None if limit is None else time.monotonic() + limit
    options = RunOptions.from_flags(inputs, flags, _command_to_go_on())
    try:
        with Interrupts(on_leave=_restore_cursor, deadline=deadline) as interrupts:
            return _run(options, interrupts)
    except StopRun as stop:
        # So early that there was no output yet, or nobody to tell of it.
        click.echo(f"{_reason(stop)}; {_NOTHING_DONE}", err=True)
        return stop.exit_code


def _command_to_go_on() -> str:
    root = click.get_current_context().find_root()
    words = [word for word in root.obj or () if word != "--overwrite"]
    return shlex.join([*(root.info_name or "specgen").split(), *words])


def _restore_cursor() -> None:
    # The live display hides it, and a process that leaves at once cannot put it back properly.
    if sys.stderr is not None and sys.stderr.isatty():
        os.write(sys.stderr.fileno(), b"\x1b[?25h\n")


def _run(options: RunOptions, interrupts: Interrupts) -> int:
    from specgen.display import create_display

    display = create_display(options.progress, quiet=options.quiet)
    try:
        return _run_job(options, interrupts, display)
    except SpecgenError as error:
        error.reported = display.error(error.message, error.hint, error.exit_code)
        raise


def _run_job(options: RunOptions, interrupts: Interrupts, display: Display) -> int:
    from specgen.display import create_display
    from specgen.job import Job
    from specgen.request_io.file_writer import OutputComplete
    from specgen.request_io.source import check_inputs
    from specgen.request_io.writer import StreamWriter

    check_inputs(options.inputs)
    check_summary(options)
    try:
        writer = _open_writer(options, display)
    except OutputComplete as complete:
        return _already_complete(options, complete.meta, display)
    if isinstance(writer, StreamWriter) and writer.path is None and _isatty(sys.stdout):
        display = create_display(options.progress, quiet=options.quiet, data_on_terminal=True)
    job = Job(
        writer,
        display,
        interrupts,
        formatter=_formatter(options, writer),
        max_errors=options.max_errors,
    )
    ended = False
    try:
        _drive(options, job)
        ended = True
    except StopRun as stop:
        display.close()
        _stopped(options, job, stop)
        return stop.exit_code
    finally:
        display.close()
        if not ended and (kept := writer.abort()) is not None:
            are = "is" if writer.num_rows == 1 else "are"
            display.note(f"{counted(writer.num_rows, 'finished row')} {are} kept in {kept}")
            display.note(f"to go on: {options.command}")
    return ExitCode.FAILED_ROWS if job.rows_failed else ExitCode.OK


def _open_writer(options: RunOptions, display: Display) -> RowWriter:
    from specgen.request_io.file_writer import OutputOptions
    from specgen.request_io.writer import open_writer

    return open_writer(
        options.output,
        OutputOptions(
            overwrite=options.overwrite,
            resume=options.resume,
            retry_errors=options.retry_errors,
            order=options.order,
            shard=options.shard,
            fingerprint=partial(_fingerprint, options),
            digests=partial(_digests, options),
        ),
        inputs=options.inputs,
        notify=display.note,
    )


def _digests(options: RunOptions, count: int) -> Iterator[str] | None:
    """Hashes of the first `count` lines of the input; None if it can be read only once."""
    from specgen.request_io.source import read_lines

    if not _are_files(options.inputs):
        return None
    limit = options.read.limit
    count = count if limit is None else min(count, limit)
    return (raw.digest for raw in islice(read_lines(options.inputs), count))


def _formatter(options: RunOptions, writer: RowWriter) -> Callable[[RequestOutput], dict[str, Any]]:
    from specgen.request_io.openai_batch import to_envelope
    from specgen.request_io.record import to_record

    if options.output_format == "openai":
        return partial(
            to_envelope,
            model=legible(options.config.model or "specgen-default"),
            created=writer.created,
            return_token_ids=options.return_token_ids,
        )
    return partial(to_record, return_token_ids=options.return_token_ids)


def _already_complete(options: RunOptions, meta: dict[str, Any], display: Display) -> int:
    """The output is finished; make sure that it is the output of this input."""
    from specgen.request_io.source import STDIN, hash_rows

    known = meta.get("input_hash")
    if (
        known is not None
        and STDIN not in options.inputs
        and known != hash_rows(options.inputs, options.read.limit)
    ):
        raise UsageError(
            f"{options.output}: is the output of another input (or --limit)",
            "choose another -o, or give --overwrite",
        )
    display.note(f"{options.output} is complete already")
    return ExitCode.OK


def _drive(options: RunOptions, job: Job) -> None:
    """Load, run, complete the output."""
    from specgen.request_io.read_ahead import ReadAhead
    from specgen.request_io.reader import read_rows
    from specgen.request_io.source import InputState, count_rows, read_lines

    started, state = datetime.now(UTC), InputState(options.inputs)
    total = count_rows(options.inputs, options.read.limit)
    if total is not None:
        total = max(options.shard.num_rows(total) - job.writer.num_rows, 0)
    job.check_errors()  # those of earlier runs may be too many already
    engine, sampling = _load(options)
    settings = _settings(options, engine, sampling)
    job.display.start(settings, total)
    warn_before(options.config, settings, job.display)
    read = replace(options.read, sampling=sampling)
    if _are_files(options.inputs):
        job.run(engine, read_rows(options.inputs, read, job.writer.keep))
    else:  # a pipe may keep its lines waiting, finished rows must not wait with them
        lines = ReadAhead(read_lines(options.inputs))
        job.run(engine, read_rows(options.inputs, read, job.writer.keep, lines), lines.ready)
    seconds = job.stats.elapsed()
    job.display.close()
    warn_after(state.check(), engine.num_memory_faults, job, job.display)
    whole = job.whole_output()
    with job.interrupts.held():
        summary = job.stats.summary(seconds, whole)
        meta = _meta(options, job, settings, started, summary)
        job.writer.finish(job.num_rows, meta)
        job.complete = True
        write_summary(options, summary, complete=True)
        job.display.summary(job.stats, seconds, whole)


def _fingerprint(options: RunOptions) -> dict[str, Any]:
    from specgen.commands.settings import run_fingerprint
    from specgen.resolve import resolve

    config = resolve(options.config)
    return run_fingerprint(
        config,
        _effective_sampling(options, config.model_dir),
        options.read,
        # As asked, not what auto means on this device: a job may move to another machine.
        dtype=options.config.dtype,
        output_format=options.output_format,
        return_token_ids=options.return_token_ids,
    )


def _effective_sampling(options: RunOptions, model_dir: str) -> SamplingParams:
    """The flags over the defaults of the model."""
    from specgen.resolve import generation_defaults

    defaults: dict[str, Any] = {}
    if options.config.generation_config == "auto":
        defaults = generation_defaults(model_dir)
    return sampling_of(options.sampling, defaults)


def _load(options: RunOptions) -> tuple[Engine, SamplingParams]:
    from specgen.pipeline.engine import Engine

    _check_stop_ids(options)
    _check_template(options)
    engine = Engine(options.config)
    return engine, _effective_sampling(options, engine.config.model_dir)


def _check_stop_ids(options: RunOptions) -> None:
    """Refuse ids that no row can end with, before weights are loaded."""
    from specgen.resolve import resolve

    ids = options.sampling.get("stop_token_ids")
    if ids and max(ids) >= (size := resolve(options.config).vocab_size):
        raise UsageError(f"--stop-token-ids: {max(ids)}: the model has ids 0 to {size - 1}")


def _check_template(options: RunOptions) -> None:
    """Refuse flags and inputs that fail for want of a template, before weights are loaded."""
    if options.read.template_flag is not None:
        from specgen.validation import load_checks

        load_checks(options.config, options.read.template_flag)
    config = options.config
    if config.chat_template is not None or config.skip_tokenizer_init:
        return  # a template that is given is checked when it is read; without a tokenizer rows fail
    first = _first_messages(options)
    if first is not None:
        _require_template(options, first)


def _require_template(options: RunOptions, line: str) -> None:
    from specgen.pipeline.tokenization import Tokenizer
    from specgen.resolve import resolve

    resolved = resolve(options.config, with_weights=False)
    tokenizer = Tokenizer(resolved.tokenizer_dir, trust_remote_code=resolved.trust_remote_code)
    model = options.config.tokenizer or options.config.model or resolved.tokenizer_dir
    tokenizer.require_template(
        f'{line}: "messages" for {legible(model)}',
        'give one with --chat-template FILE, or "prompt" lines instead of "messages"',
    )


def _settings(options: RunOptions, engine: Engine, sampling: SamplingParams) -> dict[str, Any]:
    """Everything that was decided, by the user or for them."""
    from specgen.resolve import ignored_generation_keys

    values = sampling.to_dict()
    del values["seed"], values["num_speculative_tokens"]  # of single rows only
    values["max_tokens"] = values["max_tokens"] or "rest of the context"
    described = engine.describe()
    ignored: dict[str, Any] = {}
    if options.config.generation_config == "auto":
        ignored = ignored_generation_keys(described["model_dir"], described["max_model_len"])
    return {
        **described,
        "generation_config": options.config.generation_config,
        "generation_config_ignored": ignored,
        "sampling": values,
        "apply_chat_template": options.read.apply_chat_template,
        "system_prompt": options.read.system_prompt,
    }


def _first_messages(options: RunOptions) -> str | None:
    """`FILE:LINE` of an input file's first row if that is a chat; None if no file begins so.

    With a limit, only the first input is sure to be read.
    """
    from specgen.request_io.reader import parse_line
    from specgen.request_io.source import STDIN, read_lines

    limit = options.read.limit
    for path in options.inputs if limit is None else options.inputs[: min(limit, 1)]:
        if path == STDIN or not os.path.isfile(path):
            continue  # what can be read only once
        with closing(read_lines([path])) as lines:
            first = next(lines, None)
        row = None if first is None else parse_line(first, 0, options.read)
        if first is not None and getattr(row, "messages", None) is not None:
            return f"{first.source}:{first.line}"
    return None


def _are_files(inputs: tuple[str, ...]) -> bool:
    """Whether all inputs can be read again, and keep nobody waiting."""
    from specgen.request_io.source import STDIN

    return all(path != STDIN and os.path.isfile(path) for path in inputs)


def _meta(
    options: RunOptions,
    job: Job,
    settings: dict[str, Any],
    started: datetime,
    summary: dict[str, Any],
) -> dict[str, Any]:
    from specgen.doctor import gpu_names, versions

    return {
        "versions": versions(),
        "gpus": gpu_names(),
        "settings": settings,
        "inputs": list(options.inputs),
        "input_hash": job.input_hash,
        "num_rows": job.num_rows,
        "limit": options.read.limit,
        "shard": {"number": options.shard.number, "count": options.shard.count},
        "output_format": options.output_format,
        "started": started.isoformat(timespec="seconds"),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "summary": summary,
    }


def _stopped(options: RunOptions, job: Job, stop: StopRun) -> None:
    """Last words of a run that was asked to stop."""
    if job.complete:
        job.display.note("stopped, but all rows are written")
        return
    if job.stats.rows_done:
        job.display.summary(job.stats, job.stats.elapsed())
    try:
        write_summary(options, job.stats.summary(), complete=False)
    except SpecgenError as error:
        job.display.warn(str(error))
    job.display.note(_reason(stop))
    if options.output not in (None, "-") and not job.writer.num_rows:
        job.display.note(_NOTHING_DONE)


def _reason(stop: StopRun) -> str:
    return "stopped by the time limit" if stop.timed_out else "stopped before the end"


def _isatty(stream: Any) -> bool:
    return stream is not None and stream.isatty()

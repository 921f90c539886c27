"""`specgen run`: prompts in, completions and their statistics out."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from specgen.config import (
    DEVICES,
    DRAFT_SAMPLES,
    DTYPES,
    GENERATION_CONFIGS,
    LOAD_FORMATS,
    OVERLONG,
    REJECTION_SAMPLES,
    EngineConfig,
)
from specgen.errors import ExitCode, OutputError, SpecgenError, UsageError
from specgen.interrupts import Interrupts, StopRun

if TYPE_CHECKING:
    from specgen.job import Job
    from specgen.pipeline.engine import Engine
    from specgen.request_io.reader import ReadOptions
    from specgen.sampling_params import SamplingParams

__all__ = ["run"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _DraftSample(click.Choice[str]):
    """`greedy` or `gumbel`; `probabilistic` is how vLLM calls the latter."""

    def __init__(self) -> None:
        super().__init__([*DRAFT_SAMPLES, "probabilistic"])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        chosen = super().convert(value, param, ctx)
        return "gumbel" if chosen == "probabilistic" else chosen


def _token_ids(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> list[int] | None:
    """Ids given as `--stop-token-ids 1,2` or by repeating the flag."""
    del ctx, param
    try:
        ids = [int(part) for value in values for part in value.split(",")]
    except ValueError:
        raise click.BadParameter("must be token ids, such as 1,2") from None
    return ids or None


def _option(*names: str, **settings: Any) -> Callable[[_Command], _Command]:
    return click.option(*names, **settings)


_MODEL = [
    _option("--model", metavar="DIR|ID", help="Target model; without it the built-in pair."),
    _option("--tokenizer", metavar="DIR|ID", help="Tokenizer, if not the model's own."),
    _option("--revision", metavar="REV", help="Revision of models taken from the hub."),
    _option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True),
    _option("--max-model-len", type=int, metavar="N", help="Longest prompt plus completion."),
    _option("--max-num-seqs", type=int, metavar="N", help="Completions that run at a time."),
    _option("--max-num-batched-tokens", type=int, metavar="N", help="Prompt tokens of a step."),
    _option("--gpu-memory-utilization", type=float, default=0.9, show_default=True),
    _option("--device", type=click.Choice(DEVICES), default="auto", show_default=True),
    _option(
        "--load-format",
        type=click.Choice(LOAD_FORMATS),
        default="auto",
        show_default=True,
        help="dummy: random weights in the shape of config.json.",
    ),
    _option("--trust-remote-code", is_flag=True, help="Run code that comes with a tokenizer."),
    _option(
        "--generation-config",
        type=click.Choice(GENERATION_CONFIGS),
        default="auto",
        show_default=True,
        help="auto: sampling defaults of the model's generation_config.json.",
    ),
    _option("--chat-template", metavar="FILE|TEXT", help="Chat template, if not the model's own."),
]
_DRAFT = [
    _option(
        "--draft-model", metavar="DIR|ID", help="EAGLE draft; built in for the built-in model."
    ),
    _option("--num-speculative-tokens", type=int, metavar="N", help="Drafts a step.  [default: 3]"),
    _option(
        "--draft-sample",
        type=_DraftSample(),
        default="greedy",
        show_default=True,
        help="How drafts are made; probabilistic is gumbel.",
    ),
    _option(
        "--rejection-sample",
        type=click.Choice(REJECTION_SAMPLES),
        default="standard",
        show_default=True,
        help="How drafts are judged.",
    ),
    _option("--no-draft", is_flag=True, help="Generate without speculation."),
]
_SAMPLING = [
    _option("--seed", type=int, default=0, show_default=True, help="Seed of the run."),
    _option("--temperature", type=float, metavar="T"),
    _option("--top-p", type=float, metavar="P"),
    _option("--top-k", type=int, metavar="K"),
    _option("--max-tokens", type=int, metavar="N", help="Default: the rest of the context."),
    _option("--n", type=int, metavar="N", help="Completions of each prompt."),
    _option("--stop", multiple=True, metavar="TEXT", help="End at this text; repeatable."),
    _option(
        "--stop-token-ids",
        multiple=True,
        callback=_token_ids,
        metavar="ID,...",
        help="End at these tokens; repeatable.",
    ),
    _option("--ignore-eos", is_flag=True, help="Go on past end-of-sequence tokens."),
    _option("--return-token-ids", is_flag=True, help="Put token_ids into the output."),
]
_DATA = [
    _option("--prompt-field", default="prompt", show_default=True, metavar="KEY"),
    _option("--id-field", metavar="KEY", help="Key whose value becomes custom_id."),
    _option("--system-prompt", metavar="TEXT", help="System message for chats without one."),
    _option(
        "--apply-chat-template",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        show_default=True,
        help="always: prompt strings become user messages; auto: only with --system-prompt.",
    ),
    _option(
        "--overlong",
        type=click.Choice(OVERLONG),
        default="error",
        show_default=True,
        help="What to do with a prompt that does not fit the model.",
    ),
]
_JOB = [
    _option("-o", "--output", metavar="OUT", help="Output file; without it standard output."),
    _option("--overwrite", is_flag=True, help="Replace OUT, and a partial OUT."),
    _option("--limit", type=click.IntRange(min=0), metavar="N", help="Read at most N rows."),
    _option(
        "--progress",
        type=click.Choice(["auto", "rich", "plain", "json", "none"]),
        default="auto",
        show_default=True,
    ),
    _option("--summary", metavar="FILE", help="Write the closing figures to FILE as JSON."),
    _option("--quiet", is_flag=True, help="Show errors only."),
]
_ENGINE_FLAGS = (
    "model", "tokenizer", "revision", "dtype", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "gpu_memory_utilization", "device", "load_format",
    "trust_remote_code", "generation_config", "chat_template", "draft_model",
    "num_speculative_tokens", "draft_sample", "rejection_sample", "no_draft", "seed", "overlong",
)  # fmt: skip
_SAMPLING_FLAGS = (
    "temperature", "top_p", "top_k", "max_tokens", "n", "stop", "stop_token_ids", "ignore_eos",
)  # fmt: skip


def _with_options(command: _Command) -> _Command:
    for option in reversed([*_MODEL, *_DRAFT, *_SAMPLING, *_DATA, *_JOB]):
        command = option(command)
    return command


@click.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@_with_options
def run(inputs: tuple[str, ...], **flags: Any) -> int:
    """Generate a completion for each prompt line of INPUT (JSONL, gzip, zstd; - is stdin).

    Exit codes: 0 all rows ok, 2 usage, 3 some rows failed, 4 input, 5 model or machine, 6 output.
    """
    options = _Options.from_flags(inputs, flags)
    with Interrupts(on_leave=_restore_cursor) as interrupts:
        return _run(options, interrupts)


@dataclass(frozen=True)
class _Options:
    """The flags, parsed and checked as far as they can be without a model."""

    inputs: tuple[str, ...]
    config: EngineConfig
    sampling: dict[str, Any]
    """Sampling flags that were given; the model's own defaults stand behind them."""
    read: ReadOptions
    output: str | None
    overwrite: bool
    progress: Any
    summary: str | None
    quiet: bool
    return_token_ids: bool

    @classmethod
    def from_flags(cls, inputs: tuple[str, ...], flags: dict[str, Any]) -> _Options:
        from specgen.request_io.reader import ReadOptions

        sampling = {name: flags[name] for name in _SAMPLING_FLAGS if flags[name] not in (None, ())}
        if not flags["ignore_eos"]:
            del sampling["ignore_eos"]
        _check_draft_flags(flags)
        if flags["system_prompt"] is not None and flags["apply_chat_template"] == "never":
            raise UsageError(
                "--system-prompt needs a chat template, --apply-chat-template is never"
            )
        if flags["system_prompt"] == "":
            raise UsageError("--system-prompt is empty")
        return cls(
            inputs=inputs,
            config=EngineConfig(**{name: flags[name] for name in _ENGINE_FLAGS}),
            sampling=sampling,
            read=ReadOptions(
                sampling=_sampling(sampling, {}),
                prompt_field=flags["prompt_field"],
                id_field=flags["id_field"],
                system_prompt=flags["system_prompt"],
                apply_chat_template=flags["apply_chat_template"],
                limit=flags["limit"],
            ),
            output=flags["output"],
            overwrite=flags["overwrite"],
            progress=flags["progress"],
            summary=flags["summary"],
            quiet=flags["quiet"],
            return_token_ids=flags["return_token_ids"],
        )


def _check_draft_flags(flags: dict[str, Any]) -> None:
    """Refuse flags of a draft where there is none: they would change nothing."""
    if flags["no_draft"]:
        reason, hint = "--no-draft is given", "leave one of the two out"
    elif flags["model"] is not None and flags["draft_model"] is None:
        reason, hint = "--model without --draft-model has no draft", "give --draft-model"
    else:
        return
    if flags["num_speculative_tokens"]:
        raise UsageError(f"--num-speculative-tokens needs a draft: {reason}", hint)
    if flags["draft_sample"] != "greedy":
        raise UsageError(f"--draft-sample needs a draft: {reason}", hint)


def _sampling(given: dict[str, Any], model_defaults: dict[str, Any]) -> SamplingParams:
    from specgen.sampling_params import SamplingParams

    try:
        defaults = SamplingParams.from_mapping(model_defaults)
    except ValueError as error:
        raise UsageError(
            f"the model's generation_config.json: {error}", "give --generation-config none"
        ) from error
    try:
        return SamplingParams.from_mapping(given, defaults)
    except ValueError as error:
        raise UsageError(_as_flags(str(error))) from error


def _as_flags(message: str) -> str:
    """A message about `"top_p"` as one about `--top-p`."""
    return re.sub(r'"([a-z_]+)"', lambda m: "--" + m[1].replace("_", "-"), message, count=1)


def _restore_cursor() -> None:
    # The live display hides it, and a process that leaves at once cannot put it back properly.
    if sys.stderr is not None and sys.stderr.isatty():
        os.write(sys.stderr.fileno(), b"\x1b[?25h\n")


def _run(options: _Options, interrupts: Interrupts) -> int:
    from specgen.display import create_display
    from specgen.job import Job
    from specgen.request_io.source import check_inputs
    from specgen.request_io.writer import StreamWriter, open_writer

    check_inputs(options.inputs)
    _check_summary(options)
    display = create_display(options.progress, quiet=options.quiet)
    writer = open_writer(
        options.output,
        overwrite=options.overwrite,
        inputs=options.inputs,
        notify=display.note,
    )
    if isinstance(writer, StreamWriter) and writer.path is None and _isatty(sys.stdout):
        display = create_display(options.progress, quiet=options.quiet, data_on_terminal=True)
    job = Job(writer, display, interrupts, options.return_token_ids)
    ended = False
    try:
        _drive(options, job)
        ended = True
    except StopRun as stop:
        display.close()
        _stopped(options, job)
        return stop.exit_code
    finally:
        display.close()
        if not ended:
            kept = writer.abort()
            if kept is not None:
                display.note(f"{job.stats.rows_done:,} finished rows are kept in {kept}")
    return ExitCode.FAILED_ROWS if job.stats.rows_failed else ExitCode.OK


def _drive(options: _Options, job: Job) -> None:
    """Load, run, complete the output."""
    from dataclasses import replace

    from specgen.request_io.reader import read_rows
    from specgen.request_io.source import count_rows

    started = datetime.now(UTC)
    total = count_rows(options.inputs, options.read.limit)
    engine, sampling = _load(options)
    settings = _settings(options, engine, sampling)
    job.display.start(settings, total)
    job.run(engine, read_rows(options.inputs, replace(options.read, sampling=sampling)))
    seconds = job.stats.elapsed()
    job.display.close()
    if not job.num_rows:
        job.display.warn("the input holds no rows")
    with job.interrupts.held():
        meta = _meta(options, job, settings, started)
        job.writer.finish(job.num_rows, meta)
        job.complete = True
        _write_summary(options, job, seconds, complete=True)
        job.display.summary(job.stats, seconds)


def _load(options: _Options) -> tuple[Engine, SamplingParams]:
    from specgen.pipeline.engine import Engine
    from specgen.resolve import generation_defaults

    engine = Engine(options.config)
    defaults: dict[str, Any] = {}
    if options.config.generation_config == "auto":
        defaults = generation_defaults(engine.config.model_dir)
    return engine, _sampling(options.sampling, defaults)


def _settings(options: _Options, engine: Engine, sampling: SamplingParams) -> dict[str, Any]:
    """Everything that was decided, by the user or for them."""
    values = sampling.to_dict()
    del values["seed"], values["num_speculative_tokens"]  # of single rows only
    values["max_tokens"] = values["max_tokens"] or "rest of the context"
    return {
        **engine.describe(),
        "generation_config": options.config.generation_config,
        "sampling": values,
        "apply_chat_template": options.read.apply_chat_template,
        "system_prompt": options.read.system_prompt,
    }


def _meta(
    options: _Options, job: Job, settings: dict[str, Any], started: datetime
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
        "started": started.isoformat(timespec="seconds"),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "summary": job.stats.summary(),
    }


def _check_summary(options: _Options) -> None:
    """Find out now, not after hours, that the summary cannot be written."""
    if options.summary is None:
        return
    path = Path(options.summary)
    others = [p for p in (*options.inputs, options.output) if p not in (None, "-")]
    if any(os.path.realpath(str(p)) == os.path.realpath(path) for p in others):
        raise UsageError(f"--summary {path}: is an input or the output of this run")
    try:
        existed = path.exists()
        with open(path, "a", encoding="utf-8"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise OutputError(f"--summary {path}: cannot be written: {error.strerror}") from error


def _write_summary(options: _Options, job: Job, seconds: float, *, complete: bool) -> None:
    if options.summary is None:
        return
    content = {"complete": complete, **job.stats.summary(seconds)}
    try:
        with open(options.summary, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
    except OSError as error:
        raise OutputError(f"{options.summary}: cannot be written: {error.strerror}") from error


def _stopped(options: _Options, job: Job) -> None:
    """Last words of a run that was asked to stop."""
    if job.complete:
        job.display.note("stopped, but all rows are written")
        return
    if job.stats.rows_done:
        job.display.summary(job.stats, job.stats.elapsed())
    try:
        _write_summary(options, job, job.stats.elapsed(), complete=False)
    except SpecgenError as error:
        job.display.warn(str(error))
    job.display.note("stopped before the end")


def _isatty(stream: Any) -> bool:
    return stream is not None and stream.isatty()

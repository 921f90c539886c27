"""`specgen bench`: how fast the engine is, one JSON line a measurement."""

from __future__ import annotations

import json
import shlex
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from specgen.commands.flags import DRAFT, with_options
from specgen.commands.run_options import sampling_of
from specgen.config import (
    DEVICES,
    DTYPES,
    EngineConfig,
    refuse_idle_draft_settings,
)
from specgen.errors import ModelError, SpecgenError, UsageError
from specgen.load_format import LOAD_FORMATS, is_dummy
from specgen.wording import counted

if TYPE_CHECKING:
    from specgen.bench.jobs import Job
    from specgen.pipeline.engine import Engine

__all__ = ["bench"]

_INPUT_LEN = _OUTPUT_LEN = 256
_MOST_ROWS, _MOST_PROMPTS, _MOST_RUNS = 1_000_000, 100_000, 1_000
_JOB_FLAGS = ("batch_size", "input_len", "output_len")
_CONFIG_FLAGS = (
    "dtype", "device", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
    "prefix_caching", "num_speculative_tokens", "draft_sample", "rejection_sample",
    "synthetic_acceptance", "no_draft", "seed", "draft_revision", "draft_aux_layers",
    "draft_rope_theta", "draft_norm_output", "draft_norm_before_residual",
)  # fmt: skip


def _sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    del ctx, param
    try:
        sizes = None if value is None else tuple(int(part) for part in value.split(","))
    except ValueError:
        sizes = (0,)
    if sizes is not None and not 1 <= min(sizes) <= max(sizes) <= _MOST_ROWS:
        raise click.BadParameter(f"must be numbers of rows to {_MOST_ROWS:,}, such as 1,8,64")
    return sizes


_FLAGS = [
    click.option(
        "--model", metavar="DIR|ID|PRESET", help="Target; without it the built-in pair. See below."
    ),
    click.option(
        "--load-format",
        type=click.Choice(LOAD_FORMATS),
        default="auto",
        show_default=True,
        help="dummy: random weights in the shape of config.json, as for every preset; "
        "dummy-uniform: as vLLM has them, to compare.",
    ),
    click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True),
    click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True),
    click.option("--max-num-seqs", type=int, metavar="N", help="Rows that run at a time."),
    click.option(
        "--max-num-batched-tokens", type=int, metavar="N", help="Prompt tokens of a step."
    ),
    click.option("--gpu-memory-utilization", type=float, default=0.9, show_default=True),
    click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True),
    click.option(
        "--batch-size",
        callback=_sizes,
        metavar="B,...",
        help="Rows of each measurement, all at once.  [default: 1,8,64]",
    ),
    click.option(
        "--input-len",
        type=click.IntRange(min=1),
        metavar="N",
        help=f"Prompt tokens of a row.  [default: {_INPUT_LEN}]",
    ),
    click.option(
        "--output-len",
        type=click.IntRange(min=1),
        metavar="N",
        help=f"Tokens a row generates.  [default: {_OUTPUT_LEN}]",
    ),
    click.option(
        "--job",
        type=click.Choice(["mixed", "shared-prefix"]),
        help="Measure a whole job instead: prompts of mixed lengths, or with a common beginning.",
    ),
    click.option(
        "--num-prompts",
        type=click.IntRange(1, _MOST_PROMPTS),
        metavar="N",
        help="Prompts of a job.  [default: 1000 mixed, 2000 shared-prefix]",
    ),
    click.option(
        "--repeat",
        type=click.IntRange(1, _MOST_RUNS),
        default=1,
        show_default=True,
        metavar="N",
        help="Runs of each measurement that count, with other prompts and draws each.",
    ),
    click.option("--temperature", type=float, default=1.0, show_default=True, metavar="T"),
    click.option("--seed", type=int, default=0, show_default=True),
]


@dataclass(frozen=True)
class _Models:
    """What is measured, as named and as found."""

    name: str
    draft_name: str | None
    directory: str | None
    draft_directory: str | None
    load_format: str


@click.command()
@with_options(_FLAGS, DRAFT)
def bench(**flags: Any) -> None:
    """Measure throughput: one JSON line a measurement on standard output.

    The engine is the one of `specgen run`; prompts are random token ids, and every row runs to its
    length. Before the runs that count, each measurement is run once to warm up.

    Presets are the shapes of published models with random weights: llama-3.1-8b, llama-3.2-1b,
    qwen3-8b. Each comes with an EAGLE-3 head (NAME-eagle3) unless --no-draft is given. What the
    head accepts is then set with --synthetic-acceptance; without it drafts of random weights are
    judged as they are.
    """
    if flags["max_num_seqs"] is not None and flags["max_num_seqs"] < 1:
        raise UsageError(f"--max-num-seqs must be at least 1, got {flags['max_num_seqs']}")
    jobs = _jobs(flags)
    sampling_of({"temperature": flags["temperature"]}, {})
    if flags["synthetic_acceptance"] is not None:
        if flags["no_draft"]:
            raise UsageError(
                "--synthetic-acceptance and --no-draft contradict each other",
                "leave one of the two out",
            )
        given = click.get_current_context().get_parameter_source("rejection_sample")
        if given is ParameterSource.COMMANDLINE and flags["rejection_sample"] != "synthetic":
            raise UsageError(
                f"--synthetic-acceptance and --rejection-sample {flags['rejection_sample']} "
                "contradict each other",
                "leave one of the two out",
            )
        flags["rejection_sample"] = "synthetic"
    with tempfile.TemporaryDirectory(prefix="specgen-bench-") as directory:
        models = _models(flags, Path(directory))
        try:
            _measure_all(flags, models, jobs)
        except SpecgenError as error:  # presets by their names, not by where they were written
            error.message = error.message.replace(f"{directory}/", "")
            raise


def _jobs(flags: dict[str, Any]) -> list[Job]:
    from specgen.bench.jobs import fixed_job, mixed_job, shared_prefix_job

    name, num_prompts = flags["job"], flags["num_prompts"]
    if name is None:
        if num_prompts is not None:
            raise UsageError("--num-prompts belongs to --job; otherwise --batch-size says it")
        input_len, output_len = flags["input_len"], flags["output_len"]
        most = max(flags["batch_size"] or (1,))
        if flags["max_num_seqs"] is not None and most > flags["max_num_seqs"]:
            raise UsageError(
                f"--batch-size {most}: --max-num-seqs {flags['max_num_seqs']} has fewer at a time",
                "leave --max-num-seqs out, or raise it",
            )
        return [
            fixed_job(batch, input_len or _INPUT_LEN, output_len or _OUTPUT_LEN)
            for batch in flags["batch_size"] or (1, 8, 64)
        ]
    for flag in _JOB_FLAGS:
        if flags[flag] is not None:
            raise UsageError(
                f"--{flag.replace('_', '-')}: --job {name} has lengths of its own",
                "--max-num-seqs says how many rows run at a time"
                if flag == "batch_size"
                else f"leave it out, or measure rows of one length without --job {name}",
            )
    make = mixed_job if name == "mixed" else shared_prefix_job
    return [make() if num_prompts is None else make(num_prompts)]


def _models(flags: dict[str, Any], parent: Path) -> _Models:
    """Directories of the models; those of presets are written under ``parent``."""
    from specgen.bench.presets import PRESETS, head_of, write_preset
    from specgen.hub import is_hub_id

    model, draft, load_format = flags["model"], flags["draft_model"], flags["load_format"]
    if model in PRESETS and draft is None and not flags["no_draft"]:
        draft = head_of(model)
    given = [name for name in (model, draft) if name is not None]
    for name in given:
        if name not in PRESETS and not Path(name).is_dir() and not is_hub_id(name):
            raise ModelError(
                f"{name}: no such model directory, and no such preset",
                f"presets are {', '.join(PRESETS)}; or give a directory with config.json, "
                "or a hub id",
            )
    presets = [name for name in given if name in PRESETS and not Path(name).is_dir()]
    if presets:
        if len(presets) < len(given) and not is_dummy(load_format):
            raise UsageError(
                f"{presets[0]} is a preset, which has no weights", "give --load-format dummy"
            )
        load_format = load_format if is_dummy(load_format) else "dummy"
    found = {name: str(write_preset(name, parent)) for name in dict.fromkeys(presets)}
    return _Models(
        name=model or "built-in",
        draft_name=draft or ("built-in" if model is None and not flags["no_draft"] else None),
        directory=found.get(model, model),
        draft_directory=found.get(draft, draft),
        load_format=load_format,
    )


def _measure_all(flags: dict[str, Any], models: _Models, jobs: list[Job]) -> None:
    from specgen.bench.fit import check_batch, check_lengths, estimate_num_blocks
    from specgen.bench.measure import first_steps, measure, synchronized_clock
    from specgen.hub import locate
    from specgen.models.registry import read_model_config
    from specgen.pipeline.engine import Engine
    from specgen.resolve import BUILTIN_TARGET, resolve

    started = time.perf_counter()
    batches = [job.batch for job in jobs if job.batch is not None]
    target = str(BUILTIN_TARGET) if models.directory is None else locate(models.directory)
    check_lengths(jobs, read_model_config(target).longest_context)
    max_num_seqs = flags["max_num_seqs"]
    if max_num_seqs is None and batches:
        max_num_seqs = max(batches)
    config = EngineConfig(
        **{name: flags[name] for name in _CONFIG_FLAGS}
        | {
            "model": models.directory,
            "draft_model": models.draft_directory,
            "load_format": models.load_format,
            "skip_tokenizer_init": True,
            "max_model_len": max(job.longest for job in jobs),
            "max_num_seqs": max_num_seqs,
        }
    )
    refuse_idle_draft_settings(config)
    resolved = resolve(config)
    check_batch(jobs, resolved, estimate_num_blocks(resolved))
    click.echo(f"loading {models.name}", err=True)
    engine = Engine(config)
    startup = synchronized_clock(resolved.device) - started
    described = engine.describe()
    check_batch(jobs, resolved, described["num_kv_blocks"])
    first_steps(engine, flags["temperature"])
    first_step = synchronized_clock(resolved.device) - started
    fixed = _facts(flags, models, engine)
    fixed |= {"startup_s": round(startup, 2), "first_step_s": round(first_step, 2)}
    for number, job in enumerate(jobs):
        click.echo(f"measuring {job.name}, {counted(len(job.lengths), 'prompt')}", err=True)
        result = measure(
            engine,
            job,
            temperature=flags["temperature"],
            seed=number,
            num_runs=flags["repeat"],
            notify=lambda text: click.echo(f"  {text}", err=True),
        )
        click.echo(json.dumps({**result.to_dict(), **fixed}))


def _facts(flags: dict[str, Any], models: _Models, engine: Engine) -> dict[str, Any]:
    """What holds for every measurement of the command."""
    from specgen.doctor import gpu_names, versions

    described = engine.describe()
    settings = (
        "num_speculative_tokens", "auto_draft_length", "draft_sample", "rejection_sample",
        "synthetic_rates",
        "device", "dtype", "kernel_backend", "cuda_graphs", "cpu_threads", "max_num_seqs",
        "max_num_batched_tokens", "max_model_len", "num_kv_blocks", "draft_logits_bytes",
        "prefix_caching",
    )  # fmt: skip
    root = click.get_current_context().find_root()
    return {
        "model": models.name,
        "draft_model": models.draft_name if described["draft_dir"] else None,
        "load_format": models.load_format,
        "temperature": flags["temperature"],
        **{name: described.get(name) for name in settings},
        "gpu": next(iter(gpu_names()), None),
        "versions": versions(),
        "command": shlex.join([*(root.info_name or "specgen").split(), *(root.obj or ())]),
    }

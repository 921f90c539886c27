"""The flags of `specgen run`, checked as far as they can be without a model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specgen.config import DRAFT_OVERRIDES, EngineConfig, refuse_idle_draft_settings
from specgen.errors import UsageError
from specgen.request_io.shard import Shard
from specgen.wording import legible

if TYPE_CHECKING:
    from specgen.request_io.reader import ReadOptions
    from specgen.sampling_params import SamplingParams

__all__ = ["RunOptions", "read_options", "sampling_of"]

_ENGINE_FLAGS = (
    "model", "tokenizer", "revision", "dtype", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "gpu_memory_utilization", "prefix_caching", "device", "load_format",
    "trust_remote_code", "generation_config", "chat_template", "draft_model",
    "skip_tokenizer_init", "synthetic_acceptance",
    "num_speculative_tokens", "draft_sample", "rejection_sample", "no_draft", "seed", "overlong",
    *DRAFT_OVERRIDES,
)  # fmt: skip
_SAMPLING_FLAGS = (
    "temperature", "top_p", "top_k", "max_tokens", "n", "stop", "stop_token_ids", "ignore_eos",
)  # fmt: skip


@dataclass(frozen=True)
class RunOptions:
    """What was asked of a run.

    Attributes:
        inputs: paths, or `-`.
        config: of the engine.
        sampling: sampling flags that were given; the model's own defaults stand behind them.
        read: how lines become rows.
        command: the command line that goes on where this run stops.
        output: `-o` as given.
        The others are the flags of the same names.
    """

    inputs: tuple[str, ...]
    config: EngineConfig
    sampling: dict[str, Any]
    read: ReadOptions
    command: str
    output: str | None
    overwrite: bool
    resume: bool
    retry_errors: bool
    max_errors: int | None
    order: Any
    output_format: str
    progress: Any
    summary: str | None
    quiet: bool
    return_token_ids: bool

    @property
    def shard(self) -> Shard:
        """The rows to run."""
        return self.read.shard

    @classmethod
    def from_flags(
        cls, inputs: tuple[str, ...], flags: dict[str, Any], command: str = "specgen run"
    ) -> RunOptions:
        """Flags by name, as click parsed them.

        Raises:
            UsageError: flags that make no sense, alone or together.
        """
        sampling = {name: flags[name] for name in _SAMPLING_FLAGS if flags[name] not in (None, ())}
        if not flags["ignore_eos"]:
            del sampling["ignore_eos"]
        config = EngineConfig(**{name: flags[name] for name in _ENGINE_FLAGS})
        refuse_idle_draft_settings(config)
        _check_output_flags(flags)
        return cls(
            inputs=inputs,
            config=config,
            sampling=sampling,
            read=read_options(flags, sampling_of(sampling, {})),
            command=command,
            output=flags["output"],
            overwrite=flags["overwrite"],
            resume=flags["resume"],
            retry_errors=flags["retry_errors"],
            max_errors=flags["max_errors"],
            order=flags["order"] or "input",
            output_format=flags["output_format"],
            progress=flags["progress"],
            summary=flags["summary"],
            quiet=flags["quiet"],
            return_token_ids=flags["return_token_ids"],
        )


def read_options(flags: dict[str, Any], sampling: SamplingParams) -> ReadOptions:
    """How lines become rows, by the flags that say so.

    Raises:
        UsageError: flags that contradict each other.
    """
    from specgen.request_io.reader import ReadOptions

    _check_text(flags)
    if flags["system_prompt"] is not None and flags["apply_chat_template"] == "never":
        raise UsageError("--system-prompt needs a chat template, --apply-chat-template is never")
    if flags["system_prompt"] == "":
        raise UsageError("--system-prompt is empty")
    return ReadOptions(
        sampling=sampling,
        prompt_field=flags["prompt_field"],
        id_field=flags["id_field"],
        system_prompt=flags["system_prompt"],
        apply_chat_template=flags["apply_chat_template"],
        limit=flags["limit"],
        shard=flags["shard"],
    )


def _check_text(flags: dict[str, Any]) -> None:
    """Refuse text that is no UTF-8: no input holds such a key, and no model reads such a prompt."""
    for name in ("prompt_field", "id_field", "system_prompt", "stop", "chat_template"):
        values = flags.get(name) or ()
        if name == "chat_template" and "{" not in values:
            continue  # the name of a file
        for value in (values,) if isinstance(values, str) else values:
            if legible(value) != value:
                raise UsageError(f"--{name.replace('_', '-')}: {legible(value)} is not UTF-8")


def _check_output_flags(flags: dict[str, Any]) -> None:
    """Refuse contradictions about earlier outputs, and flags of files where there is none."""
    again = [name for name in ("resume", "retry_errors") if flags[name]]
    if again and flags["overwrite"]:
        raise UsageError(f"--{again[0].replace('_', '-')} and --overwrite exclude each other")
    if flags["output"] not in (None, "-"):
        return
    needs_file = ["resume", "overwrite", "retry_errors"]
    if flags["order"] == "input":
        needs_file.append("order")
    for name in needs_file:
        if flags[name]:
            raise UsageError(
                f"--{name.replace('_', '-')} needs an output file",
                "give -o FILE; on standard output rows come as they finish",
            )


def sampling_of(given: dict[str, Any], model_defaults: dict[str, Any]) -> SamplingParams:
    """Sampling flags over the defaults of a model, which have been checked.

    Raises:
        UsageError: one of them is out of range.
    """
    from specgen.sampling_params import SamplingParams

    try:
        return SamplingParams.from_mapping(given, SamplingParams.from_mapping(model_defaults))
    except ValueError as error:
        raise UsageError(_as_flags(str(error))) from error


def _as_flags(message: str) -> str:
    """A message about `"top_p"` as one about `--top-p`."""
    return re.sub(r'"([a-z_]+)"', lambda m: "--" + m[1].replace("_", "-"), message, count=1)

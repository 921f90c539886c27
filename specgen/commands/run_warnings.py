"""What `specgen run` warns of: before the first row and when all are done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from specgen.config import EngineConfig
from specgen.load_format import is_dummy
from specgen.wording import counted

if TYPE_CHECKING:
    from specgen.display import Display
    from specgen.job import Job


def warn_before(config: EngineConfig, settings: Mapping[str, Any], display: Display) -> None:
    """Say what was decided that changes the text, and which flags do nothing here."""
    if config.rejection_sample == "synthetic":
        display.warn("--rejection-sample synthetic: the output does not follow the target")
    if is_dummy(config.load_format):
        display.warn(
            f"--load-format {config.load_format}: the weights are random, and so is the text"
        )
    _warn_of_idle_flags(config, settings, display)
    _warn_of_ignored(settings["generation_config_ignored"], display)
    for warning in settings.get("model_warnings", ()):
        display.warn(warning)
    _warn_of_template(settings, display)


def warn_after(
    changed_inputs: Iterable[str], num_memory_faults: int, job: Job, display: Display
) -> None:
    """Say what happened during the run."""
    if job.stats.rows_truncated:
        cut = counted(job.stats.rows_truncated, "prompt")
        left = counted(job.stats.least_prompt_left, "token")
        display.warn(
            f"{cut} cut at the left, down to {left} (their rows: metrics.prompt_truncated)",
            "what is kept is what max_tokens leaves of the model's length",
        )
    for path in changed_inputs:
        display.warn(
            f"{path}: was changed during the run, its rows are of what was read",
            "--retry-errors runs rows of lines that differ now",
        )
    if num_memory_faults:
        display.warn(
            f"memory ran out in {num_memory_faults:,} steps, done again with fewer rows",
            "give a smaller --max-num-seqs or --max-num-batched-tokens",
        )
    if not job.num_rows:
        display.warn("the input holds no rows")


def _warn_of_idle_flags(
    config: EngineConfig, settings: Mapping[str, Any], display: Display
) -> None:
    usual = EngineConfig.gpu_memory_utilization
    if settings.get("device") == "cpu" and config.gpu_memory_utilization != usual:
        display.warn(
            "--gpu-memory-utilization means nothing on a CPU",
            "--max-num-seqs and --max-num-batched-tokens bound the memory",
        )


def _warn_of_ignored(keys: Mapping[str, Any], display: Display) -> None:
    """A model's own sampling that is not applied changes its text: say so."""
    if keys:
        listed = ", ".join(f"{key} {value}" for key, value in keys.items())
        display.warn(
            f"the model's generation_config.json asks for {listed}: not applied",
            "--generation-config none leaves all of its sampling out, and heeds its "
            "end-of-sequence ids alone",
        )


def _warn_of_template(settings: Mapping[str, Any], display: Display) -> None:
    """Say before the first row what will become of `messages` that nothing can render."""
    if (fault := settings.get("chat_template_fault")) is not None:
        hint = 'rows with "messages" will fail: give --chat-template'
        display.warn(f"the model's chat template is not a Jinja template: {fault}", hint)

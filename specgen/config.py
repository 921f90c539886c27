"""Frozen configurations: what the user asked for, and what that resolved to on this machine.

``EngineConfig`` holds flags as given; ``specgen.resolve.resolve`` combines it with checkpoint facts
and hardware into one ``ResolvedConfig``. Nothing here imports torch, so that the command line can
build and check a configuration instantly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from specgen.errors import UsageError
from specgen.load_format import LOAD_FORMATS
from specgen.synthetic import (
    MAX_SPECULATIVE_TOKENS,
    SyntheticAcceptance,
    check_synthetic_acceptance,
)

DraftSample = Literal["greedy", "gumbel"]
RejectionSample = Literal["standard", "synthetic"]
Overlong = Literal["error", "truncate-left"]

DTYPES = ("auto", "float32", "bfloat16", "float16")
# What the device counts rows, positions and blocks with.
_MOST = (1 << 31) - 1
DEVICES = ("auto", "cuda", "cpu")
DRAFT_SAMPLES = ("greedy", "gumbel")
REJECTION_SAMPLES = ("standard", "synthetic")
KERNEL_BACKENDS = ("auto", "triton", "reference")
OVERLONG = ("error", "truncate-left")
GENERATION_CONFIGS = ("auto", "none")
# Fields that say something of a draft instead of its configuration.
DRAFT_OVERRIDES = (
    "draft_revision",
    "draft_aux_layers",
    "draft_rope_theta",
    "draft_norm_output",
    "draft_norm_before_residual",
)
_AUTO = re.compile(r"auto(?::(\d{1,4}))?", re.ASCII)


@dataclass(frozen=True)
class EngineConfig:
    """What the user asked for; ``None`` means "choose for me".

    Attributes:
        model: Directory or hub id of the target; ``None`` is the built-in pair.
        draft_model: Directory or hub id of the EAGLE draft; ``None`` means the built-in draft with
            the built-in target, and none with a given ``model``.
        tokenizer: Directory or hub id of the tokenizer, when it is not the model's.
        revision: Branch, tag or commit of a model (and tokenizer) that comes from the hub.
        draft_revision: The same of a draft.
        max_model_len: Longest sequence, prompt and completion together, in tokens.
        max_num_seqs: Rows that decode at the same time.
        max_num_batched_tokens: Prompt tokens of one prefill step.
        num_speculative_tokens: k, the drafts a row proposes in a step; ``auto`` or ``auto:N``
            chooses it step by step, up to N.
        synthetic_acceptance: What the rule ``synthetic`` accepts: a mean length from 1 to k + 1, or
            k rates that do not increase. Its output does not follow the target.
        draft_aux_layers: Boundaries 0..layers of the target whose streams the draft reads, where
            its configuration is wrong.
        draft_rope_theta: Base of the draft's rope, likewise.
        draft_norm_output: Whether the draft's later passes take its normed state, likewise.
        draft_norm_before_residual: Whether the draft's residual is its normed state, likewise.
        skip_tokenizer_init: Load no tokenizer; prompts must be token ids, and text stays empty.
        num_kv_blocks: Cache blocks; ``None`` sizes the cache from memory.
        block_size: Tokens in a cache block.
        seed: Run seed; rows without a seed of their own hash it with their index.
        prefix_caching: Prompts that begin alike share the cache blocks of their beginning.
        cuda_graphs: Replay the decode step as one CUDA graph (CUDA only).

    Raises:
        UsageError: a value is outside its range.
    """

    model: str | None = None
    draft_model: str | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    draft_revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    trust_remote_code: bool = False
    generation_config: str = "auto"
    chat_template: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    num_kv_blocks: int | None = None
    block_size: int = 16
    num_speculative_tokens: int | str | None = None
    draft_sample: DraftSample = "greedy"
    rejection_sample: RejectionSample = "standard"
    synthetic_acceptance: SyntheticAcceptance | None = None
    draft_aux_layers: tuple[int, ...] | None = None
    draft_rope_theta: float | None = None
    draft_norm_output: bool | None = None
    draft_norm_before_residual: bool | None = None
    no_draft: bool = False
    seed: int = 0
    overlong: Overlong = "error"
    kernel_backend: str = "auto"
    prefix_caching: bool = True
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        """Check every field that can be checked without a checkpoint."""
        for name, allowed in (
            ("dtype", DTYPES),
            ("device", DEVICES),
            ("load_format", LOAD_FORMATS),
            ("generation_config", GENERATION_CONFIGS),
            ("draft_sample", DRAFT_SAMPLES),
            ("rejection_sample", REJECTION_SAMPLES),
            ("overlong", OVERLONG),
            ("kernel_backend", KERNEL_BACKENDS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                choices = ", ".join(allowed)
                raise UsageError(f"{_flag(name)} must be one of {choices}, got {value!r}")
        for name, minimum in (
            ("max_model_len", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("num_kv_blocks", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise UsageError(f"{_flag(name)} must be at least {minimum}, got {value}")
            if value is not None and value > _MOST:
                raise UsageError(f"{_flag(name)} must be at most {_MOST:,}, got {value}")
        parse_num_speculative_tokens(self.num_speculative_tokens)
        is_synthetic = self.rejection_sample == "synthetic"
        if self.no_draft and (is_synthetic or self.synthetic_acceptance is not None):
            given = "--rejection-sample synthetic" if is_synthetic else "--synthetic-acceptance"
            raise UsageError(
                f"{given} needs a draft: --no-draft is given", "leave one of the two out"
            )
        if is_synthetic != (self.synthetic_acceptance is not None):
            raise UsageError(
                "--rejection-sample synthetic and --synthetic-acceptance belong together",
                "give both, or neither",
            )
        if self.synthetic_acceptance is not None:
            check_synthetic_acceptance(self.synthetic_acceptance)
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise UsageError("--skip-tokenizer-init and --tokenizer contradict each other")
        if self.no_draft and self.draft_model is not None:
            raise UsageError("--no-draft and --draft-model contradict each other")
        layers = self.draft_aux_layers
        if layers is not None and (not layers or min(layers) < 0 or len(set(layers)) < len(layers)):
            raise UsageError(
                f"--draft-aux-layers must be distinct boundaries from 0, got {list(layers)}"
            )
        theta = self.draft_rope_theta
        if theta is not None and not 0.0 < theta < float("inf"):
            raise UsageError(f"--draft-rope-theta must be a finite number above 0, got {theta}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise UsageError(
                "--gpu-memory-utilization must be above 0 and at most 1, "
                f"got {self.gpu_memory_utilization}"
            )
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise UsageError(f"--block-size must be a power of two, got {self.block_size}")
        if not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"--seed must fit in 64 bits, got {self.seed}")


@dataclass(frozen=True)
class ResolvedConfig:
    """Every choice made: the flags, the checkpoint's facts and the machine put together.

    Attributes:
        model_dir: Local directory of the target.
        draft_dir: Local directory of the draft; ``None`` decodes without one.
        device: ``"cpu"`` or ``"cuda"``.
        dtype: torch dtype name of weights and caches.
        eos_token_ids: All ids that end a sequence, ascending.
        num_speculative_tokens: k, or the largest if it is chosen step by step; 0 without a draft.
        auto_draft_length: Whether it is chosen step by step.
        synthetic_rates: The k unconditional rates of the rule ``synthetic``; ``None`` under others.
    """

    model_dir: str
    draft_dir: str | None
    tokenizer_dir: str
    skip_tokenizer_init: bool
    device: str
    dtype: str
    load_format: str
    kernel_backend: str
    trust_remote_code: bool
    chat_template: str | None
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    num_kv_blocks: int | None
    block_size: int
    num_speculative_tokens: int
    auto_draft_length: bool
    draft_sample: DraftSample
    rejection_sample: RejectionSample
    synthetic_rates: tuple[float, ...] | None
    draft_aux_layers: tuple[int, ...] | None
    draft_rope_theta: float | None
    draft_norm_output: bool | None
    draft_norm_before_residual: bool | None
    seed: int
    overlong: Overlong
    prefix_caching: bool
    cuda_graphs: bool
    eos_token_ids: tuple[int, ...]
    vocab_size: int


def parse_num_speculative_tokens(value: int | str | None) -> tuple[bool | None, int | None]:
    """Whether k is chosen step by step, and k or its limit; None where it was not said.

    Raises:
        UsageError: it is neither a number nor ``auto`` or ``auto:N``, or out of range.
    """
    if value is None:
        return None, None
    auto, k, least = False, value, 0
    if isinstance(value, str):
        found = _AUTO.fullmatch(value)
        if found is None:
            raise UsageError(
                "--num-speculative-tokens must be a number, auto or auto:N, with N from 1 to "
                f"{MAX_SPECULATIVE_TOKENS}, got {value!r}"
            )
        if found[1] is None:
            return True, None
        auto, k, least = True, int(found[1]), 1
    assert isinstance(k, int)
    if k < least:
        raise UsageError(
            f"--num-speculative-tokens must be at least {least}{' with auto' * auto}, got {value}",
            "0 alone runs without a draft" if auto else None,
        )
    if k > MAX_SPECULATIVE_TOKENS:
        raise UsageError(
            f"--num-speculative-tokens must be at most {MAX_SPECULATIVE_TOKENS}, got {value}",
            f"give {'auto:' if auto else ''}{MAX_SPECULATIVE_TOKENS} or less",
        )
    return auto, k


def refuse_idle_draft_settings(config: EngineConfig) -> None:
    """Refuse settings of a draft where there is none: they would change nothing.

    Raises:
        UsageError: naming the flag.
    """
    if config.no_draft:
        reason, hint = "--no-draft is given", "leave one of the two out"
    elif config.model is not None and config.draft_model is None:
        reason, hint = "--model without --draft-model has no draft", "give --draft-model"
    else:
        return
    if config.num_speculative_tokens:
        raise UsageError(f"--num-speculative-tokens needs a draft: {reason}", hint)
    if config.draft_sample != "greedy":
        raise UsageError(f"--draft-sample needs a draft: {reason}", hint)
    if config.rejection_sample == "synthetic":
        raise UsageError(f"--rejection-sample synthetic needs a draft: {reason}", hint)
    for name in DRAFT_OVERRIDES:
        if getattr(config, name) is not None:
            raise UsageError(f"{_flag(name)} needs a draft: {reason}", hint)


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")

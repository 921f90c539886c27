"""Putting the engine together: weights, caches, device rows and the parts that work on them."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from specgen.config import EngineConfig, ResolvedConfig
from specgen.errors import ModelError
from specgen.kernels import select_kernels
from specgen.kernels.trial import try_triton
from specgen.load_format import is_dummy
from specgen.models.config import DraftConfig, ModelConfig
from specgen.models.draft import DraftModel, DraftOverrides
from specgen.models.registry import read_model_config
from specgen.models.target import TargetModel
from specgen.models.weights import inspect_draft, load_draft, load_target
from specgen.pipeline.block_manager import BlockManager
from specgen.pipeline.cpu_threads import fit_cpu_threads
from specgen.pipeline.cuda_capture import CudaCapture
from specgen.pipeline.decode_graphs import DecodeGraphs
from specgen.pipeline.draft_length import AutoDraftLength, DraftLength, FixedDraftLength
from specgen.pipeline.drafter import Drafter
from specgen.pipeline.in_flight import InFlight
from specgen.pipeline.kv_cache import KVCaches, allocate, cache_bytes, num_blocks_that_fit
from specgen.pipeline.memory_fit import RowSizes, check_num_seqs
from specgen.pipeline.model_runner import ModelRunner
from specgen.pipeline.prefill_graphs import PrefillGraphs, most_prefill_tokens
from specgen.pipeline.rejection_sampler import RejectionSampler
from specgen.pipeline.request_state import RequestState
from specgen.pipeline.scheduler import Scheduler
from specgen.pipeline.shared_prefix import SharedRows
from specgen.pipeline.step_record import record_width
from specgen.pipeline.tokenization import NoTokenizer, Tokenizer
from specgen.resolve import eos_remark

_MIN_PREFILL_TOKENS = {"cpu": 256, "cuda": 1024}
# A CPU is host and device at once: there is nothing to hide.
_MAX_LAG = {"cpu": 0, "cuda": 1}


@dataclass(frozen=True)
class Pipeline:
    """Everything an engine drives, built for one resolved config."""

    config: ResolvedConfig
    tokenizer: Tokenizer | NoTokenizer
    target: TargetModel
    draft: DraftModel | None
    draft_config: DraftConfig | None
    caches: KVCaches
    state: RequestState
    scheduler: Scheduler
    runner: ModelRunner
    in_flight: InFlight
    graphs: DecodeGraphs | None
    prefill_graphs: PrefillGraphs | None
    kernel_backend: str

    @property
    def num_cache_tokens(self) -> int:
        """Tokens the cache holds."""
        return self.scheduler.blocks.num_blocks * self.config.block_size

    @property
    def max_num_waiting(self) -> int:
        """Rows to tokenise ahead: no slot waits for a prompt, and the longest of many go first."""
        return 4 * self.config.max_num_seqs

    @property
    def max_num_rows(self) -> int:
        """Rows that a decode step can hold."""
        return self.config.max_num_seqs if self.graphs is None else self.graphs.max_num_rows

    @property
    def num_graphs(self) -> int:
        """Captured decode steps."""
        return 0 if self.graphs is None else self.graphs.num_graphs

    def forget_graphs(self) -> None:
        """Drop captured graphs after a persistent tensor was replaced."""
        if self.graphs is not None:
            self.graphs.clear()
        if self.prefill_graphs is not None:
            self.prefill_graphs.clear()

    def release_memory(self) -> None:
        """Give back all memory that is not in use by weights, caches and rows."""
        self.forget_graphs()
        # A step that failed may be held, with all its tensors, by cycles of its error's frames.
        gc.collect()
        if self.config.device == "cuda":
            torch.cuda.empty_cache()

    def warnings(self) -> list[str]:
        """What is odd in the models' files, though they run; one sentence each."""
        remark = eos_remark(self.config)
        of_draft = () if self.draft_config is None else self.draft_config.warnings
        return [*([] if remark is None else [remark]), *of_draft]

    def describe(self) -> dict[str, Any]:
        """Effective settings, JSON-ready."""
        return {
            **asdict(self.config),
            "faithful": self.config.synthetic_rates is None,
            "kernel_backend": self.kernel_backend,
            "cpu_threads": torch.get_num_threads() if self.config.device == "cpu" else None,
            "num_kv_blocks": self.scheduler.blocks.num_blocks,
            "num_cache_tokens": self.num_cache_tokens,
            "draft_logits_bytes": self.state.draft_logits_bytes,
            "adds_bos": self.tokenizer.adds_bos,
            "has_chat_template": self.tokenizer.has_chat_template,
            "chat_template_fault": self.tokenizer.template_fault,
            "target_backend": self.target.config.backend,
            "target_notes": list(self.target.notes),
            "draft_layout": None if self.draft_config is None else self.draft_config.layout,
            "draft_notes": [] if self.draft_config is None else list(self.draft_config.notes),
            "model_warnings": self.warnings(),
        }


def build_pipeline(config: ResolvedConfig) -> Pipeline:
    """Load both models and allocate everything of ``config``.

    Raises:
        ModelError: a checkpoint is incomplete, or draft, tokenizer and target do not fit.
        EnvironmentProblem: the cache does not fit the memory, or Triton does not work.
    """
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    kernels = select_kernels(device, config.kernel_backend)
    if device.type == "cuda" and kernels.backend == "triton":
        try_triton(config.device)
    tokenizer = _tokenizer(config)
    overrides = draft_overrides(config)
    draft_config = None
    if config.draft_dir is not None:
        draft_config = inspect_draft(
            config.draft_dir,
            read_model_config(config.model_dir, trust_remote_code=config.trust_remote_code),
            load_format=config.load_format,
            overrides=overrides,
        )
        _check_headers(config, draft_config, overrides)
    target = load_target(
        config.model_dir,
        device=device,
        dtype=dtype,
        kernels=kernels,
        aux_layers=() if draft_config is None else draft_config.aux_layers,
        max_model_len=config.max_model_len,
        load_format=config.load_format,
        trust_remote_code=config.trust_remote_code,
    )
    if device.type == "cpu":
        fit_cpu_threads(sum(weight.numel() for weight in target.parameters()))
    draft = None
    if config.draft_dir is not None:
        draft = load_draft(
            config.draft_dir,
            target,
            device=device,
            dtype=dtype,
            kernels=kernels,
            load_format=config.load_format,
            overrides=overrides,
        )
        draft_config = draft.config
    return _assemble(config, tokenizer, target, draft, draft_config)


def _check_headers(config: ResolvedConfig, draft: DraftConfig, overrides: DraftOverrides) -> None:
    """Compare names and shapes of all tensors first: a draft that is amiss shows in a second.

    Raises:
        ModelError: as loading would, once the target's weights are read.
    """
    if is_dummy(config.load_format):
        return
    assert config.draft_dir is not None
    options: dict[str, Any] = {
        "device": "meta",
        "dtype": config.dtype,
        "kernels": select_kernels("cpu"),
    }
    skeleton = load_target(
        config.model_dir,
        aux_layers=draft.aux_layers,
        max_model_len=1,
        trust_remote_code=config.trust_remote_code,
        **options,
    )
    load_draft(config.draft_dir, skeleton, overrides=overrides, **options)


def _tokenizer(config: ResolvedConfig) -> Tokenizer | NoTokenizer:
    if config.skip_tokenizer_init:
        return NoTokenizer()
    tokenizer = Tokenizer(
        config.tokenizer_dir,
        chat_template=config.chat_template,
        trust_remote_code=config.trust_remote_code,
    )
    check_vocabulary(tokenizer, config)
    return tokenizer


def draft_overrides(config: ResolvedConfig | EngineConfig) -> DraftOverrides:
    """What the flags say of a draft instead of its configuration."""
    return DraftOverrides(
        aux_layers=config.draft_aux_layers,
        rope_theta=config.draft_rope_theta,
        norm_output=config.draft_norm_output,
        norm_before_residual=config.draft_norm_before_residual,
    )


def check_vocabulary(tokenizer: Tokenizer, config: ResolvedConfig) -> None:
    """Refuse a tokenizer of another model.

    Embeddings are padded by a few hundred rows, never by a third; a tokenizer is never the larger.

    Raises:
        ModelError: naming both sizes.
    """
    num_tokens, num_rows = len(tokenizer), config.vocab_size
    if num_tokens > num_rows or 4 * num_tokens < 3 * num_rows:
        raise ModelError(
            f"{config.tokenizer_dir}: the tokenizer has {num_tokens} tokens, "
            f"the model's embedding {num_rows}",
            "give the tokenizer that belongs to the model in --tokenizer",
        )


def _assemble(
    config: ResolvedConfig,
    tokenizer: Tokenizer | NoTokenizer,
    target: TargetModel,
    draft: DraftModel | None,
    draft_config: DraftConfig | None,
) -> Pipeline:
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    kernels = select_kernels(device, config.kernel_backend)
    k, block_size = config.num_speculative_tokens, config.block_size
    sizes = RowSizes.of(config, target, draft_config)
    max_blocks = sizes.max_blocks
    check_num_seqs(
        config.max_num_seqs,
        available=cache_bytes(device, config.gpu_memory_utilization),
        bytes_per_row=sizes.state_bytes,
        step_bytes=lambda num_seqs: step_bytes(
            replace(config, max_num_seqs=num_seqs), target.config
        ),
        cache_bytes=(config.num_kv_blocks or max_blocks) * sizes.block_bytes,
    )
    state = RequestState(
        max_num_seqs=config.max_num_seqs,
        max_blocks=max_blocks,
        num_speculative_tokens=k,
        device=device,
        draft_logits_shape=sizes.draft_logits_shape,
        kept_pairs_shape=sizes.kept_pairs_shape,
    )
    num_blocks = config.num_kv_blocks or num_blocks_that_fit(
        sizes.block_bytes,
        block_size=block_size,
        device=device,
        gpu_memory_utilization=config.gpu_memory_utilization,
        step_bytes=step_bytes(config, target.config),
        wanted=config.max_num_seqs * max_blocks,
        needed=max_blocks,
        lookahead=max_blocks * block_size - config.max_model_len,
    )
    caches = KVCaches(
        target=allocate(target, num_blocks, block_size, dtype, device),
        draft=() if draft is None else allocate(draft, num_blocks, block_size, dtype, device),
    )
    drafter = None
    if draft is not None:
        drafter = Drafter(
            draft,
            caches.draft,
            kernels,
            state,
            draft_sample=config.draft_sample,
            block_size=block_size,
        )
    graphs, prefill_graphs = None, None
    if config.cuda_graphs and target.capturable:
        capture = CudaCapture(device)
        graphs = DecodeGraphs(config.max_num_seqs, device, capture)
        num_weights = sum(weight.numel() for weight in target.parameters())
        prefill_graphs = PrefillGraphs(
            min(
                config.max_num_batched_tokens,
                most_prefill_tokens(num_weights, target.num_layers),
            ),
            config.max_num_seqs,
            sizes.max_context_len,
            capture,
        )
    shared_rows = None
    if config.prefix_caching:
        shared_rows = SharedRows(
            max_num_seqs=config.max_num_seqs,
            max_blocks=max_blocks,
            block_size=block_size,
            device=device,
        )
    runner = ModelRunner(
        target,
        caches.target,
        kernels,
        state,
        RejectionSampler(
            kernels,
            state,
            None if draft is None else draft.draft_ids,
            config.vocab_size,
            config.synthetic_rates,
        ),
        drafter,
        block_size=block_size,
        vocab_size=config.vocab_size,
        max_context_len=sizes.max_context_len,
        graphs=graphs,
        prefill_graphs=prefill_graphs,
        shared_rows=shared_rows,
    )
    draft_length: DraftLength = FixedDraftLength(k)
    if config.auto_draft_length:
        draft_length = AutoDraftLength(k, config.max_num_seqs, _measure(runner))
    scheduler = Scheduler(
        block_manager=BlockManager(num_blocks, block_size),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_speculative_tokens=k,
        draft_length=draft_length,
        min_prefill_tokens=_MIN_PREFILL_TOKENS[config.device],
    )
    return Pipeline(
        config=config,
        tokenizer=tokenizer,
        target=target,
        draft=draft,
        draft_config=draft_config,
        caches=caches,
        state=state,
        scheduler=scheduler,
        runner=runner,
        in_flight=InFlight(
            _MAX_LAG[config.device],
            max_num_rows=config.max_num_seqs,
            max_width=record_width(k),
            device=device,
        ),
        graphs=graphs,
        prefill_graphs=prefill_graphs,
        kernel_backend=kernels.backend,
    )


def _measure(runner: ModelRunner) -> Callable[[int, int], float]:
    def measure(num_rows: int, k: int) -> float:
        try:
            return runner.time_inert_step(num_rows, k)
        except torch.OutOfMemoryError:
            return math.inf  # a k that is never to be chosen

    return measure


def step_bytes(config: ResolvedConfig, model: ModelConfig) -> int:
    """Device memory to keep free of the cache for temporaries; a CPU takes it as it needs it."""
    return activation_bytes(config, model) if config.device == "cuda" else 0


def activation_bytes(config: ResolvedConfig, model: ModelConfig) -> int:
    """A generous bound on the temporaries of the largest prefill and decode step."""
    itemsize: int = getattr(torch, config.dtype).itemsize
    decode_rows = config.max_num_seqs * (config.num_speculative_tokens + 1)
    num_tokens = max(config.max_num_batched_tokens, decode_rows)
    logits = decode_rows * config.vocab_size * (itemsize + 4)
    return num_tokens * model.activation_width * itemsize + logits

"""Whether what is to be measured fits the machine, said before any weight is made or read."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from specgen.bench.jobs import Job
from specgen.config import ResolvedConfig
from specgen.errors import UsageError
from specgen.kernels import select_kernels
from specgen.models.host_memory import refuse_what_does_not_fit
from specgen.models.registry import read_model_config
from specgen.models.weights import inspect_draft, load_draft, load_target
from specgen.pipeline.kv_cache import cache_bytes
from specgen.pipeline.loading import draft_overrides, step_bytes
from specgen.pipeline.memory_fit import RowSizes

__all__ = ["check_batch", "check_lengths", "estimate_num_blocks"]


def check_lengths(jobs: list[Job], longest_context: int) -> None:
    """Refuse rows beyond the model's positions.

    Raises:
        UsageError: with the length that would fit.
    """
    longest = max(jobs, key=lambda job: job.longest)
    if longest.longest <= longest_context:
        return
    if longest.name != "fixed":
        raise UsageError(
            f"--job {longest.name} has rows of {longest.longest:,} tokens, "
            f"the model takes {longest_context:,}",
            "choose a model with more positions",
        )
    input_len, output_len = longest.lengths[0]
    room = longest_context - output_len
    raise UsageError(
        f"--input-len {input_len} and --output-len {output_len} are {longest.longest:,} tokens, "
        f"the model takes {longest_context:,}",
        f"give --input-len {room}" if room > 0 else f"give at most {longest_context} in all",
    )


def check_batch(jobs: list[Job], config: ResolvedConfig, num_blocks: int) -> None:
    """Refuse a batch whose rows cannot all be in the cache at their full length.

    Raises:
        UsageError: with the batch that would fit.
    """
    for job in jobs:
        if job.batch is None:
            continue  # a whole job may queue
        at_once = min(job.batch, config.max_num_seqs)
        lookahead = 2 * config.num_speculative_tokens
        blocks_of_lookahead = -(-(1 + lookahead) // config.block_size)
        blocks_per_row = -(-(job.longest + lookahead) // config.block_size)
        fitting = num_blocks // blocks_per_row
        if fitting >= at_once:
            continue
        ahead = f" with {lookahead} ahead for drafts" if lookahead else ""
        remedies = [f"--batch-size {fitting}", "shorter rows"]
        if not fitting:
            rows = min(at_once, max(num_blocks // (2 * blocks_of_lookahead), 1))
            longest = num_blocks // rows * config.block_size - lookahead
            remedies = [f"--batch-size {rows} with rows of at most {longest}"]
            if longest < 2:
                remedies = ["a machine with more memory"]
        if config.device == "cuda":
            remedies.append("a higher --gpu-memory-utilization")
        raise UsageError(
            f"--batch-size {job.batch}: the cache holds {num_blocks * config.block_size:,} tokens, "
            f"that is {fitting} rows of {job.longest:,} in blocks of {config.block_size}{ahead}",
            f"give {' or '.join(remedies)}",
        )


def estimate_num_blocks(config: ResolvedConfig) -> int:
    """Cache blocks there will be room for, from configurations and headers alone.

    Raises:
        EnvironmentProblem: on a CPU, whose cache has a size of its own, the weights do not fit.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    device = torch.device(config.device)
    target = read_model_config(config.model_dir, trust_remote_code=config.trust_remote_code)
    overrides = draft_overrides(config)
    head = None
    if config.draft_dir is not None:
        head = inspect_draft(
            config.draft_dir, target, load_format=config.load_format, overrides=overrides
        )
    sizes = RowSizes.of(config, target, head)
    room = cache_bytes(device, config.gpu_memory_utilization) - step_bytes(config, target)
    skeletons: list[nn.Module] = []
    if target.backend == "native":  # others show their size only once they are loaded
        skeletons += _skeletons(config, () if head is None else head.aux_layers)
    if device.type == "cuda":
        room -= (config.max_num_seqs + 1) * sizes.state_bytes
        weights = {id(w): w.nbytes for module in skeletons for w in module.parameters()}
        room -= sum(weights.values())
    else:
        for module, directory in zip(skeletons, (config.model_dir, config.draft_dir), strict=False):
            refuse_what_does_not_fit(module, str(directory))
    return max(room, 0) // sizes.block_bytes


def _skeletons(config: ResolvedConfig, aux_layers: tuple[int, ...]) -> Iterator[nn.Module]:
    """Return target and draft on tensors without memory."""
    kernels = select_kernels("cpu", "reference")
    target = load_target(
        config.model_dir,
        device="meta",
        dtype=config.dtype,
        kernels=kernels,
        aux_layers=aux_layers,
        load_format=config.load_format,
    )
    assert isinstance(target, nn.Module)
    yield target
    if config.draft_dir is not None:
        draft = load_draft(
            config.draft_dir,
            target,
            device="meta",
            dtype=config.dtype,
            kernels=kernels,
            load_format=config.load_format,
            overrides=draft_overrides(config),
        )
        assert isinstance(draft, nn.Module)
        yield draft

"""Paged key/value caches of target and draft: how many blocks fit, and their tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specgen.errors import EnvironmentProblem
from specgen.models.attention import KVCache
from specgen.models.target import CachedModel

__all__ = [
    "CachedModel",
    "KVCache",
    "KVCaches",
    "allocate",
    "block_bytes",
    "cache_bytes",
    "num_blocks_that_fit",
]

_CPU_CACHE_BYTES = 2 << 30
_GPU_RESERVE_BYTES = 1 << 30  # kernels, graph pools, fragmentation


@dataclass(frozen=True)
class KVCaches:
    """Per-layer ``(keys, values)``, each ``[num_blocks + 1, block_size, num_kv_heads, head_dim]``.

    Block ``num_blocks`` is never handed out: twins send the writes of padding tokens there.
    """

    target: tuple[KVCache, ...]
    draft: tuple[KVCache, ...]


def block_bytes(model: CachedModel, block_size: int, dtype: torch.dtype) -> int:
    """Bytes one cache block takes over all layers of ``model``."""
    return 2 * model.num_layers * block_size * model.num_kv_heads * model.head_dim * dtype.itemsize


def cache_bytes(device: torch.device, gpu_memory_utilization: float) -> int:
    """Bytes that caches and temporaries may take beside what the device holds already."""
    if device.type != "cuda":
        return _CPU_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return int(total * gpu_memory_utilization) - (total - free) - _GPU_RESERVE_BYTES


def num_blocks_that_fit(
    bytes_per_block: int,
    *,
    block_size: int,
    device: torch.device,
    gpu_memory_utilization: float,
    step_bytes: int,
    wanted: int,
    needed: int,
    lookahead: int,
) -> int:
    """Size the cache from memory.

    Args:
        bytes_per_block: Of a block over all layers of all models.
        block_size: Tokens of a block.
        device: Whose memory it is.
        gpu_memory_utilization: Share of a GPU's memory to use in all.
        step_bytes: To keep free for the largest step's temporary tensors.
        wanted: Blocks that every slot at full length would use; more are useless.
        needed: Blocks of one row at full length; fewer are an error.
        lookahead: Tokens of those blocks that are beyond the full length.

    Raises:
        EnvironmentProblem: not even one row at full length fits.
    """
    available = cache_bytes(device, gpu_memory_utilization) - step_bytes
    num_blocks = min(wanted, available // bytes_per_block)
    if num_blocks < needed:
        fitting = num_blocks * block_size - lookahead
        shorter = f"give --max-model-len {fitting} or less, or lower" if fitting > 1 else "lower"
        raise EnvironmentProblem(
            f"the cache has room for {max(num_blocks, 0) * block_size} tokens, one row of "
            f"--max-model-len needs {needed * block_size}",
            f"{shorter} --max-num-seqs or --max-num-batched-tokens, "
            "or raise --gpu-memory-utilization",
        )
    return num_blocks


def allocate(
    model: CachedModel, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[KVCache, ...]:
    """Cache tensors of one model, zeroed: masked positions must hold finite numbers."""
    shape = (num_blocks + 1, block_size, model.num_kv_heads, model.head_dim)
    return tuple(
        (
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
        )
        for _ in range(model.num_layers)
    )

"""Compile the model and batch kernels for a GPU that need not be there; print their names.

Run as a program, outside Triton's interpreter. The wrappers run on CPU tensors, and each launch is
replaced by a compilation for the types and constants of that launch.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from specgen.kernels import (
    KERNEL_MODULES,
    attention_parts,
    linear,
    prefill_attention,
    row_attention,
    select_kernels,
    shared_attention,
)
from specgen.kernels.batch_types import KeptPairs, SharedPrefix

TARGET = GPUTarget("cuda", 90, 32)
# What a block gets on the smallest GPUs of capability 8.x, though the target here is 9.0.
MAX_SHARED_MEMORY = 99 * 1024
# Plans for products are for the GPUs that they were measured on, of capability 9.0.
MAX_SHARED_MEMORY_OF_PLANS = 227 * 1024
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "i1",
}
compiled: set[str] = set()


def compile_launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Stand-in for `JITFunction.run`."""
    values = dict(zip(self.arg_names, args, strict=False))
    options = {}
    for name, value in kwargs.items():
        (values if name in self.arg_names else options)[name] = value
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(self.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            # A CPU tensor stands for the interpreter to the attention kernels; here it does not.
            constants[(index,)] = False if parameter.name == "WIDEN" else value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(self, signature, constants, attributes)
    kernel = triton.compile(source, target=TARGET, options=options)
    name = f"{self.__module__}.{self.__name__}"
    is_plan = self.__module__ == linear.__name__
    if kernel.metadata.shared > (MAX_SHARED_MEMORY_OF_PLANS if is_plan else MAX_SHARED_MEMORY):
        raise RuntimeError(f"{name} wants {kernel.metadata.shared} bytes of shared memory")
    compiled.add(name)


def i32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def run_model_kernels(kernels: Any, dtype: torch.dtype, head_dim: int) -> None:
    rows, k, slots, heads, kv_heads = 2, 3, 4, 8, 2
    caches = torch.zeros(2, 9, 16, kv_heads, head_dim, dtype=dtype)
    tables = i32(slots, 40)
    q = torch.zeros(rows, k + 1, heads, head_dim, dtype=dtype)
    for bound in (64, 640):  # without and with a split context
        kernels.attention.decode_attention(
            q, *caches, tables, i32(rows), i32(rows), i32(rows), 0.1, bound
        )
    kernels.attention.decode_attention(
        q, *caches, tables, i32(rows), i32(rows), i32(rows), 0.1, 64, window=20, softcap=5.0
    )
    shared = SharedPrefix(i32(40), i32(1), torch.ones(slots, dtype=torch.bool))
    for bound in (64, 640):
        kernels.attention.decode_attention(
            q, *caches, tables, i32(rows), i32(rows), i32(rows), 0.1, bound, shared=shared
        )
    for options in ({}, {"window": 20, "softcap": 5.0}):
        kernels.attention.prefill_attention(
            q.flatten(0, 1),
            *caches,
            tables,
            i32(rows),
            i32(rows + 1),
            i32(rows),
            i32(rows),
            0.1,
            200,
            64,
            **options,
        )
    pairs, experts = i32(5 * 16), i32(5)
    weights = torch.zeros(4, 96, head_dim, dtype=dtype)
    kernels.grouped.grouped_linear(q.flatten(0, 2), weights, pairs, experts, 2)
    kernels.grouped.grouped_linear(q.flatten(0, 2), weights, i32(5 * 64), experts, 2)
    matrix = torch.zeros(2048, 4096, dtype=dtype)
    for num_rows in (1, 8, 32, 64):
        row = torch.zeros(num_rows, 4096, dtype=dtype)
        parts = kernels.linear.linear_parts(row, matrix)
        kernels.linear.linear(row, matrix, matrix[:, 0].contiguous())
        kernels.linear.linear_silu_mul(row, matrix)
    norm_weight = torch.ones(2048, dtype=dtype)
    kernels.norm.rms_norm_residual(parts, torch.zeros(64, 2048, dtype=dtype), norm_weight, 1e-5)
    x, weight = torch.zeros(3, 4096, dtype=dtype), torch.ones(4096, dtype=dtype)
    kernels.norm.rms_norm(x, weight, 1e-5)
    kernels.norm.rms_norm_residual(x, x, weight, 1e-5)
    kernels.pairs.norm_pairs(i32(3), x, x[0], x, x[0], 1e-5)
    kept = KeptPairs(torch.zeros(4, 8, 4096, dtype=dtype), i32(4, 8), i32(4, 8))
    active = torch.zeros(4, dtype=torch.bool)
    kernels.kept_pairs.keep_pairs(i32(3), i32(3), i32(3), active, x, kept)
    kernels.kept_pairs.take_pairs(i32(3), active, tables, kept, 16)
    kernels.activation.silu_mul(x)
    qkv = torch.zeros(3, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    table, positions = torch.zeros(50, head_dim), torch.zeros(3, dtype=torch.int64)
    rotary = (qkv, i32(3), table, positions, *caches, heads, kv_heads)
    kernels.rotary.rotary_write_cache(*rotary)
    head_norm = torch.ones(head_dim, dtype=dtype)
    kernels.rotary.rotary_write_cache(*rotary, head_norm, head_norm, 1e-6)


def run_batch_kernels(kernels: Any) -> None:
    rows, k, slots = 2, 3, 4
    active, tables = torch.ones(slots, dtype=torch.bool), i32(slots, 40)
    batch = kernels.batch_inputs
    batch.decode_inputs(
        i32(rows), i32(slots), i32(slots, k), i32(slots), i32(slots), active, tables, k, 16
    )
    batch.extend_inputs(i32(rows), i32(rows, k + 1), i32(rows), i32(rows), active, tables, 16)
    batch.draft_inputs(i32(rows), i32(slots), active, tables, 1, 16)
    seeds = torch.zeros(slots, dtype=torch.int64)
    batch.sampling_rows(i32(rows), torch.zeros(slots), seeds, i32(slots), i32(slots))
    drafts, usable = i32(k, rows), torch.ones(k, rows, dtype=torch.bool)
    for limit in (None, 30):
        kernels.commit.commit_drafts(
            i32(rows),
            drafts,
            usable,
            i32(slots),
            active,
            i32(slots),
            limit,
            i32(slots, k),
            i32(slots),
        )
    kernels.commit.commit_tokens(
        i32(rows),
        i32(rows, k + 1),
        i32(rows),
        torch.ones(rows, dtype=torch.bool),
        i32(rows),
        i32(slots, 2),
        i32(slots),
        i32(slots),
        i32(slots),
        active,
    )


def let_kernels_overlap(kernels: Any) -> None:
    """What a GPU of this capability would be asked for; tensors of a CPU ask for the opposite."""
    modules = [getattr(kernels, name) for name in KERNEL_MODULES]
    for module in [*modules, attention_parts, prefill_attention, row_attention, shared_attention]:
        if hasattr(module, "overlap_options"):
            module.overlap_options = lambda _: {"OVERLAP": True, "launch_pdl": True}


def main() -> None:
    JITFunction.run = compile_launch
    kernels = select_kernels("cpu", "triton")
    let_kernels_overlap(kernels)
    run_model_kernels(kernels, torch.bfloat16, 128)
    run_model_kernels(kernels, torch.float32, 32)
    run_model_kernels(kernels, torch.float16, 80)
    run_model_kernels(kernels, torch.bfloat16, 256)
    run_batch_kernels(kernels)
    json.dump(sorted(compiled), sys.stdout)


if __name__ == "__main__":
    main()

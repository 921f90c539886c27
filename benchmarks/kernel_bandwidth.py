"""How near the kernels of a step come to the memory's bandwidth, on Llama-3.1-8B shapes in bf16.

Every measurement names the bytes that have to be read at least; ``floor_ratio`` is its time over
the time that a copy takes for as many.

    python -m benchmarks.kernel_bandwidth --parts verification,noise,filter,products,decode
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import click
import torch
from torch.nn import functional

from benchmarks.gpu_timing import copy_bandwidth, graph_us
from benchmarks.record import write_record
from specgen.kernels import Kernels, select_kernels
from specgen.kernels.batch_types import SharedPrefix
from specgen.kernels.streams import DRAFT

VOCAB_SIZE = 128256
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2
PRODUCTS = {  # name: columns, K, gated, may come in parts
    "qkv": (6144, 4096, False, False),
    "out": (4096, 4096, False, True),
    "gate_up": (28672, 4096, True, False),
    "down": (4096, 14336, False, True),
    "lm_head": (VOCAB_SIZE, 4096, False, False),
}
DECODE_SHAPES = (  # rows, queries of a row, keys of a row
    (1, 1, 288),
    (8, 1, 288),
    (64, 1, 288),
    (256, 1, 288),
    (64, 4, 288),
    (256, 4, 288),
    (8, 1, 4000),
    (64, 1, 2000),
)
Row = dict[str, Any]


def bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def i32(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def _logits(rows: int, steps: int, shape: str) -> torch.Tensor:
    """Logits [rows, steps, V]: of a standard deviation of 3 (flat) or 1.3 (as random weights give
    them), or as of a model, a few 20 above the rest (peaked).
    """
    scale = {"flat": 3.0, "random": 1.3, "peaked": 1.0}[shape]
    logits = bf16(rows, steps, VOCAB_SIZE, scale=scale)
    if shape == "peaked":
        peaks = torch.randint(VOCAB_SIZE, (rows, steps, 3), device="cuda")
        logits.scatter_(-1, peaks, 20.0 + bf16(rows, steps, 3))
    return logits


def _verification_arguments(
    kernels: Kernels, rows: int, k: int, shape: str, drafted: str, temperature: float, seed: int
) -> tuple[Any, ...]:
    logits = _logits(rows, k + 1, shape)
    draft_logits = None
    slots, zeros = i32(range(rows)), i32([0] * rows)
    seeds = torch.arange(rows, device="cuda") + seed
    temperatures = torch.full((rows,), temperature, device="cuda")
    drafts = logits[:, :k].argmax(-1).int()
    if drafted == "gumbel":
        draft_logits = logits[:, :k] + bf16(rows, k, VOCAB_SIZE)
        for i in range(k):
            address = (seeds, zeros[:, None] + 50 + i, zeros, DRAFT, i, None, None)
            drafts[:, i : i + 1] = kernels.gumbel.gumbel_sample(
                draft_logits[:, i : i + 1], temperatures, *address
            )[0]
    else:
        drafts = torch.where(torch.rand(rows, k, device="cuda") < 0.5, drafts, 0).int()
    row_arguments = (temperatures, seeds, zeros + 50, zeros)
    lane_noise = kernels.lane_noise.largest_noise(zeros + k, *row_arguments, k + 1, VOCAB_SIZE)
    return (
        logits,
        drafts.contiguous(),
        zeros + k,
        draft_logits,
        slots,
        None,
        *row_arguments,
        None,
        None,
        lane_noise,
    )


def verification(kernels: Kernels) -> Iterator[Row]:
    """Judging drafts and drawing the token after them: ``floor_ratio`` counts reads of the logits.

    Half of the greedy drafts are the target's argmax, so that rows end at every step. Drafts drawn
    from logits of their own are judged by those, which are then read too. Four batches in turns:
    the slowest row decides the time of a batch.
    """
    for rows, k, shape, drafted, temperature in itertools.product(
        (1, 64, 256), (0, 3), ("flat", "random", "peaked"), ("greedy", "gumbel"), (0.0, 1.0)
    ):
        if k == 0 and drafted == "gumbel":
            continue
        batches = [
            _verification_arguments(kernels, rows, k, shape, drafted, temperature, 1_000 * i)
            for i in range(4)
        ]
        logits, draft_logits = batches[0][0], batches[0][3]
        is_read = draft_logits is not None and temperature > 0
        yield {
            "rows": rows,
            "k": k,
            "logits": shape,
            "drafts": drafted,
            "temperature": temperature,
            "us": graph_us(
                lambda a=batches: [kernels.rejection.rejection_sample(*batch) for batch in a], 4
            ),
            "bytes": logits.nbytes + (draft_logits.nbytes if is_read else 0),
        }


def noise(kernels: Kernels) -> Iterator[Row]:
    """Looking at the noise of a step, which a step does beside the target's pass."""
    for rows, k in itertools.product((1, 64, 256), (0, 3)):
        zeros = i32([0] * rows)
        temperatures, seeds = torch.ones(rows, device="cuda"), torch.arange(rows, device="cuda")
        arguments = (zeros + k, temperatures, seeds, zeros + 50, zeros, k + 1, VOCAB_SIZE)
        us = graph_us(lambda a=arguments: kernels.lane_noise.largest_noise(*a))
        num_bytes = kernels.lane_noise.largest_noise(*arguments).nbytes
        yield {"rows": rows, "k": k, "us": us, "bytes": num_bytes}


def filter_tokens(kernels: Kernels) -> Iterator[Row]:
    """Thresholds of top-k 50 and top-p 0.9 in logits like a model's: few large ones."""
    for rows in (1, 64):
        logits = bf16(rows, 1, VOCAB_SIZE, scale=3.0)
        arguments = (
            logits,
            torch.ones(rows, device="cuda"),
            i32([50] * rows),
            torch.full((rows,), 0.9, device="cuda"),
        )
        us = graph_us(lambda a=arguments: kernels.logits.filter_thresholds(*a))
        yield {"rows": rows, "us": us, "bytes": logits.nbytes}


def _all(product: Callable[..., object], x: torch.Tensor, weights: torch.Tensor) -> None:
    for weight in weights:
        product(x, weight)


def products(kernels: Kernels) -> Iterator[Row]:
    """The products of a layer, and the library's time for the same."""
    storage = bf16(600 << 20, scale=0.02)
    for rows in (1, 4, 16, 32, 64):
        for name, (width, inner, gated, in_parts) in PRODUCTS.items():
            copies = max(1, min(8, storage.numel() // (width * inner)))
            weights = storage[: copies * width * inner].view(copies, width, inner)
            x = bf16(rows, inner)
            ours = kernels.linear.linear_parts if in_parts else kernels.linear.linear
            if gated:
                ours = kernels.linear.linear_silu_mul

            def library(weight: torch.Tensor, x: torch.Tensor = x, gated: bool = gated) -> object:
                out = functional.linear(x, weight)
                return kernels.activation.silu_mul(out) if gated else out

            yield {
                "rows": rows,
                "product": name,
                "us": graph_us(lambda a=(ours, x, weights): _all(*a), copies),
                "library_us": graph_us(
                    lambda a=(library, weights): [a[0](weight) for weight in a[1]], copies
                ),
                "bytes": 2 * width * inner,
            }


def _batch(rows: int, queries: int, context: int, num_shared: int = 0) -> Row:
    """Arguments of decode attention over rows of one length, all sharing their first blocks."""
    columns, shared_columns = -(-context // BLOCK_SIZE), num_shared // BLOCK_SIZE
    own = columns - shared_columns
    order = torch.randperm(rows * own + shared_columns, device="cuda").int()
    shared_ids = order[:shared_columns]
    tables = torch.cat(
        (shared_ids.expand(rows, -1), order[shared_columns:].view(rows, own)), dim=1
    ).contiguous()
    shape = (order.numel(), BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    block_ids = torch.zeros(columns, dtype=torch.int32, device="cuda")
    block_ids[:shared_columns] = shared_ids
    return {
        "q": bf16(rows, queries, HEADS, HEAD_DIM),
        "caches": [(bf16(*shape), bf16(*shape)) for _ in range(4)],
        "rest": (
            tables,
            i32(range(rows)),
            i32([context - queries] * rows),
            i32([context] * rows),
            HEAD_DIM**-0.5,
            4096,
        ),
        "shared": SharedPrefix(
            block_ids, i32([num_shared]), torch.ones(rows, dtype=torch.bool, device="cuda")
        ),
    }


def _decode(kernels: Kernels, batch: Row, shared: SharedPrefix | None) -> Callable[[], None]:
    def calls() -> None:
        for k_cache, v_cache in batch["caches"]:
            kernels.attention.decode_attention(
                batch["q"], k_cache, v_cache, *batch["rest"], shared=shared
            )

    return calls


def decode(kernels: Kernels) -> Iterator[Row]:
    """Decode attention: one read of the rows' keys and values is the floor."""
    for rows, queries, context in DECODE_SHAPES:
        us = graph_us(_decode(kernels, _batch(rows, queries, context), None), 4)
        row = {"rows": rows, "queries": queries, "context": context, "us": us}
        yield {**row, "bytes": rows * context * TOKEN_BYTES}


def shared(kernels: Kernels) -> Iterator[Row]:
    """1,504 shared tokens and 150 own ones: read by every row, read once, and nothing to share."""
    for rows, queries in ((64, 1), (256, 1), (256, 4)):
        batch = _batch(rows, queries, 1654, num_shared=1504)
        prefix = batch["shared"]
        nothing = prefix._replace(length=torch.zeros_like(prefix.length))
        yield {
            "rows": rows,
            "queries": queries,
            "us": graph_us(_decode(kernels, batch, prefix), 4),
            "each_row_us": graph_us(_decode(kernels, batch, None), 4),
            "length_0_us": graph_us(_decode(kernels, batch, nothing), 4),
            "bytes": (rows * 150 + 1504) * TOKEN_BYTES,
        }


def prefill(kernels: Kernels) -> Iterator[Row]:
    """Attention of 8,192 prompt tokens through the cache, and torch's flash attention of them
    packed, which knows no cache."""
    for rows, length in ((32, 256), (16, 512), (8, 1024), (4, 2048), (2, 4096), (1, 8192)):
        batch = _batch(rows, 1, length)
        q = bf16(rows * length, HEADS, HEAD_DIM)
        k, v = (bf16(rows * length, KV_HEADS, HEAD_DIM) for _ in range(2))
        starts = i32([length * row for row in range(rows + 1)])
        tables, slots = batch["rest"][:2]
        zeros, scale = torch.zeros_like(slots), HEAD_DIM**-0.5
        paged = (*batch["caches"][0], tables, slots, starts, zeros, zeros + length, scale)
        packed = (q, k, v, starts, starts, length, length, 0.0, True, False)
        yield {
            "rows": rows,
            "length": length,
            "us": graph_us(
                lambda a=(q, *paged, length, length): kernels.attention.prefill_attention(*a)
            ),
            "library_us": graph_us(
                lambda a=packed, scale=scale: torch.ops.aten._flash_attention_forward(
                    *a, scale=scale
                )
            ),
        }


PARTS = {
    "verification": verification,
    "noise": noise,
    "filter": filter_tokens,
    "products": products,
    "decode": decode,
    "shared": shared,
    "prefill": prefill,
}


@click.command()
@click.option("--parts", default=",".join(PARTS))
@click.option("--output-dir", default=None)
@click.option("--name", default="kernel_bandwidth_h200")
def main(parts: str, output_dir: str | None, name: str) -> None:
    """Measure and write a record."""
    torch.manual_seed(0)
    kernels = select_kernels("cuda")
    bandwidth = copy_bandwidth()
    click.echo(f"copy: {bandwidth / 1e12:.2f} TB/s")
    results: dict[str, list[Row]] = {}
    for part in parts.split(","):
        results[part] = []
        for row in PARTS[part](kernels):
            if "bytes" in row:
                row["floor_ratio"] = row["us"] * 1e-6 * bandwidth / row["bytes"]
            row = {key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}
            results[part].append(row)
            click.echo(f"{part}: {row}")
        torch.cuda.empty_cache()
    payload = {"copy_tb_per_s": round(bandwidth / 1e12, 3), "results": results}
    click.echo(f"wrote {write_record(name, payload, output_dir)}")


if __name__ == "__main__":
    main()

"""Shared blocks in decode attention: how each kernel's time depends on how the work is cut.

Llama-3.1-8B shapes in bf16, 1,504 shared tokens and 150 own ones. The kernels are timed one by one
and together, in CUDA graphs, on caches that do not fit the L2 cache together; every result is held
against the same attention without sharing.

    python -m benchmarks.shared_sweep --shapes 64x1,256x1,256x2,256x4
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click
import torch

from benchmarks.gpu_timing import graph_us
from benchmarks.kernel_bandwidth import HEAD_DIM, HEADS, KV_HEADS, TOKEN_BYTES, bf16, i32
from benchmarks.record import write_record
from specgen.kernels.attention import decode_attention
from specgen.kernels.attention_parts import Parts, join_parts, new_parts
from specgen.kernels.batch_types import SharedPrefix
from specgen.kernels.row_attention import DecodeCut, attend_to_own, cut_decode
from specgen.kernels.shared_attention import SharedCut, attend_to_shared, cut_shared

SHARED, OWN, BLOCK_SIZE = 1504, 150, 16
BOUND = 4096
SCALE_LOG2 = HEAD_DIM**-0.5 * 1.4426950408889634
NUM_CACHES = 4
# Query heads and keys a step, warps, stages, bound on registers, programs a multiprocessor.
TILES = (
    (128, 64, 8, 3, None, 1),
    (128, 64, 8, 3, 128, 2),
    (128, 64, 8, 5, None, 1),
    (128, 128, 8, 3, None, 1),
    (128, 32, 8, 6, 128, 2),
    (64, 64, 4, 3, None, 2),
    (64, 128, 4, 3, None, 1),
    (256, 64, 8, 3, None, 1),
)
OWN_TILES = (  # keys a step, warps, stages
    (32, 4, 4),
    (32, 4, 8),
    (64, 4, 4),
    (64, 4, 6),
    (32, 2, 6),
    (64, 8, 4),
)
NUM_MULTIPROCESSORS = 132
Row = dict[str, Any]


class Batch:
    """A batch whose rows all share their first blocks, in several caches."""

    def __init__(self, rows: int, queries: int) -> None:
        own, shared = -(-OWN // BLOCK_SIZE), SHARED // BLOCK_SIZE
        order = torch.randperm(rows * own + shared, device="cuda").int()
        own_ids = order[shared:].view(rows, own)
        self.tables = torch.cat((order[:shared].expand(rows, -1), own_ids), dim=1).contiguous()
        cache = (order.numel(), BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.caches = [(bf16(*cache), bf16(*cache)) for _ in range(NUM_CACHES)]
        self.q = bf16(rows, queries, HEADS, HEAD_DIM)
        self.out = torch.empty_like(self.q)
        self.slots = i32(range(rows))
        self.contexts = i32([SHARED + OWN] * rows)
        self.firsts = self.contexts - queries
        members = torch.ones(rows, dtype=torch.bool, device="cuda")
        self.shared = SharedPrefix(order[:shared].contiguous(), i32([SHARED]), members)
        self.num_lines = rows * queries * HEADS
        self.expected = self._unshared()

    def _unshared(self) -> torch.Tensor:
        rest = (self.tables, self.slots, self.firsts, self.contexts, HEAD_DIM**-0.5, BOUND)
        return decode_attention(self.q, *self.caches[0], *rest).float()

    def parts(self, cut: SharedCut, own_cut: DecodeCut) -> Parts:
        num_own = own_cut.splits if own_cut.splits > 1 else 0
        return new_parts(self.num_lines, num_own + cut.splits, HEAD_DIM, self.q.device)

    def attend_shared(self, cache: int, cut: SharedCut, parts: Parts) -> None:
        rest = (self.slots, self.contexts, self.shared, SCALE_LOG2, 0.0, parts)
        attend_to_shared(self.q, *self.caches[cache], *rest, parts.acc.shape[1] - cut.splits, cut)

    def attend_own(self, cache: int, cut: DecodeCut, parts: Parts) -> None:
        rest = (self.tables, self.slots, self.firsts, self.contexts, self.shared, SCALE_LOG2, 0.0)
        attend_to_own(self.q, *self.caches[cache], *rest, 0, self.out, parts, cut)

    def attend(self, cache: int, cut: SharedCut, own_cut: DecodeCut, parts: Parts) -> None:
        self.attend_shared(cache, cut, parts)
        self.attend_own(cache, own_cut, parts)
        if own_cut.splits > 1:
            join_parts(parts, self.out)

    def error(self) -> float:
        """The largest relative error of a query head."""
        error = (self.out.float() - self.expected).norm(dim=-1) / self.expected.norm(dim=-1)
        return error.max().item()


def on_all_caches(call: Callable[[int], object]) -> float:
    return graph_us(lambda: [call(cache) for cache in range(NUM_CACHES)], NUM_CACHES)


def measure(batch: Batch, cut: SharedCut, own_cut: DecodeCut) -> Row:
    parts = batch.parts(cut, own_cut)
    batch.out.fill_(float("nan"))
    batch.attend(0, cut, own_cut, parts)
    row = {
        "error": batch.error(),
        "us": on_all_caches(lambda cache: batch.attend(cache, cut, own_cut, parts)),
        "shared_us": on_all_caches(lambda cache: batch.attend_shared(cache, cut, parts)),
        "own_us": on_all_caches(lambda cache: batch.attend_own(cache, own_cut, parts)),
    }
    if own_cut.splits > 1:
        row["join_us"] = on_all_caches(lambda _: join_parts(parts, batch.out))
    return row


def side_by_side_us(batch: Batch, cut: SharedCut, own_cut: DecodeCut) -> float:
    """Time of the two kernels in streams of their own, though the second needs the first.

    What one launch of both could come to.
    """
    parts = batch.parts(cut, own_cut)
    side = torch.cuda.Stream()

    def calls() -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for cache in range(NUM_CACHES):
                batch.attend_shared(cache, cut, parts)
        for cache in range(NUM_CACHES):
            batch.attend_own(cache, own_cut, parts)
        main.wait_stream(side)

    return graph_us(calls, NUM_CACHES)


def cuts(rows: int, queries: int) -> list[SharedCut]:
    """The chosen cut, then all others that fill the multiprocessors once."""
    num_lines = rows * queries * HEADS // KV_HEADS
    found = [cut_shared(num_lines, KV_HEADS, HEAD_DIM, 2)]
    for block_m, block_n, num_warps, num_stages, registers, programs in TILES:
        tiles = -(-num_lines // block_m) * KV_HEADS
        splits = max(1, min(16, programs * NUM_MULTIPROCESSORS // tiles))
        found.append(SharedCut(splits, block_m, block_n, num_warps, num_stages, registers))
    return list(dict.fromkeys(found))


def show(rows: int, queries: int, cut: object, row: Row) -> None:
    flops = 4 * rows * queries * HEADS * HEAD_DIM * SHARED
    rates = ""
    if "shared_us" in row:
        rates = f"{flops / row['shared_us'] / 1e6:6.0f} TFLOP/s  "
    rates += f"{rows * OWN * TOKEN_BYTES / row['own_us'] / 1e6:5.2f} TB/s"
    times = "".join(f"{key} {row[key]:7.1f}  " for key in row if key.endswith("us"))
    click.echo(f"{rows:4d}x{queries}  {tuple(cut)!s:36s} {times} {rates}  {row['error']:.1e}")


@click.command()
@click.option("--shapes", default="64x1,256x1,256x2,256x4")
@click.option(
    "--seconds",
    default=75.0,
    help="Begin no cut later; each shape has its share.",
)
@click.option("--side-by-side", is_flag=True, help="Both kernels at once, in streams; no more.")
@click.option("--output-dir", default=None)
@click.option("--name", default="shared_sweep_h200")
def main(
    shapes: str, seconds: float, side_by_side: bool, output_dir: str | None, name: str
) -> None:
    """Measure and write a record."""
    torch.manual_seed(0)
    begin = time.monotonic()
    results = []
    all_shapes = shapes.split(",")
    for done, shape in enumerate(all_shapes, start=1):
        deadline = begin + seconds * done / len(all_shapes)
        rows, queries = (int(number) for number in shape.split("x"))
        batch = Batch(rows, queries)
        own_cut = cut_decode(batch.q, KV_HEADS, BOUND)
        if side_by_side:
            for cut in cuts(rows, queries)[:3]:
                us = side_by_side_us(batch, cut, own_cut)
                click.echo(f"{shape}  {tuple(cut)!s:36s} side by side {us:7.1f} us")
            continue
        for index, cut in enumerate(cuts(rows, queries)):
            if index == 0 or time.monotonic() < deadline:
                row = measure(batch, cut, own_cut)
                show(rows, queries, cut, row)
                results.append({"rows": rows, "queries": queries, "cut": cut._asdict(), **row})
        of_shape = [r for r in results if (r["rows"], r["queries"]) == (rows, queries)]
        cut = SharedCut(**min(of_shape, key=lambda row: float(row["us"]))["cut"])
        for block_n, num_warps, num_stages in OWN_TILES:
            if time.monotonic() < deadline:
                other = DecodeCut(own_cut.splits, block_n, num_warps, num_stages)
                row = measure(batch, cut, other)
                show(rows, queries, other, row)
                results.append({"rows": rows, "queries": queries, "own": other._asdict(), **row})
        del batch
        torch.cuda.empty_cache()
    click.echo(f"{time.monotonic() - begin:.0f} s")
    if results:
        click.echo(f"wrote {write_record(name, {'results': results}, output_dir)}")


if __name__ == "__main__":
    main()

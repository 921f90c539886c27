"""Training of the target: next-token loss on the corpus, then a short phase against loops."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tools.build_pair.batches import BUCKETS, Batches
from tools.build_pair.encode import Records
from tools.build_pair.model import Shape, Target, load_target, save_target
from tools.build_pair.optimiser import Muon, schedule
from tools.build_pair.prompts import PromptPool
from tools.build_pair.sample_target import Completions, Sampler, repeats
from tools.build_pair.tokenizer import PAD_ID

HEALING_WEIGHT = 0.6


def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over the labels that are not padding."""
    logits = functional.linear(hidden, weight).float()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD_ID)


def next_token_loss(model: Target, tokens: Tensor, loss: Any = loss_of) -> Tensor:
    """Loss of predicting each token of `tokens [B, T]` from those before it."""
    labels = functional.pad(tokens[:, 1:], (0, 1), value=PAD_ID)
    with torch.autocast(tokens.device.type, torch.bfloat16):
        hidden, _ = model(tokens)
        return loss(hidden, model.embed_tokens.weight, labels)  # type: ignore[no-any-return]


@torch.no_grad()
def held_out_loss(model: Target, records: Records, device: str) -> float:
    """Mean loss per token on records that were never trained on."""
    total, count = 0.0, 0
    for tokens in Batches(records, 32_768, device, text_weight=1).epoch(full=False):
        number = int((tokens[:, 1:] != PAD_ID).sum())
        total += float(next_token_loss(model, tokens)) * number
        count += number
    return total / max(count, 1)


def bf16_copy(model: Target) -> Target:
    """The rounded model that ships and that is sampled from."""
    twin = Target(model.shape).to(model.embed_tokens.weight.device, torch.bfloat16)
    twin.load_state_dict(model.state_dict())
    return twin.requires_grad_(False).eval()


class Optimiser:
    """Muon on the blocks' matrices, AdamW on the embedding and the norms."""

    def __init__(self, model: Target) -> None:
        matrices = [p for p in model.layers.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            [
                {"params": [model.embed_tokens.weight], "peak": 4e-3},
                {"params": others, "peak": 2e-3},
            ],
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=next(model.parameters()).is_cuda,
        )
        self.model = model

    def step(self, factor: float) -> None:
        """One update at `factor` of the peak rates."""
        for group in self.adam.param_groups:
            group["lr"] = group["peak"] * factor
        self.adam.step()
        self.muon.step(0.02 * factor, 0.05)
        self.model.zero_grad(set_to_none=True)


def pretrain(
    model: Target, data: Batches, seconds: float, compiled: bool, log: list[dict[str, float]]
) -> None:
    """Train for `seconds` of wall time, compilation apart."""
    device = data.device
    loss = torch.compile(loss_of, dynamic=False) if compiled else loss_of
    optimiser = Optimiser(model)
    if compiled:
        torch._dynamo.config.recompile_limit = 64
        for layer in model.layers:
            layer.compile(dynamic=False)
        started = time.time()
        for length in BUCKETS:
            tokens = torch.full((data.tokens // length, length), 9, device=device)
            next_token_loss(model, tokens, loss).backward()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        print(f"compiled in {time.time() - started:.0f} s", flush=True)
    started, step, seen, average = time.time(), 0, 0, math.log(model.shape.vocab)
    pending: list[Tensor] = []
    for tokens in data:
        progress = (time.time() - started) / seconds
        if progress >= 1:
            break
        value = next_token_loss(model, tokens, loss)
        value.backward()
        optimiser.step(schedule(progress))
        pending.append(value.detach())
        step += 1
        seen += tokens.numel()
        if step % 8 == 0 and device != "cpu":
            torch.cuda.synchronize()  # the clock that decides the rate must not run ahead
        if len(pending) == 100:
            average = float(torch.stack(pending).mean())
            pending = []
            spent = time.time() - started
            log.append({"step": step, "seconds": round(spent, 1), "loss": round(average, 4)})
            print(f"step {step} {spent:.0f}s loss {average:.3f} {seen / spent / 1e6:.2f}M/s",
                  flush=True)  # fmt: skip
            if not math.isfinite(average) or (step == 600 and average > 6.5):
                raise RuntimeError(f"training failed: loss {average}")
    log.append({"step": step, "seconds": round(time.time() - started, 1), "tokens": seen})


def loop_loss(model: Target, done: Completions) -> tuple[Tensor, float]:
    """Unlikelihood of the tokens that end a repeated 4-gram, and the share of such tokens."""
    again = repeats(done.tokens, done.prompts, done.lengths)
    written = max(int((done.lengths - done.prompts).sum()), 1)
    with torch.autocast(done.tokens.device.type, torch.bfloat16):
        hidden, _ = model(done.tokens)
        # Only the positions before a repeat matter: a few per cent of all.
        at = again[:, 1:].nonzero(as_tuple=True)
        logits = model.head(hidden[at]).float()
    chosen = done.tokens[:, 1:][at]
    probability = logits.softmax(-1).gather(1, chosen.unsqueeze(1))
    loss = -torch.log1p(-probability.clamp(max=0.999)).sum() / written
    return loss, float(again.sum()) / written


def against_loops(
    model: Target,
    data: Batches,
    pool: PromptPool,
    seconds: float,
    weight: float,
    log: list[dict[str, float]],
) -> None:
    """Loss on the repeats of greedy completions, times `weight`, beside the ordinary loss."""
    twin = bf16_copy(model)
    # The shape of a training bucket, so that nothing is compiled anew.
    rows, length = data.tokens // 256, 256
    sampler = Sampler(twin, rows, length)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.0)
    started, step = time.time(), 0
    batches = iter(data)
    heat = torch.zeros(rows, device=data.device)
    while (progress := (time.time() - started) / seconds) < 1:
        twin.load_state_dict(model.state_dict())
        prompts, lengths = pool.draw(rows, 48, chat_share=0.4)
        done = sampler.sample(prompts, lengths, heat)
        unlikely, share = loop_loss(model, done)
        (weight * unlikely).backward()
        for group in optimiser.param_groups:
            group["lr"] = 2e-4 * min(1.0, 2 * (1 - progress))
        next_token_loss(model, next(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(f"loops: step {step} repeated {share:.3f}", flush=True)
        log.append({"loop_step": step, "repeated": round(share, 4)})
        step += 1


def train(
    data_folder: Path,
    out: Path,
    *,
    shape: Shape,
    device: str,
    seconds: float,
    loop_seconds: float,
    tokens: int,
) -> Target:
    """Train from the arrays in `data_folder`; write the checkpoint and target_log.json to `out`."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    records = Records.load(data_folder / "train.npz.xz")
    held = Records.load(data_folder / "held.npz.xz")
    model = Target(shape)
    model.reset()
    model = model.to(device)
    data = Batches(records, tokens, device)
    log: list[dict[str, float]] = []
    pretrain(model, data, seconds, device == "cuda", log)
    result: dict[str, Any] = {"held_out_loss": held_out_loss(bf16_copy(model), held, device)}
    save_target(model, out)
    print(result, flush=True)
    if loop_seconds:
        pool = PromptPool(records, device)
        # Strong first, which ends the loops and leaves scars; then mild, which heals them.
        against_loops(model, data, pool, loop_seconds * 0.6, 4.0, log)
        against_loops(model, data, pool, loop_seconds * 0.4, HEALING_WEIGHT, log)
        result["held_out_loss_after_loops"] = held_out_loss(bf16_copy(model), held, device)
        save_target(model, out)
    result["training_records_tokens"] = int(records.lengths.sum(dtype="int64"))
    print(result, flush=True)
    (out.parent / "target_log.json").write_text(json.dumps({**result, "log": log}) + "\n")
    return model


def heal(
    data_folder: Path, trained: Path, out: Path, *, device: str, seconds: float, tokens: int
) -> None:
    """More of the mild phase for a checkpoint that came out of the strong one."""
    torch.manual_seed(3)
    records = Records.load(data_folder / "train.npz.xz")
    held = Records.load(data_folder / "held.npz.xz")
    model = load_target(trained, device, torch.float32).requires_grad_(True).train()
    log: list[dict[str, float]] = []
    data = Batches(records, tokens, device, seed=7)
    against_loops(model, data, PromptPool(records, device, 7), seconds, HEALING_WEIGHT, log)
    save_target(model, out)
    result: dict[str, Any] = {"held_out_loss": held_out_loss(bf16_copy(model), held, device)}
    print(result, flush=True)
    (out.parent / "heal_log.json").write_text(json.dumps({**result, "log": log}) + "\n")

"""Training of the target: the corpus, then loops, both with an eye on what a draft can foresee."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tools.build_pair.batches import BUCKETS, Batches
from tools.build_pair.companion import STRENGTH, Companion
from tools.build_pair.encode import Records
from tools.build_pair.losses import held_out_loss, labels_of, loop_loss, loss_of, next_token_loss
from tools.build_pair.model import Shape, Target, load_target, save_target
from tools.build_pair.optimiser import Muon, schedule
from tools.build_pair.own_samples import SampleBatches, sample_all
from tools.build_pair.prompts import PromptPool
from tools.build_pair.sample_target import Sampler

HEALING_WEIGHT = 0.3
LOOPS_EVERY = 8  # steps of the phase together: completions take longer than a step
COMPANY_FROM = 0.35  # share of the pretraining after which the companion draft joins
TOGETHER_RATE = 0.25  # of the pretraining's peak rates


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
    model: Target,
    companion: Companion,
    data: Batches,
    seconds: float,
    compiled: bool,
    log: list[dict[str, Any]],
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
            pretrain_loss(model, companion, tokens, loss, 1.0).backward()
        model.zero_grad(set_to_none=True)
        companion.draft.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        print(f"compiled in {time.time() - started:.0f} s", flush=True)
    started, step, seen = time.time(), 0, 0
    pending: list[Tensor] = []
    for tokens in data:
        progress = (time.time() - started) / seconds
        if progress >= 1:
            break
        joined = (progress - COMPANY_FROM) * 10
        value = pretrain_loss(model, companion, tokens, loss, min(1.0, joined))
        value.backward()
        optimiser.step(schedule(progress))
        if joined > 0:
            companion.optimiser.step(min(1.0, joined * 4) * schedule(progress, flat=0.6))
        pending.append(value.detach())
        step += 1
        seen += tokens.numel()
        if step % 8 == 0 and device != "cpu":
            torch.cuda.synchronize()  # the clock that decides the rate must not run ahead
        if len(pending) == 100:
            average = float(torch.stack(pending).mean())
            pending = []
            spent = time.time() - started
            note: dict[str, Any] = {"step": step, "seconds": round(spent, 1)}
            note["loss"] = round(average, 4)
            if joined > 0:
                note["agreement"] = [round(x, 3) for x in companion.hits.tolist()]
            log.append(note)
            if len(log) % 4 == 1:
                print(f"{note} {seen / spent / 1e6:.2f}M/s", flush=True)
            if not math.isfinite(average) or (step == 600 and average > 6.5):
                raise RuntimeError(f"training failed: loss {average}")
    log.append({"step": step, "seconds": round(time.time() - started, 1), "tokens": seen})


def pretrain_loss(
    model: Target, companion: Companion, tokens: Tensor, loss: Any, joined: float
) -> Tensor:
    """Next-token loss, and the companion's at `joined` of its strength; noted is the sum."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        hidden, streams = model(tokens)
        value: Tensor = loss(hidden, model.embed_tokens.weight, labels_of(tokens))
    if joined <= 0:
        return value
    return value + joined * STRENGTH * companion.on_corpus(tokens, hidden, streams)


class Loops:
    """Greedy completions of the model as it stands, and the loss on what they repeat."""

    def __init__(self, model: Target, data: Batches, pool: PromptPool) -> None:
        self.model, self.pool = model, pool
        self.twin = bf16_copy(model)
        # The shape of a training bucket, so that nothing is compiled anew.
        self.rows = data.tokens // 256
        self.sampler = Sampler(self.twin, self.rows, 256)
        self.heat = torch.zeros(self.rows, device=data.device)

    def loss(self) -> tuple[Tensor, float]:
        """The loss, and the share of tokens that end a repeated 4-gram."""
        self.twin.load_state_dict(self.model.state_dict())
        prompts, lengths = self.pool.draw(self.rows, 48, chat_share=0.4)
        return loop_loss(self.model, self.sampler.sample(prompts, lengths, self.heat))


def against_loops(
    model: Target,
    data: Batches,
    loops: Loops,
    seconds: float,
    weight: float,
    log: list[dict[str, Any]],
) -> None:
    """Loss on the repeats of greedy completions, times `weight`, beside the ordinary loss."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.0)
    started, step = time.time(), 0
    batches = iter(data)
    while (progress := (time.time() - started) / seconds) < 1:
        unlikely, share = loops.loss()
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


def together(
    model: Target,
    companion: Companion,
    data: Batches,
    samples: SampleBatches,
    loops: Loops,
    seconds: float,
    log: list[dict[str, Any]],
) -> None:
    """Target and draft at once on corpus and own text, with the mild loss on repeats."""
    optimiser = Optimiser(model)
    batches = iter(data)
    started, step, share = time.time(), 0, 0.0
    while (progress := (time.time() - started) / seconds) < 1:
        value = pretrain_loss(model, companion, next(batches), loss_of, 1.0)
        value.backward()
        (STRENGTH * companion.on_samples(samples.draw())).backward()
        if step % LOOPS_EVERY == 0:
            unlikely, share = loops.loss()
            (LOOPS_EVERY * HEALING_WEIGHT * unlikely).backward()
        optimiser.step(TOGETHER_RATE * schedule(progress, warm=0.05, flat=0.2))
        companion.optimiser.step(0.5 * schedule(progress, warm=0.05, flat=0.5))
        if step % 25 == 0:
            log.append({
                "together": step,
                "loss": round(float(value.detach()), 3),
                "repeated": round(share, 3),
                "agreement": [round(x, 3) for x in companion.hits.tolist()],
            })  # fmt: skip
            print(log[-1], flush=True)
        step += 1
    print(f"{step} steps together", flush=True)


class Stage:
    """Data of a stage of training, and what it leaves behind: checkpoint, companion, log."""

    def __init__(self, folder: Path, out: Path, device: str, tokens: int, name: str) -> None:
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        self.records = Records.load(folder / "train.npz.xz")
        self.held = Records.load(folder / "held.npz.xz")
        self.data = Batches(self.records, tokens, device, seed=len(name))
        self.out, self.device, self.name = out, device, name
        self.log: list[dict[str, Any]] = []
        self.result: dict[str, Any] = {}

    def keep(self, measure: str, model: Target, companion: Companion) -> None:
        """Measure the held-out loss under the name `measure` and write everything down."""
        self.result[measure] = held_out_loss(bf16_copy(model), self.held, self.device)
        print(measure, self.result[measure], flush=True)
        save_target(model, self.out / "target")
        save_file(companion.learnt(), self.out / "companion.safetensors")
        self.result["training_records_tokens"] = int(self.records.lengths.sum(dtype="int64"))
        log = json.dumps({**self.result, "log": self.log}) + "\n"
        (self.out / f"{self.name}_log.json").write_text(log)


def train(
    data_folder: Path,
    out: Path,
    *,
    shape: Shape,
    device: str,
    seconds: float,
    loop_seconds: float,
    tokens: int,
) -> None:
    """Pretrain and end the loops; writes target/, companion.safetensors and target_log.json."""
    stage = Stage(data_folder, out, device, tokens, "target")
    model = Target(shape)
    model.reset()
    model = model.to(device)
    companion = Companion(model, device == "cuda")
    pretrain(model, companion, stage.data, seconds, device == "cuda", stage.log)
    stage.keep("held_out_loss", model, companion)
    # Strong, which ends the loops and leaves scars; the phase together is mild and heals them.
    loops = Loops(model, stage.data, PromptPool(stage.records, device))
    against_loops(model, stage.data, loops, loop_seconds, 4.0, stage.log)
    stage.keep("held_out_loss_after_loops", model, companion)


def tune_together(
    data_folder: Path,
    out: Path,
    *,
    device: str,
    seconds: float,
    sample_seconds: float,
    rows: int,
    tokens: int,
) -> None:
    """The phase together on what `out` holds of the stage before; writes it anew."""
    stage = Stage(data_folder, out, device, tokens, "together")
    model = load_target(out / "target", device, torch.float32).requires_grad_(True).train()
    companion = Companion(model, False, out / "companion.safetensors")
    pool = PromptPool(stage.records, device, seed=3)
    samples = SampleBatches(sample_all(bf16_copy(model), pool, sample_seconds, rows), tokens)
    loops = Loops(model, stage.data, pool)
    together(model, companion, stage.data, samples, loops, seconds, stage.log)
    stage.keep("held_out_loss", model, companion)


def polish(data_folder: Path, out: Path, *, device: str, steps: int, tokens: int = 4096) -> None:
    """The ordinary loss alone for a few small steps, which take scars away; writes target/ anew.

    The rate falls as if there were 200 steps: each of them lets some loops come back, so that it is
    the number of steps that is chosen.
    """
    torch.manual_seed(5)
    records = Records.load(data_folder / "train.npz.xz")
    model = load_target(out / "target", device, torch.float32).requires_grad_(True).train()
    batches = iter(Batches(records, tokens, device, seed=99, text_weight=3))
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 2e-4 * min(1.0, step / 5) * max(0.02, 1 - step / 200)
        loss = next_token_loss(model, next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(f"polish: step {step} loss {float(loss.detach()):.3f}", flush=True)
    held = Records.load(data_folder / "held.npz.xz")
    save_target(model, out / "target")
    result = {"held_out_loss": held_out_loss(bf16_copy(model), held, device)}
    print(result, flush=True)
    (out / "polish_log.json").write_text(json.dumps(result) + "\n")

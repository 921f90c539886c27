"""Training of the drafts on the target's own completions, several passes deep."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tools.build_pair.batches import Batches
from tools.build_pair.draft import Draft, attend, save_draft
from tools.build_pair.encode import Records
from tools.build_pair.model import Target, save_target
from tools.build_pair.optimiser import Muon, schedule
from tools.build_pair.prompts import PromptPool
from tools.build_pair.sample_target import Completions, Sampler
from tools.build_pair.tokenizer import PAD_ID
from tools.build_pair.train_target import (
    HEALING_WEIGHT,
    bf16_copy,
    held_out_loss,
    loop_loss,
    next_token_loss,
)

MUON_RATE = 0.01
TOGETHER_WEIGHT = 0.1  # the sum over four passes is some ten times the corpus loss
HEATS = (0.0, 0.0, 0.7, 1.0)


@dataclass(frozen=True)
class Kind:
    """One kind of sampled sequence: total length, longest prompt, share of chats and of tokens."""

    length: int
    longest: int
    shortest: int
    chat_share: float
    share: float


KINDS = (
    Kind(128, 48, 3, 0.9, 0.40),
    Kind(256, 96, 3, 0.4, 0.40),
    Kind(512, 352, 64, 0.3, 0.20),
)
WIDTHS = (64, 128, 256, 512)  # sampled sequences are trimmed to the next of these


def sample_all(target: Target, pool: PromptPool, seconds: float, rows: int) -> list[Completions]:
    """Completions of every kind, sampled for about `seconds` in all, regrouped by width."""
    result: list[Completions] = []
    device = target.embed_tokens.weight.device
    for kind in KINDS:
        number = max(8, rows * 256 // kind.length)
        sampler = Sampler(target, number, kind.length)
        heat = torch.tensor(HEATS, device=device).repeat(number // len(HEATS) + 1)[:number]
        parts: list[Completions] = []
        ends = time.time() + seconds * kind.share
        while not parts or time.time() < ends:
            # Drawn rows are chats first: a shuffle gives every kind of prompt every temperature.
            order = torch.randperm(number, device=device)
            prompts, lengths = pool.draw(number, kind.longest, kind.chat_share, kind.shortest)
            parts.append(sampler.sample(prompts[order], lengths[order], heat))
        merged = Completions(
            torch.cat([p.tokens.to(torch.int16) for p in parts]),
            torch.cat([p.prompts for p in parts]),
            torch.cat([p.lengths for p in parts]),
        )
        written = int((merged.lengths - merged.prompts).sum())
        print(f"sampled {len(merged.prompts)} rows of {kind.length}: {written} tokens", flush=True)
        result.append(merged)
        del sampler
    return [group for width in WIDTHS if len((group := regroup(result, width)).prompts)]


def regroup(samples: list[Completions], width: int) -> Completions:
    """The completed rows that fit `width` and not the next smaller one, trimmed to it."""
    below = max((w for w in WIDTHS if w < width), default=0)
    tokens, prompts, lengths = list[Tensor](), list[Tensor](), list[Tensor]()
    for done in samples:
        fits = (done.lengths > below) & (done.lengths <= width)
        rows = fits.nonzero()[:, 0]
        part = done.tokens[rows][:, :width]
        tokens.append(functional.pad(part, (0, width - part.shape[1]), value=PAD_ID))
        prompts.append(done.prompts[rows])
        lengths.append(done.lengths[rows])
    return Completions(torch.cat(tokens), torch.cat(prompts), torch.cat(lengths))


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


def soft_loss(logits: Tensor, wanted: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Masked mean of −Σ p·log q over the draft vocabulary, and the argmax agreement."""
    logp = logits.float().log_softmax(-1)
    loss = -(wanted.float() * logp).sum(-1)
    hit = (logits.argmax(-1) == wanted.argmax(-1)).float()
    number = mask.sum().clamp(min=1)
    return (loss * mask).sum() / number, (hit * mask).sum() / number


def shifted(x: Tensor, by: int) -> Tensor:
    """`x[:, t + by]` at index t; the end is filled with the last column."""
    return torch.cat([x[:, by:], x[:, -1:].expand(-1, by)], dim=1)


def draft_loss(
    draft: Draft, target: Target, done: Completions, steps: int, decay: float, soft: Any
) -> tuple[Tensor, Tensor]:
    """The multi-pass loss on a batch, and the agreement of each pass.

    If the target is being trained as well, the gradient reaches it through the features.
    """
    tokens = done.tokens.long()
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    with torch.autocast(tokens.device.type, torch.bfloat16):
        last, aux = target.features(tokens, draft.aux)
    with torch.no_grad():
        # Index j predicts token j + 1: it counts if that token is one the target wrote, and if
        # the target's favourite is in the draft vocabulary.
        counted = (columns + 1 >= done.prompts.unsqueeze(1)) & (
            columns + 1 < done.lengths.unsqueeze(1)
        )
        counted &= columns > 0
        labels = counted.flatten().nonzero()[:, 0]
        states = last.flatten(0, 1)[labels]
        rows = target.embed_tokens.weight[draft.ids]
        if draft.eagle3:
            inside = draft.t2d[target.head(states.to(rows.dtype)).argmax(-1)]
            labels, states = labels[inside], states[inside]
        wanted = (
            functional.linear(states.to(rows.dtype), rows).float().softmax(-1).to(torch.bfloat16)
        )
        column = labels % tokens.shape[1]
    total = torch.zeros((), device=tokens.device)
    hits: list[Tensor] = []
    past: list[tuple[Tensor, Tensor]] = []
    with torch.autocast(tokens.device.type, torch.bfloat16):
        hidden = draft.first(aux if draft.eagle3 else last)
        for number in range(steps):
            hidden = draft.step(hidden, shifted(tokens, 1 + number), past, number)
            # The pass that ends at label j started at index j - 1 - number of the same row.
            mask = (column >= 1 + number).float()
            drafted = hidden.flatten(0, 1)[(labels - 1 - number).clamp(min=0)]
            loss, hit = soft(draft.logits(drafted), wanted, mask)
            if not draft.eagle3:
                gap = functional.smooth_l1_loss(
                    drafted.float(), states.float(), reduction="none"
                ).mean(-1)
                loss = 0.1 * loss + (gap * mask).sum() / mask.sum().clamp(min=1)
            total = total + decay**number * loss
            hits.append(hit)
    return total, torch.stack(hits)


class DraftOptimiser:
    """Muon on the layer's and fc's matrices, AdamW on the head and the norms."""

    def __init__(self, draft: Draft, lr: float) -> None:
        matrices = [*draft.midlayer.parameters(), draft.fc.weight]
        self.muon = Muon([p for p in matrices if p.ndim == 2])
        chosen = {id(p) for p in matrices if p.ndim == 2}
        self.others = [p for p in draft.parameters() if id(p) not in chosen]
        cuda = draft.fc.weight.is_cuda
        self.adam = torch.optim.AdamW(
            self.others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=cuda
        )
        self.draft, self.lr = draft, lr

    def step(self, factor: float) -> None:
        """One update at `factor` of the peak rates."""
        torch.nn.utils.clip_grad_norm_(self.others, 0.5)
        for group in self.adam.param_groups:
            group["lr"] = self.lr * factor
        self.adam.step()
        self.muon.step(MUON_RATE * factor, 0.0)
        self.draft.zero_grad(set_to_none=True)


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
    # Batches of a width in proportion to what the target wrote at that width.
    weights = torch.stack([(d.lengths - d.prompts).sum() for d in samples]).float().cpu()
    rows_of = [tokens // d.tokens.shape[1] for d in samples]
    random = torch.Generator().manual_seed(0)
    started, seen, step = time.time(), 0, 0
    ready = 0.0  # compilation does not count
    recent: list[Tensor] = []
    while True:
        progress = (time.time() - started - ready) / seconds
        if progress >= 1:
            break
        warming = step < len(samples)
        choice = step if warming else int(torch.multinomial(weights, 1, generator=random))
        done = samples[choice]
        rows = rows_of[choice]
        pick = torch.randint(len(done.prompts), (rows,), device=device)
        batch = Completions(done.tokens[pick], done.prompts[pick], done.lengths[pick])
        began = time.time()
        loss, hits = draft_loss(draft, target, batch, steps, decay, soft)
        loss.backward()
        factor = schedule(progress, flat=0.3)
        optimiser.step(factor)
        recent.append(torch.cat([loss.detach().view(1), hits]))
        step += 1
        seen += done.tokens.shape[1] * rows
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


def tune_together(
    target: Target,
    draft: Draft,
    data: Batches,
    pool: PromptPool,
    samples: list[Completions],
    *,
    seconds: float,
    tokens: int,
) -> list[dict[str, float]]:
    """Train target and draft at once: corpus loss, mild loss on repeats, and the draft's loss.

    The draft's gradient makes the target's features tell what it is about to say, as the extra
    heads of multi-token prediction do. `target` holds fp32 weights.
    """
    twin = bf16_copy(target)
    rows, length = tokens // 256, 256
    sampler = Sampler(twin, rows, length)
    cold = torch.zeros(rows, device=data.device)
    adam = torch.optim.AdamW(target.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    optimiser = DraftOptimiser(draft, 1e-3)
    weights = torch.stack([(d.lengths - d.prompts).sum() for d in samples]).float().cpu()
    log: list[dict[str, float]] = []
    batches = iter(data)
    started, step, share = time.time(), 0, 0.0
    while (progress := (time.time() - started) / seconds) < 1:
        done = samples[int(torch.multinomial(weights, 1))]
        pick = torch.randint(len(done.prompts), (tokens // done.tokens.shape[1],))
        pick = pick.to(data.device)
        batch = Completions(done.tokens[pick], done.prompts[pick], done.lengths[pick])
        drafted, hits = draft_loss(draft, target, batch, 4, 0.8, soft_loss)
        (TOGETHER_WEIGHT * drafted).backward()
        written = next_token_loss(target, next(batches))
        written.backward()
        if step % 4 == 0:
            twin.load_state_dict(target.state_dict())
            prompts, lengths = pool.draw(rows, 48, chat_share=0.4)
            unlikely, share = loop_loss(target, sampler.sample(prompts, lengths, cold))
            (4 * HEALING_WEIGHT * unlikely).backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        for group in adam.param_groups:
            group["lr"] = 3e-4 * schedule(progress, warm=0.05, flat=0.4)
        adam.step()
        adam.zero_grad(set_to_none=True)
        optimiser.step(schedule(progress, warm=0.05, flat=0.9))
        if step % 20 == 0:
            note = {"step": step, "loss": float(written.detach()), "repeated": share}
            note["agreement"] = float(hits[0].detach())
            log.append({name: round(value, 3) for name, value in note.items()})
            print("together", log[-1], flush=True)
        step += 1
    return log


def build(
    target: Target,
    data_folder: Path,
    out: Path,
    *,
    sample_seconds: float,
    seconds: float,
    eagle1_seconds: float,
    rows: int,
    tokens: int,
    draft_vocab: int,
    together_seconds: float = 0.0,
) -> None:
    """Sample, train both drafts, write `draft/`, `eagle1/` and draft_log.json to `out`.

    With `together_seconds` the target is tuned beside a draft first, and written to `target/`.
    """
    torch.manual_seed(1)
    device = target.embed_tokens.weight.device
    records = Records.load(data_folder / "train.npz.xz")
    pool = PromptPool(records, str(device), seed=1)
    log: dict[str, Any] = {}
    learnt: dict[str, Tensor] = {}
    if together_seconds:
        samples = sample_all(target, pool, sample_seconds / 4, rows)
        ids = draft_vocabulary(samples, target.shape.vocab, draft_vocab)
        master = Target(target.shape).to(device)
        master.load_state_dict(target.state_dict())
        draft = Draft(target.shape, master.embed_tokens.weight.detach(), draft_vocab).to(device)
        draft.reset(ids)
        data = Batches(records, tokens, str(device), seed=11)
        log["together"] = tune_together(
            master, draft, data, pool, samples, seconds=together_seconds, tokens=tokens
        )
        learnt = {n: t for n, t in draft.state_dict().items() if "2" not in n}
        save_target(master, out / "target")
        target = bf16_copy(master)
        held = Records.load(data_folder / "held.npz.xz")
        log["held_out_loss"] = held_out_loss(target, held, str(device))
        print("held-out loss", log["held_out_loss"], flush=True)
        del master, data
    samples = sample_all(target, pool, sample_seconds, rows)
    del pool
    embedding = target.embed_tokens.weight
    if not learnt:
        ids = draft_vocabulary(samples, target.shape.vocab, draft_vocab)
    log["sampled_tokens"] = sum(int((d.lengths - d.prompts).sum()) for d in samples)
    draft = Draft(target.shape, embedding, draft_vocab).to(device)
    draft.reset(ids)
    draft.load_state_dict(learnt, strict=False)
    log["eagle3"] = train(draft, target, samples, steps=7, seconds=seconds, tokens=tokens, lr=2e-3)
    save_draft(draft, out / "draft")
    draft = Draft(target.shape, embedding, None).to(device)
    draft.reset(None)
    log["eagle1"] = train(
        draft, target, samples, steps=3, seconds=eagle1_seconds, tokens=tokens, lr=2e-3
    )
    save_draft(draft, out / "eagle1")
    (out / "draft_log.json").write_text(json.dumps(log) + "\n")

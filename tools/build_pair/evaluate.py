"""Acceptance of the drafts and repeats of the target, straight-line: no engine is involved."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from tools.build_pair.draft import Draft, load_draft
from tools.build_pair.model import Target, load_target
from tools.build_pair.sample_target import Completions, Sampler
from tools.build_pair.tokenizer import END_ID, EOS_ID, PAD_ID

LENGTHS = range(1, 8)  # the draft lengths k that are reported


def read_prompts(path: Path, tokenizer: Any) -> tuple[list[list[int]], list[int]]:
    """Token ids and max_tokens of every line of a prompt file."""
    prompts: list[list[int]] = []
    limits: list[int] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "messages" in record:
            text = tokenizer.apply_chat_template(
                record["messages"], tokenize=False, add_generation_prompt=True
            )
            prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        else:
            prompts.append(tokenizer(record["prompt"])["input_ids"])
        limits.append(record["max_tokens"])
    return prompts, limits


def complete(
    target: Target, prompts: list[list[int]], limits: list[int], heat: float
) -> Completions:
    """One completion for each prompt, cut at its limit."""
    device = target.embed_tokens.weight.device
    longest = max(map(len, prompts))
    total = max(len(p) + m for p, m in zip(prompts, limits, strict=True))
    tokens = torch.full((len(prompts), longest), PAD_ID, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    heats = torch.full((len(prompts),), heat, device=device)
    done = Sampler(target, len(prompts), total).sample(tokens, lengths, heats)
    ends = torch.minimum(done.lengths, lengths + torch.tensor(limits, device=device))
    columns = torch.arange(total, device=device)
    cut = torch.where(columns < ends.unsqueeze(1), done.tokens, PAD_ID)
    return Completions(cut, lengths, ends)


def repeated_share(texts: list[str], n: int = 4) -> float:
    """Share of word n-grams that occurred earlier in the same text."""
    total = again = 0
    for text in texts:
        words = re.findall(r"\S+", text.lower())
        seen: set[tuple[str, ...]] = set()
        for at in range(len(words) - n + 1):
            gram = tuple(words[at : at + n])
            again += gram in seen
            seen.add(gram)
            total += 1
    return again / max(total, 1)


def rounds(drafts: list[Tensor], done: Completions, k: int) -> dict[str, Any]:
    """Accounts of decoding `done` with k drafts a step, drafts kept while they equal its tokens."""
    accepted_at, drafted_at = [0] * k, [0] * k
    steps = accepted = 0
    tokens = done.tokens.tolist()
    rows = [d.tolist() for d in drafts[:k]]
    for row, (start, end) in enumerate(
        zip(done.prompts.tolist(), done.lengths.tolist(), strict=True)
    ):
        last = start  # the token of the prefill is there
        while last < end - 1:
            number = 0
            while number < k and last + 1 + number < end:
                if rows[number][row][last - 1] != tokens[row][last + 1 + number]:
                    break
                number += 1
            for position in range(k):
                drafted_at[position] += 1
                accepted_at[position] += number > position
            steps += 1
            accepted += number
            last += number + 1
    return {
        "mean_acceptance_length": round(1 + accepted / max(steps, 1), 4),
        "accepted_per_position": [
            round(a / max(d, 1), 4) for a, d in zip(accepted_at, drafted_at, strict=True)
        ],
        "steps": steps,
    }


@torch.no_grad()
def exact_match(target: Target, draft: Draft, done: Completions) -> dict[int, dict[str, Any]]:
    """Accounts of a greedy draft for each k.

    At temperature 0 a draft is kept iff it is the target's token. At temperature 1 keeping it iff
    it equals an independent draw of the target has the rate p(x) and the law of the greedy rule.
    """
    found: list[list[Tensor]] = []
    for at in range(0, len(done.tokens), 32):
        tokens = done.tokens[at : at + 32]
        last, aux = target.features(tokens, draft.aux)
        given = torch.cat([tokens[:, 1:], tokens[:, -1:]], dim=1)
        features = aux if draft.eagle3 else last
        found.append(draft.chain(features, given, max(LENGTHS), lambda q, _: q.argmax(-1)))
    drafts = [torch.cat(parts) for parts in zip(*found, strict=True)]
    return {k: rounds(drafts, done, k) for k in LENGTHS}


@torch.no_grad()
def ratio_rule(
    target: Target, draft: Draft, prompts: list[list[int]], limits: list[int], k: int
) -> dict[str, Any]:
    """Accounts of real decoding at temperature 1 with sampled drafts and the ratio test."""
    device = target.embed_tokens.weight.device
    start = complete(target, prompts, [1] * len(prompts), 1.0)
    total = max(len(p) + m for p, m in zip(prompts, limits, strict=True)) + k + 2
    tokens = torch.full((len(prompts), total), PAD_ID, device=device)
    tokens[:, : start.tokens.shape[1]] = start.tokens
    length = start.lengths.clone()
    end = start.prompts + torch.tensor(limits, device=device)
    row = torch.arange(len(prompts), device=device)
    stopped = (tokens[row, length - 1] == EOS_ID) | (tokens[row, length - 1] == END_ID)
    active = ~stopped & (length < end)
    steps = accepted = 0
    per_position = torch.zeros(k, device=device)
    while bool(active.any()):
        width = min(total, (int(length.max()) + k + 64) // 64 * 64)
        view = tokens[:, :width]
        last, aux = target.features(view, draft.aux)
        given = torch.cat([view[:, 1:], view[:, -1:]], dim=1)
        at = length - 2
        q_rows: list[Tensor] = []

        def choose(logits: Tensor, _: int, at: Tensor = at, out: list[Tensor] = q_rows) -> Tensor:
            q = logits.float().softmax(-1)
            out.append(q[row, at])
            noise = torch.empty_like(q).exponential_()
            return (q / noise).argmax(-1)

        drafts = draft.chain(aux if draft.eagle3 else last, given, k, choose)
        drawn = torch.stack([d[row, at] for d in drafts], dim=1)  # [R, k]
        trial = view.clone()
        for number in range(k):
            trial[row, (length + number).clamp(max=width - 1)] = drawn[:, number]
        p_all = target.head(target(trial)[0]).float()
        alive = torch.ones_like(active)
        count = torch.zeros_like(length)
        final = torch.zeros_like(length)
        for number in range(k + 1):
            p = p_all[row, (length - 1 + number).clamp(max=width - 1)].softmax(-1)
            if number == k:
                final = torch.where(alive, torch.multinomial(p, 1)[:, 0], final)
                break
            q = torch.zeros_like(p)
            q[:, draft.ids] = q_rows[number]
            x = drawn[:, number]
            keep = torch.rand(len(row), device=device) * q[row, x] < p[row, x]
            rest = (p - q).clamp(min=0)
            rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
            final = torch.where(alive & ~keep, torch.multinomial(rest, 1)[:, 0], final)
            alive &= keep
            count += alive
        emitted = torch.cat([drawn, drawn[:, :1]], dim=1)
        emitted[row, count] = final
        for r in active.nonzero()[:, 0].tolist():
            base, committed = int(length[r]), 0
            for token in emitted[r, : int(count[r]) + 1].tolist():
                tokens[r, base + committed] = token
                committed += 1
                if token in (EOS_ID, END_ID) or base + committed >= int(end[r]):
                    active[r] = False
                    break
            kept = min(int(count[r]), committed)
            length[r] = base + committed
            steps += 1
            accepted += kept
            per_position[:kept] += 1
    return {
        "mean_acceptance_length": round(1 + accepted / max(steps, 1), 4),
        "accepted_per_position": [round(x / max(steps, 1), 4) for x in per_position.tolist()],
        "steps": steps,
    }


def texts_of(done: Completions, tokenizer: Any) -> list[str]:
    """The completions as text."""
    return [
        str(tokenizer.decode(row[start:end], skip_special_tokens=True))
        for row, start, end in zip(
            done.tokens.tolist(), done.prompts.tolist(), done.lengths.tolist(), strict=True
        )
    ]


def build(
    target_folder: Path,
    drafts: dict[str, Path],
    held_out: Path,
    examples: Path,
    out: Path,
    *,
    device: str,
    ratio_seconds: float = 600,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Measure everything the card states and write it to `out`."""
    torch.manual_seed(2)
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    target = load_target(target_folder, device, dtype)
    prompts, limits = read_prompts(held_out, tokenizer)
    greedy = complete(target, prompts, limits, 0.0)
    sampled = complete(target, prompts, limits, 1.0)
    shown = complete(target, *read_prompts(examples, tokenizer), 0.0)
    result: dict[str, Any] = {
        "prompts": len(prompts),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "dtype": str(dtype).removeprefix("torch."),
        "completion_tokens": {
            "temperature 0": int((greedy.lengths - greedy.prompts).sum()),
            "temperature 1": int((sampled.lengths - sampled.prompts).sum()),
        },
        "repeated_4grams": {
            "example prompts": round(repeated_share(texts_of(shown, tokenizer)), 4),
            "held-out prompts": round(repeated_share(texts_of(greedy, tokenizer)), 4),
        },
        "drafts": {},
    }
    for name, folder in drafts.items():
        draft = load_draft(folder, target.shape, target.embed_tokens.weight, dtype)
        table: dict[str, Any] = {
            "temperature 0": exact_match(target, draft, greedy),
            "temperature 1, greedy draft": exact_match(target, draft, sampled),
        }
        print(name, {t: {k: v["mean_acceptance_length"] for k, v in rows.items()}
                     for t, rows in table.items()}, flush=True)  # fmt: skip
        result["drafts"][name] = table
        out.write_text(json.dumps(result, indent=1) + "\n")
        rule: dict[int, Any] = {}
        table["temperature 1, sampled draft, ratio rule"] = rule
        ends = time.time() + ratio_seconds
        for k in (3, 5, 1, 7, 2, 4, 6):
            if time.time() < ends:
                rule[k] = ratio_rule(target, draft, prompts, limits, k)
                print("ratio rule", k, rule[k]["mean_acceptance_length"], flush=True)
                out.write_text(json.dumps(result, indent=1) + "\n")
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(result["repeated_4grams"], flush=True)
    for index, text in enumerate(texts_of(shown, tokenizer)):
        print(f"[{index}]", text.replace("\n", " / "), flush=True)
    return result

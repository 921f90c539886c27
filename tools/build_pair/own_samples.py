"""What the target itself writes: the text that drafts are trained on."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tools.build_pair.model import Target
from tools.build_pair.prompts import PromptPool
from tools.build_pair.sample_target import Completions, Sampler
from tools.build_pair.tokenizer import PAD_ID

HEATS = (0.0, 0.0, 0.7, 1.0)
WIDTHS = (64, 128, 256, 512)  # sampled sequences are trimmed to the next of these


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


def written_by_target(tokens: Tensor, done: Completions) -> Tensor:
    """bool `[B, T]`: index j counts if the target wrote token j + 1."""
    columns = torch.arange(tokens.shape[1], device=tokens.device) + 1
    return (columns >= done.prompts.unsqueeze(1)) & (columns < done.lengths.unsqueeze(1))


class SampleBatches:
    """Batches of about `tokens` tokens of one width, in proportion to what was written there."""

    def __init__(self, samples: list[Completions], tokens: int, seed: int = 0) -> None:
        self.samples, self.tokens = samples, tokens
        written = [(d.lengths - d.prompts).sum() for d in samples]
        self.weights = torch.stack(written).float().cpu()
        self.random = torch.Generator().manual_seed(seed)

    def draw(self, choice: int | None = None) -> Completions:
        """Rows of one width, the `choice`-th or a drawn one."""
        if choice is None:
            choice = int(torch.multinomial(self.weights, 1, generator=self.random))
        done = self.samples[choice]
        rows = max(1, self.tokens // done.tokens.shape[1])
        pick = torch.randint(len(done.prompts), (rows,), generator=self.random)
        pick = pick.to(done.tokens.device)
        return Completions(done.tokens[pick].long(), done.prompts[pick], done.lengths[pick])

"""The losses of target and draft: next token, repeats, and the drafts' passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tools.build_pair.batches import Batches
from tools.build_pair.draft import Draft
from tools.build_pair.encode import Records
from tools.build_pair.model import Target
from tools.build_pair.sample_target import Completions, repeats
from tools.build_pair.tokenizer import PAD_ID


def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over the labels that are not padding."""
    logits = functional.linear(hidden, weight).float()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD_ID)


def labels_of(tokens: Tensor) -> Tensor:
    """The token after each of `tokens [B, T]`."""
    return functional.pad(tokens[:, 1:], (0, 1), value=PAD_ID)


def next_token_loss(model: Target, tokens: Tensor, loss: Any = loss_of) -> Tensor:
    """Loss of predicting each token of `tokens [B, T]` from those before it."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        hidden, _ = model(tokens)
        return loss(hidden, model.embed_tokens.weight, labels_of(tokens))  # type: ignore[no-any-return]


@torch.no_grad()
def held_out_loss(model: Target, records: Records, device: str) -> float:
    """Mean loss per token on records that were never trained on."""
    total, count = 0.0, 0
    for tokens in Batches(records, 32_768, device, text_weight=1).epoch(full=False):
        number = int((tokens[:, 1:] != PAD_ID).sum())
        total += float(next_token_loss(model, tokens)) * number
        count += number
    return total / max(count, 1)


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
    draft: Draft,
    target: Target,
    tokens: Tensor,
    last: Tensor,
    aux: Tensor,
    counted: Tensor,
    *,
    steps: int,
    decay: float,
    soft: Any = soft_loss,
    pull: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The multi-pass loss (weights sum to 1), and the agreement of each pass.

    Args:
        tokens: `[B, T]`; `last [B, T, H]` and `aux` are the target's features of them.
        counted: bool `[B, T]`: index j, which predicts token j + 1, counts.
        pull: Weight of a second loss, which moves the target's distribution towards the draft's:
            where the target wavers, it shall prefer what a draft can foresee. With it, or with
            features that carry gradients, the target learns as well.
    """
    counted = counted.clone()
    counted[:, 0] = False  # no pair of feature and token lies before it
    labels = counted.flatten().nonzero()[:, 0]
    states = last.flatten(0, 1)[labels]
    rows = target.embed_tokens.weight[draft.ids]
    with torch.autocast(tokens.device.type, torch.bfloat16):
        if draft.eagle3 and len(draft.ids) < target.shape.vocab:
            # Only labels whose favourite is in the draft vocabulary.
            inside = draft.t2d[target.head(states.detach()).argmax(-1)]
            labels, states = labels[inside], states[inside]
        own = functional.linear(states if pull else states.detach(), rows)
        wanted = own.detach().float().softmax(-1).to(torch.bfloat16)
        column = labels % tokens.shape[1]
        weights = [decay**number for number in range(steps)]
        total = torch.zeros((), device=tokens.device)
        hits: list[Tensor] = []
        past: list[tuple[Tensor, Tensor]] = []
        foreseen = torch.zeros_like(wanted)
        share = torch.zeros(len(labels), 1, device=tokens.device)
        hidden = draft.first(aux if draft.eagle3 else last)
        for number, weight in enumerate(weights):
            hidden = draft.step(hidden, shifted(tokens, 1 + number), past, number)
            # The pass that ends at label j started at index j - 1 - number of the same row.
            mask = (column >= 1 + number).float()
            drafted = hidden.flatten(0, 1)[(labels - 1 - number).clamp(min=0)]
            logits = draft.logits(drafted)
            loss, hit = soft(logits, wanted, mask)
            if not draft.eagle3:
                gap = functional.smooth_l1_loss(
                    drafted.float(), states.float(), reduction="none"
                ).mean(-1)
                loss = 0.1 * loss + (gap * mask).sum() / mask.sum().clamp(min=1)
            total = total + weight * loss
            hits.append(hit)
            if pull:
                part = weight * mask.unsqueeze(1)
                foreseen = foreseen + part.bfloat16() * logits.detach().softmax(-1).bfloat16()
                share = share + part
        total = total / sum(weights)
        if pull:
            towards, _ = soft(own, (foreseen / share.clamp(min=1e-6)).bfloat16(), share[:, 0])
            total = total + pull * towards
    return total, torch.stack(hits)

"""A toy language model, the loop of speculative decoding over it, and the laws it must obey.

The target and the draft are Markov chains on a small vocabulary, so the joint law of what the loop
must emit is known exactly. Drafts come from the production sampler: drafts from another source of
randomness cannot show a dependence between draft noise and verification noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2
from torch import Tensor

from specgen.kernels.streams import DRAFT, TARGET

FIRST, ACCEPTED, RECOVERED, BONUS = range(4)
KIND_NAMES = ("first", "accepted", "recovered", "bonus")
START_TOKEN = 0
START_POSITION = 7


@dataclass(frozen=True)
class Toy:
    """Two Markov chains given by logits ``[V, V]``: row = previous token, column = next token."""

    target: Tensor
    draft: Tensor
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def vocab_size(self) -> int:
        return self.target.shape[0]

    def target_probs(self) -> np.ndarray:
        """Return p(next | prev) after temperature and filters, float64 ``[V, V]``."""
        return np.stack([self._filtered(row) for row in self.target.double().numpy()])

    def draft_probs(self) -> np.ndarray:
        """Return q(next | prev), float64 ``[V, V]``: temperature, no filters."""
        return softmax(self.draft.double().numpy() / self.temperature)

    def _filtered(self, logits: np.ndarray) -> np.ndarray:
        kept = logits >= sorted(logits)[-self.top_k] if self.top_k else np.full(len(logits), True)
        probs = softmax(np.where(kept, logits, -np.inf) / self.temperature)
        order = np.argsort(-probs, kind="stable")
        needed = int(np.searchsorted(np.cumsum(probs[order]), self.top_p)) + 1
        boundary = logits[order[min(needed, len(order)) - 1]]
        probs = np.where(logits >= boundary, probs, 0.0)
        return probs / probs.sum()

    def joint(self, num_tokens: int) -> np.ndarray:
        """Return the law of the first ``num_tokens`` tokens, flattened ``[V ** num_tokens]``."""
        p = self.target_probs()
        law = p[START_TOKEN]
        for _ in range(num_tokens - 1):
            law = law[..., None] * p  # the last axis of law is the previous token
        return law.ravel()


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def make_toy(vocab_size: int, seed: int = 0, **sampling: Any) -> Toy:
    """Return chains of which the draft resembles the target, with no two equal logits."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(vocab_size, vocab_size, generator=generator)
    noise = torch.randn(vocab_size, vocab_size, generator=generator)
    return Toy(target, 0.6 * target + 0.7 * noise, **sampling)


@dataclass(frozen=True)
class Emitted:
    """What the loop emitted: tokens, how each came about, and the token before it, ``[N, L]``."""

    tokens: np.ndarray
    kinds: np.ndarray
    previous: np.ndarray


# (round, draft tokens of the last round [N, k] or None) -> number of drafts of this round [N]
DraftLengths = Callable[[int, Tensor | None], Tensor]


def decode(
    kernels: Any,
    toy: Toy,
    *,
    draft_sample: str,
    num_rows: int,
    num_tokens: int,
    k: int,
    lengths: DraftLengths | None = None,
    device: str = "cpu",
    draft_stream: int = DRAFT,
    use_block_index: bool = True,
) -> Emitted:
    """Run the draft-and-verify loop for many independent rows at once.

    ``draft_stream`` and ``use_block_index`` exist to plant the faults that tests must catch.
    """
    gumbel, rejection, logits_module = kernels.gumbel, kernels.rejection, kernels.logits
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    target, draft = toy.target.to(device), toy.draft.to(device)
    rows = torch.arange(num_rows, device=device)
    seeds = rows * 0x5851F42D4C957F2D + 12345  # wraps: uses all 64 bits
    sample_index = (rows % 3).to(torch.int32)
    slot_ids = rows.to(torch.int32)
    temperature = torch.full((num_rows,), toy.temperature, device=device)
    draft_temperature = temperature if draft_sample == "gumbel" else torch.zeros_like(temperature)
    top_k = torch.full((num_rows,), toy.top_k, **ints)
    top_p = torch.full((num_rows,), toy.top_p, device=device)

    def thresholds(logits: Tensor) -> Tensor | None:
        if toy.top_k == 0 and toy.top_p >= 1.0:
            return None
        return logits_module.filter_thresholds(logits, temperature, top_k, top_p)

    width = num_tokens + k + 1
    out = torch.full((num_rows, width), -1, device=device)
    kinds = torch.full((num_rows, width), -1, device=device)
    previous = torch.full((num_rows, width), -1, device=device)
    columns = torch.arange(k + 1, device=device)

    first_logits = target[START_TOKEN].expand(num_rows, 1, -1).contiguous()
    first_positions = torch.full((num_rows, 1), START_POSITION, **ints)
    first, ok = gumbel.gumbel_sample(
        first_logits,
        temperature,
        seeds,
        first_positions,
        sample_index,
        TARGET,
        0,
        thresholds(first_logits),
        None,
    )
    assert bool(ok.all())
    out[:, 0] = first[:, 0]
    kinds[:, 0] = FIRST
    previous[:, 0] = START_TOKEN
    num_out = torch.ones(num_rows, dtype=torch.int64, device=device)
    last_drafts: Tensor | None = None

    for step in range(num_tokens):
        running = num_out < num_tokens
        if not bool(running.any()):
            break
        num_drafts = torch.full((num_rows,), k, **ints)
        if lengths is not None:
            num_drafts = lengths(step, last_drafts).to(**ints).expand(num_rows)
        first_positions = (START_POSITION + num_out).to(torch.int32)

        prefix = [out.gather(1, num_out[:, None] - 1)[:, 0]]
        draft_logits = []
        for i in range(k):
            step_logits = draft[prefix[-1]][:, None].contiguous()
            token, ok = gumbel.gumbel_sample(
                step_logits,
                draft_temperature,
                seeds,
                first_positions[:, None] + i,
                sample_index,
                draft_stream,
                i if use_block_index else 0,
                None,
                None,
            )
            assert bool(ok.all())
            draft_logits.append(step_logits)
            prefix.append(token[:, 0].to(torch.int64))
        chain = torch.stack(prefix, 1)  # [N, k + 1]: the last token, then the drafts
        last_drafts = chain[:, 1:]
        target_logits = target[chain]
        tokens, num_sampled, ok = rejection.rejection_sample(
            target_logits,
            last_drafts.to(torch.int32).contiguous(),
            torch.where(running, num_drafts, -1),
            torch.cat(draft_logits, 1) if draft_sample == "gumbel" and k else None,
            slot_ids,
            None,
            temperature,
            seeds,
            first_positions,
            sample_index,
            thresholds(target_logits),
        )
        assert bool(ok.all())
        count = num_sampled[:, None].to(torch.int64)
        written = columns < count
        at = torch.where(written, num_out[:, None] + columns, width - 1)
        last_kind = torch.where(count - 1 == num_drafts[:, None], BONUS, RECOVERED)
        kind = torch.where(columns < count - 1, ACCEPTED, last_kind)
        before = torch.cat([chain[:, :1], tokens[:, :-1].to(torch.int64)], 1)
        for buffer, value in ((out, tokens.to(torch.int64)), (kinds, kind), (previous, before)):
            buffer.scatter_(1, at, torch.where(written, value, -1))
        num_out += num_sampled
    assert bool((num_out >= num_tokens).all())
    keep = [buffer[:, :num_tokens].cpu().numpy() for buffer in (out, kinds, previous)]
    return Emitted(*keep)


def chi_square(observed: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Return Pearson's statistic and degrees of freedom; cells expecting < 5 are pooled.

    A token that cannot occur but did makes the statistic infinite.
    """
    if observed[expected == 0].sum() > 0:
        return float("inf"), 1
    large = expected >= 5
    pooled_observed = np.append(observed[large], observed[~large].sum())
    pooled_expected = np.append(expected[large], expected[~large].sum())
    if pooled_expected[-1] < 1:
        pooled_observed, pooled_expected = pooled_observed[:-1], pooled_expected[:-1]
    if len(pooled_expected) < 2:
        return 0.0, 0
    statistic = ((pooled_observed - pooled_expected) ** 2 / pooled_expected).sum()
    return float(statistic), len(pooled_expected) - 1


def joint_p_value(tokens: np.ndarray, toy: Toy) -> float:
    """Return the p-value of all ``[N, L]`` tokens as draws from the joint law of L tokens."""
    law = toy.joint(tokens.shape[1])
    code = np.zeros(len(tokens), dtype=np.int64)
    for column in tokens.T:
        code = code * toy.vocab_size + column
    observed = np.bincount(code, minlength=len(law))
    statistic, freedom = chi_square(observed, len(tokens) * law)
    return float(chi2.sf(statistic, freedom))


def kind_law(toy: Toy, kind: int, draft_sample: str) -> np.ndarray:
    """Return the law of a token of this kind given the previous one, ``[V, V]`` (0 where none)."""
    p = toy.target_probs()
    if draft_sample == "gumbel":
        q = toy.draft_probs()
    else:
        q = np.eye(toy.vocab_size)[toy.draft.numpy().argmax(-1)]
    if kind == ACCEPTED:
        weights = np.minimum(p, q)
    elif kind == RECOVERED and draft_sample == "gumbel":
        weights = np.maximum(p - q, 0.0)
    elif kind == RECOVERED:
        weights = p * (1.0 - q)
    else:
        weights = p
    total = weights.sum(-1, keepdims=True)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)


def kind_p_value(emitted: Emitted, toy: Toy, kind: int, draft_sample: str) -> tuple[float, int]:
    """Return the p-value of the tokens of one kind given their predecessors, and their number."""
    law = kind_law(toy, kind, draft_sample)
    chosen = emitted.kinds == kind
    code = emitted.previous[chosen] * toy.vocab_size + emitted.tokens[chosen]
    observed = np.bincount(code, minlength=law.size).reshape(law.shape)
    statistic, freedom = 0.0, 0
    for row, row_law in zip(observed, law, strict=True):
        one, degrees = chi_square(row, row.sum() * row_law)
        statistic, freedom = statistic + one, freedom + degrees
    if freedom == 0:  # one-hot laws: all that can be said is that nothing else occurred
        return float(statistic == 0.0), int(chosen.sum())
    return float(chi2.sf(statistic, freedom)), int(chosen.sum())


def lengths_from_discarded_drafts(k: int) -> DraftLengths:
    """Vary d in 0..k by what was drafted last, thrown-away drafts included."""

    def lengths(step: int, last_drafts: Tensor | None) -> Tensor:
        if last_drafts is None:
            return torch.tensor(k)
        return (last_drafts.sum(1) + step) % (k + 1)

    return lengths

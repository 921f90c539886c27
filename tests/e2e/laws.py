"""Exact laws of tiny targets, and the tests that hold samples against them.

The laws come from transformers in float64, never from the code under test.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy import stats

#: A correct engine fails a test for one in ten thousand choices of its seeds, which are fixed.
P_VALUE = 1e-4


def filtered(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> np.ndarray:
    """Distributions of logit rows [..., V] after temperature, top-k and top-p."""
    z = logits / temperature
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    flat = p.reshape(-1, p.shape[-1])
    for row in flat:
        if top_k:
            row[row < np.sort(row)[-top_k]] = 0.0
            row /= row.sum()
        if top_p < 1.0:
            order = np.argsort(-row)
            before = np.cumsum(row[order]) - row[order]
            row[order[before >= top_p]] = 0.0
            row /= row.sum()
    return flat.reshape(p.shape)


def target_logits(path: Path, prefixes: Sequence[Sequence[int]]) -> np.ndarray:
    """Next-token logits float64 [N, V] of equally long prefixes."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    with torch.no_grad():
        logits = model(torch.tensor(prefixes)).logits[:, -1]
    return logits.numpy()


def sequence_law(path: Path, prompt: Sequence[int], length: int, **sampling: float) -> np.ndarray:
    """Probability of every continuation of ``length`` tokens: [V, V, ...]."""
    law = np.ones(())
    for n in range(length):
        vocab_size = law.shape[0] if n else None
        heads = itertools.product(range(vocab_size or 1), repeat=n)
        rows = target_logits(path, [[*prompt, *head] for head in heads])
        conditional = filtered(rows, **sampling)  # type: ignore[arg-type]
        law = law[..., None] * conditional.reshape(*law.shape, -1)
    return law


def chain_law(path: Path, **sampling: float) -> np.ndarray:
    """Transition matrix [V, V] of a target that looks at its last token only."""
    size = target_logits(path, [[0]]).shape[-1]
    alone = target_logits(path, [[token] for token in range(size)])
    deep = target_logits(path, [[1, 2, 3, token] for token in range(size)])
    np.testing.assert_allclose(alone, deep, atol=1e-9, err_msg="the target is not a chain")
    return filtered(alone, **sampling)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Fit:
    """Pearson's test of counts against expected counts."""

    p_value: float
    num_samples: int
    detectable_tv: float
    """Total variation that the test finds nine times in ten, spread over all its cells."""


def fit(observed: np.ndarray, expected: np.ndarray) -> Fit:
    """Chi-square of counts; cells of small expectation are put together, impossible ones are fatal.

    ``expected`` may be rows of different totals (one law a context): cells are then compared over
    all rows, and a degree of freedom is taken off for each.
    """
    rows = expected.reshape(-1, expected.shape[-1]) if expected.ndim > 1 else expected[None]
    counts = observed.reshape(rows.shape)
    assert counts[rows == 0].sum() == 0, "a token of probability zero was emitted"
    np.testing.assert_allclose(counts.sum(-1), rows.sum(-1), rtol=1e-6)
    statistic, freedom = 0.0, 0
    for row, count in zip(rows, counts, strict=True):
        small = row < 10
        e = np.append(row[~small], row[small].sum())
        o = np.append(count[~small], count[small].sum())
        if e[-1] < 5:  # too little even together: join it to the next larger cell
            e, o = e[:-1].copy(), o[:-1].copy()
            if e.size:
                at = int(e.argmin())
                e[at] += row[small].sum()
                o[at] += count[small].sum()
        if e.size < 2:
            continue
        statistic += float(((o - e) ** 2 / e).sum())
        freedom += e.size - 1
    assert freedom > 0, "nothing to test"
    total = int(counts.sum())
    threshold = stats.chi2.isf(P_VALUE, freedom)
    shift = threshold - freedom + 1.3 * np.sqrt(2 * freedom + 4 * (threshold - freedom))
    return Fit(float(stats.chi2.sf(statistic, freedom)), total, float(np.sqrt(shift / total) / 2))


def count_sequences(sequences: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    """Counts [V, V, ...] of equally long sequences."""
    array = np.asarray(sequences)
    counts = np.zeros((vocab_size,) * array.shape[1])
    np.add.at(counts, tuple(array.T), 1)
    return counts


def window_fit(
    completions: Sequence[Sequence[int]], prompt: Sequence[int], transition: np.ndarray, width: int
) -> Fit:
    """Joint law of ``width`` consecutive tokens, given the one before, over whole completions.

    Windows lie at fixed places, so where steps begin and end does not choose them.
    """
    size = transition.shape[0]
    law = transition
    for _ in range(width - 1):
        law = law[..., None] * transition
    law = law.reshape(size, -1)  # [token before, window]
    whole = np.array([[prompt[-1], *completion] for completion in completions])
    starts = np.zeros(size)
    counts = np.zeros((size,) * width)
    for at in range(0, whole.shape[1] - width, width):
        starts += np.bincount(whole[:, at], minlength=size)
        counts += count_sequences(whole[:, at + 1 : at + 1 + width], size)
    return fit(counts.reshape(-1), starts @ law)


def next_token_fit(pairs: Sequence[tuple[int, int]], transition: np.ndarray) -> Fit:
    """Law of tokens given the token before each of them."""
    counts = count_sequences(pairs, transition.shape[0])
    return fit(counts, counts.sum(-1, keepdims=True) * transition)

"""Passes of a target in the shapes that the engine uses, against transformers' own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models.paged import Paged

from specgen.models.target import TargetModel

LENGTHS = (41, 7, 26)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max())


def random_sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 96, (n,), generator=generator, dtype=torch.int32) for n in LENGTHS]


Expected = list[tuple[torch.Tensor, list[torch.Tensor]]]


def run_transformers(path: Path, sequences: list[torch.Tensor]) -> Expected:
    """Logits and hidden_states of each sequence by the class of transformers."""
    from transformers import AutoModelForCausalLM

    auto_class: Any = AutoModelForCausalLM
    model = auto_class.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    results = []
    with torch.inference_mode():
        for tokens in sequences:
            out = model(tokens[None].long(), output_hidden_states=True)
            results.append((out.logits[0], [h[0] for h in out.hidden_states]))
    return results


def run_all(
    target: TargetModel, sequences: list[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Hidden and aux of every position: prefill in uneven chunks, then decode with rejections."""
    paged = Paged(target, len(sequences), max(LENGTHS))
    size = target.config.hidden_size
    hidden = [torch.full((n, size), torch.nan) for n in LENGTHS]
    aux = [torch.full((n, 8 * size), torch.nan) for n in LENGTHS]

    def keep(slot: int, first: int, h: torch.Tensor, a: torch.Tensor) -> None:
        hidden[slot][first : first + len(h)] = h
        aux[slot][first : first + len(a)] = a

    def prefill(chunks: list[tuple[int, int, int]], padding: int = 0) -> None:
        ids = torch.cat([sequences[s][f : f + n] for s, f, n in chunks])
        ids = torch.cat((ids, torch.zeros(padding, dtype=torch.int32)))
        h, a = target.forward(ids, paged.prefill(chunks, padding), paged.caches)
        assert a is not None
        start = 0
        for slot, first, n in chunks:
            keep(slot, first, h[start : start + n], a[start : start + n])
            start += n

    def decode(rows: list[tuple[int, int, int]], query_len: int, wrong_from: int) -> None:
        """Tokens from index ``wrong_from`` on are drafts that will be rejected."""
        ids = torch.zeros(len(rows), query_len, dtype=torch.int32)
        for i, (slot, first, n) in enumerate(rows):
            ids[i, :n] = sequences[slot][first : first + n]
            ids[i, wrong_from:] = 5
        metadata = paged.decode(rows, query_len)
        h, a = target.forward(ids.flatten(), metadata, paged.caches)
        assert a is not None
        for i, (slot, first, n) in enumerate(rows):
            right = slice(i * query_len, i * query_len + min(n, wrong_from))
            keep(slot, first, h[right], a[right])

    with torch.inference_mode():
        prefill([(1, 0, 3), (0, 0, 11)], padding=3)
        prefill([(2, 0, 20), (0, 11, 14)])
        decode([(0, 25, 4), (1, 3, 2), (2, 20, 4)], query_len=4, wrong_from=2)
        decode([(2, 22, 3), (0, 27, 3)], query_len=3, wrong_from=3)
        prefill([(0, 30, 9)])
        decode([(0, 39, 1), (2, 25, 1), (1, 5, 1)], query_len=1, wrong_from=1)
        decode([(0, 40, 1), (1, 6, 1)], query_len=3, wrong_from=3)
    return list(zip(hidden, aux, strict=True))


def check_against(target: TargetModel, sequences: list[torch.Tensor], expected: Expected) -> None:
    """Logits, final hidden states and all streams entering blocks, on every position."""
    size, num_layers = target.config.hidden_size, target.num_layers
    assert target.aux_layers == tuple(range(8))
    for (hidden, aux), (logits, states) in zip(run_all(target, sequences), expected, strict=True):
        assert relative_error(target.compute_logits(hidden), logits) < 1e-4
        # The last state of transformers is behind the final norm; all others are the raw stream.
        assert relative_error(hidden, states[num_layers]) < 1e-4
        for boundary in range(num_layers):
            got = aux[:, boundary * size : (boundary + 1) * size]
            assert relative_error(got, states[boundary]) < 1e-4
    choices = torch.cat([logits.argmax(-1) for logits, _ in expected])
    assert choices.unique().numel() >= 4, (
        "a model that says the same whatever it reads shows little"
    )

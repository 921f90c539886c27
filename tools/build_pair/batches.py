"""Batches of whole records, padded to a few fixed lengths, drawn on the device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from tools.build_pair.encode import Records
from tools.build_pair.tokenizer import PAD_ID

BUCKETS = (64, 128, 256, 512, 1024)


class Batches:
    """Endless batches `[rows, bucket]` of about `tokens` tokens; records start at position 0."""

    def __init__(
        self, records: Records, tokens: int, device: str, seed: int = 0, text_weight: int = 2
    ) -> None:
        self.tokens = tokens
        self.device = device
        self.flat = torch.from_numpy(records.tokens.astype(np.int32)).to(device)
        self.starts = torch.from_numpy(records.starts).to(device)
        self.lengths = torch.from_numpy(records.lengths.astype(np.int64)).to(device)
        self.rng = np.random.default_rng(seed)
        which = np.searchsorted(np.array(BUCKETS), records.lengths)
        repeat = np.where(records.prompts == 0, text_weight, 1)
        self.members = [
            np.repeat(np.flatnonzero(which == b), repeat[which == b]) for b in range(len(BUCKETS))
        ]

    def gather(self, rows: Tensor, length: int) -> Tensor:
        """Records `rows` as `[n, length]`, padded with PAD."""
        columns = torch.arange(length, device=self.device)
        inside = columns < self.lengths[rows].unsqueeze(1)
        at = (self.starts[rows].unsqueeze(1) + columns).clamp(max=self.flat.numel() - 1)
        return torch.where(inside, self.flat[at].long(), PAD_ID)

    def epoch(self, full: bool = True) -> Iterator[Tensor]:
        """One pass; batches keep a fixed size per bucket unless `full` is false."""
        plan: list[tuple[int, Tensor]] = []
        for length, members in zip(BUCKETS, self.members, strict=True):
            order = torch.from_numpy(self.rng.permutation(members)).to(self.device)
            rows = max(1, self.tokens // length)
            for at in range(0, len(order), rows):
                part = order[at : at + rows]
                if len(part) == rows or not full:
                    plan.append((length, part))
        for index in self.rng.permutation(len(plan)):
            length, part = plan[index]
            yield self.gather(part, length)

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield from self.epoch()

"""Prompts for sampling: the prompt part of chats, and the beginnings of plain documents."""

from __future__ import annotations

import torch
from torch import Tensor

from tools.build_pair.encode import Records
from tools.build_pair.tokenizer import PAD_ID


class PromptPool:
    """Draws prompts of training records on the device."""

    def __init__(self, records: Records, device: str, seed: int = 0) -> None:
        self.device = device
        self.flat = torch.from_numpy(records.tokens.astype("int32")).to(device)
        self.starts = torch.from_numpy(records.starts).to(device)
        self.lengths = torch.from_numpy(records.lengths.astype("int64")).to(device)
        self.prompts = torch.from_numpy(records.prompts.astype("int64")).to(device)
        self.random = torch.Generator(device=device).manual_seed(seed)

    def _pick(self, members: Tensor, count: int) -> Tensor:
        at = torch.randint(len(members), (count,), generator=self.random, device=self.device)
        return members[at]

    def draw(
        self, rows: int, longest: int, chat_share: float = 0.6, shortest: int = 3
    ) -> tuple[Tensor, Tensor]:
        """`[rows, longest]` prompts of `shortest..longest` tokens, and their lengths."""
        chats = self._pick(
            ((self.prompts >= shortest) & (self.prompts <= longest)).nonzero()[:, 0],
            round(rows * chat_share),
        )
        plain = self._pick(
            ((self.prompts == 0) & (self.lengths > longest + 8)).nonzero()[:, 0],
            rows - len(chats),
        )
        span = torch.rand(len(plain), generator=self.random, device=self.device)
        cut = shortest + (span * (longest - shortest + 1)).long()
        records = torch.cat([chats, plain])
        lengths = torch.cat([self.prompts[chats], cut])
        columns = torch.arange(longest, device=self.device)
        at = (self.starts[records].unsqueeze(1) + columns).clamp(max=self.flat.numel() - 1)
        tokens = torch.where(columns < lengths.unsqueeze(1), self.flat[at].long(), PAD_ID)
        return tokens, lengths

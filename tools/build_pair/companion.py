"""A draft that learns beside the target, so that the target becomes one that drafts can follow.

Its gradient reaches the target's features, as that of the extra heads of multi-token prediction
does (Gloeckle et al., arXiv 2404.19737), and on corpus text the target's distribution is pulled a
little towards the draft's. On the target's own text it is not: no corpus token speaks there against
what both agree on, and a bad habit would confirm itself. The draft shares embedding and head with
the target; what it learnt starts the EAGLE-3 draft.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tools.build_pair.draft import Draft, attend
from tools.build_pair.losses import draft_loss, soft_loss
from tools.build_pair.model import Target
from tools.build_pair.optimiser import DraftOptimiser
from tools.build_pair.own_samples import written_by_target
from tools.build_pair.sample_target import Completions
from tools.build_pair.tokenizer import PAD_ID

STRENGTH = 0.5  # of the draft's loss beside the target's own
PULL = 0.8  # of the pull within the draft's loss
NARROW, WIDE = 64, 128  # columns of corpus text the draft is run on
TOKENS = 32_768


class Companion:
    """The draft, its optimiser and its loss on a batch that the target was just run on."""

    def __init__(self, target: Target, compiled: bool, start: Path | None = None) -> None:
        weight = target.embed_tokens.weight
        self.target = target
        self.draft = Draft(target.shape, weight, target.shape.vocab).to(weight.device)
        self.draft.reset(torch.arange(target.shape.vocab, device=weight.device))
        if start is not None:
            self.draft.load_state_dict(load_file(start), strict=False)
        self.draft.lm_head.weight = weight
        self.soft: Any = soft_loss
        if compiled:
            self.soft = torch.compile(soft_loss, dynamic=True)
            self.draft.attend = torch.compile(attend, dynamic=False)
        self.optimiser = DraftOptimiser(self.draft, 2e-3, frozen=(weight,))

    def on_corpus(self, tokens: Tensor, last: Tensor, streams: list[Tensor]) -> Tensor:
        """Three passes over part of a corpus batch: few columns, few rows."""
        width = min(tokens.shape[1], NARROW if tokens.shape[1] <= NARROW else WIDE)
        part = (slice(0, TOKENS // width), slice(0, width))
        tokens = tokens[part]
        counted = torch.zeros_like(tokens, dtype=torch.bool)
        counted[:, :-1] = tokens[:, 1:] != PAD_ID
        aux = torch.cat([streams[i][part] for i in self.draft.aux], dim=-1)
        loss, self.hits = self._loss(tokens, last[part], aux, counted, 3, PULL)
        return loss

    def on_samples(self, done: Completions) -> Tensor:
        """Four passes over what the target wrote; the target is run on it anew."""
        with torch.autocast(done.tokens.device.type, torch.bfloat16):
            last, aux = self.target.features(done.tokens, self.draft.aux)
        counted = written_by_target(done.tokens, done)
        loss, self.hits = self._loss(done.tokens, last, aux, counted, 4, 0.0)
        return loss

    def _loss(
        self, tokens: Tensor, last: Tensor, aux: Tensor, counted: Tensor, steps: int, pull: float
    ) -> tuple[Tensor, Tensor]:
        return draft_loss(
            self.draft, self.target, tokens, last, aux, counted,
            steps=steps, decay=0.8, soft=self.soft, pull=pull,
        )  # fmt: skip

    def learnt(self) -> dict[str, Tensor]:
        """Weights of the layer, `fc` and the norm."""
        skipped = ("lm_head.weight", "d2t", "t2d")
        state = self.draft.state_dict()
        return {n: t.detach().cpu().contiguous() for n, t in state.items() if n not in skipped}

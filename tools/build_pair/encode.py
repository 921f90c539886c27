"""Token arrays: the corpus as one flat array with record lengths and prompt lengths."""

from __future__ import annotations

import io
import json
import lzma
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tools.build_pair.tokenizer import (
    ASSISTANT_ID,
    BOS_ID,
    END_ID,
    EOS_ID,
    SYSTEM_ID,
    USER_ID,
)

MAX_TOKENS = 1024
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "Answer the question in plain English.",
    "You are a patient teacher.",
)


@dataclass
class Records:
    """Token records: `prompts[i]` tokens of record i are the prompt of a chat, 0 in plain text."""

    tokens: NDArray[np.uint16]
    lengths: NDArray[np.uint16]
    prompts: NDArray[np.uint16]

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each record begins in `tokens`."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        return ends - self.lengths

    def save(self, path: Path) -> None:
        """Write the arrays as an xz file."""
        buffer = io.BytesIO()
        np.savez(buffer, tokens=self.tokens, lengths=self.lengths, prompts=self.prompts)
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 3, "dict_size": 1 << 25}]
        path.write_bytes(lzma.compress(buffer.getvalue(), filters=filters))

    @classmethod
    def load(cls, path: Path) -> Records:
        """Read what `save` wrote."""
        with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as arrays:
            return cls(arrays["tokens"], arrays["lengths"], arrays["prompts"])


def encode(corpus: Path, tokenizer: Tokenizer, seed: int = 0) -> Records:
    """Encode every record of `corpus` with the special tokens around it."""
    rng = random.Random(seed)

    def ids(batch: list[str]) -> list[list[int]]:
        return [e.ids for e in tokenizer.encode_batch_fast(batch, add_special_tokens=False)]

    systems = ids(list(SYSTEM_PROMPTS))
    chunks: list[NDArray[np.uint16]] = []
    lengths: list[int] = []
    prompts: list[int] = []

    def add(record: list[int], prompt: int) -> None:
        record = record[:MAX_TOKENS]
        if prompt >= len(record):
            return
        chunks.append(np.array(record, dtype=np.uint16))
        lengths.append(len(record))
        prompts.append(prompt)

    def flush(batch: list[dict[str, Any]]) -> None:
        plain = ids([r["text"] if "text" in r else r["q"] for r in batch])
        answers = ids([r.get("a", "") for r in batch])
        before: list[int] = []  # the chat so far, when the next question continues it
        for record, first, answer in zip(batch, plain, answers, strict=True):
            if "text" in record:
                add([BOS_ID, *first, EOS_ID], 0)
                before = []
                continue
            if not before:
                before = [BOS_ID]
                if rng.random() < 0.04:
                    before += [SYSTEM_ID, *rng.choice(systems), END_ID]
            prompt = [*before, USER_ID, *first, END_ID, ASSISTANT_ID]
            add([*prompt, *answer, END_ID], len(prompt))
            keep = rng.random() < 0.06 and len(prompt) + len(answer) < 160
            before = [*prompt, *answer, END_ID] if keep else []

    batch: list[dict[str, Any]] = []
    with corpus.open(encoding="utf-8") as lines:
        for line in lines:
            batch.append(json.loads(line))
            if len(batch) == 20_000:
                flush(batch)
                batch = []
    flush(batch)
    return Records(
        np.concatenate(chunks),
        np.array(lengths, dtype=np.uint16),
        np.array(prompts, dtype=np.uint16),
    )

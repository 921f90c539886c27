"""The held-out prompts: drawn from items kept out of training, and checked against its text."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

WINDOW = 8  # so many words in a row that also stand in the training text disqualify a prompt

Prompt = dict[str, Any]


def words_of(text: str) -> list[str]:
    """Lower-case words without punctuation."""
    return re.findall(r"[a-z0-9']+", text.lower())


def windows(text: str) -> Iterator[str]:
    """Every run of WINDOW words."""
    words = words_of(text)
    for at in range(len(words) - WINDOW + 1):
        yield " ".join(words[at : at + WINDOW])


def content(prompt: Prompt) -> str:
    """The text of a prompt line."""
    return str(prompt["prompt"] if "prompt" in prompt else prompt["messages"][-1]["content"])


def candidates(held: Path, rng: random.Random) -> tuple[list[Prompt], list[Prompt]]:
    """Chat prompts and plain prompts made of the held-out records."""
    chats: list[Prompt] = []
    plain: list[Prompt] = []
    for line in held.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "q" in record:
            message = {"role": "user", "content": record["q"]}
            chats.append({"messages": [message], "max_tokens": 128, "source": record["source"]})
            continue
        words = record["text"].split(" ")
        number = rng.choice((10, 14, 20, 30, 50, 90, 160))
        if len(words) > number + 20:
            plain.append(
                {"prompt": " ".join(words[:number]), "max_tokens": 64, "source": record["source"]}
            )
    rng.shuffle(chats)
    rng.shuffle(plain)
    return chats, plain


def spread(prompts: Iterable[Prompt], number: int, per_source: int) -> list[Prompt]:
    """The first `number` prompts with at most `per_source` of one package."""
    taken: dict[str, int] = {}
    kept: list[Prompt] = []
    for prompt in prompts:
        source = prompt["source"]
        if taken.get(source, 0) < per_source and len(kept) < number:
            taken[source] = taken.get(source, 0) + 1
            kept.append(prompt)
    return kept


def seen_in_training(prompts: list[Prompt], train: Path) -> set[int]:
    """Indices of prompts of which a window of words, or the whole, stands in the training text."""
    wanted: dict[str, list[int]] = {}
    whole: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        for window in windows(content(prompt)):
            wanted.setdefault(window, []).append(index)
        whole.setdefault(" ".join(words_of(content(prompt))), []).append(index)
    found: set[int] = set()
    with train.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            for part in ("text", "q", "a"):
                text = record.get(part, "")
                if part == "q":
                    found.update(whole.get(" ".join(words_of(text)), ()))
                for window in windows(text):
                    if window in wanted:
                        found.update(wanted[window])
    return found


def build(corpus: Path, out: Path, number: int = 200, seed: int = 5) -> int:
    """Write `number` held-out prompts, none of them in the training text, to `out`."""
    rng = random.Random(seed)
    chats, plain = candidates(corpus / "held.jsonl", rng)
    wordnet = [c for c in chats if c["source"] == "wordnet-base"]
    others = [c for c in chats if c["source"] != "wordnet-base"]
    pools = [
        (spread(wordnet, number, number), number * 3 // 10),
        (spread(others, number, 20), number * 4 // 10),
        (spread(plain, number, 20), number * 3 // 10),
    ]
    every = [prompt for pool, _ in pools for prompt in pool]
    seen = {id(every[i]) for i in seen_in_training(every, corpus / "train.jsonl")}
    kept = [p for pool, size in pools for p in [q for q in pool if id(q) not in seen][:size]]
    rng.shuffle(kept)
    with out.open("w", encoding="utf-8") as lines:
        for prompt in kept:
            lines.write(json.dumps({k: v for k, v in prompt.items() if k != "source"}) + "\n")
    return len(kept)

"""The checkpoints that other tests run on: they say different things, and heads agree in part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.straight_line import Eagle1, Eagle3, draft_tokens
from models.tiny import load_state, make_eagle1, make_eagle3, make_llama

FIRST_TOKENS = range(4, 90, 6)


def greedy(path: Path, num_tokens: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Greedy rows ``[15, 2 + num_tokens]`` and their hidden_states."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokens = torch.tensor([[1, first] for first in FIRST_TOKENS])
    with torch.inference_mode():
        for _ in range(num_tokens):
            tokens = torch.cat((tokens, model(tokens).logits[:, -1:].argmax(-1)), dim=1)
        return tokens, model(tokens, output_hidden_states=True).hidden_states


@pytest.mark.parametrize("options", [{}, {"bigram": True}, {"tie_word_embeddings": True}])
def test_greedy_continuations_vary(tmp_path: Path, options: dict[str, Any]) -> None:
    tokens, _ = greedy(make_llama(tmp_path / "target", **options), 24)
    distinct = torch.tensor([row[2:].unique().numel() for row in tokens])
    assert (distinct >= 4).float().mean() > 0.3
    assert tokens[:, 2:].unique().numel() >= 12


@pytest.mark.parametrize(
    ("make", "kind", "options"),
    [(make_eagle1, Eagle1, {}), (make_eagle3, Eagle3, {"draft_vocab_size": 80})],
)
def test_agreeable_heads_are_right_often_and_wrong_sometimes(
    tmp_path: Path, make: Callable[..., Path], kind: type[Any], options: dict[str, Any]
) -> None:
    target = make_llama(tmp_path / "target", bigram=True)
    path = make(tmp_path / "head", target, agreeable=True, **options)
    config = json.loads((path / "config.json").read_text())
    head = kind(load_state(path), config, load_state(target), 1e4)
    tokens, states = greedy(target, 24)
    features = states[-1] if kind is Eagle1 else torch.cat([states[b] for b in (2, 3, 4)], dim=-1)
    hits: list[list[bool]] = [[], []]
    for row in range(len(tokens)):
        for n in (4, 9, 16, 24):
            drafts, _ = draft_tokens(head, tokens[row, :n], features[row, : n - 1], 2)
            for j, draft in enumerate(drafts):
                hits[j].append(draft == int(tokens[row, n + j]))
    first, second = (sum(h) / len(h) for h in hits)
    assert 0.3 < first < 0.9
    assert 0.1 < second < 0.9


def test_tokenizer_round_trip(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = make_llama(tmp_path / "t", with_tokenizer=True)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert len(tokenizer) == 96
    text = "Hello, world 42!\nIt's (fine) - yes."
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_id == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert all(4 <= i < 96 for i in ids[1:])
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<s>user: hi\nassistant: "

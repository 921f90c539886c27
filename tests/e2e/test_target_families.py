"""Greedy tokens of every target family through the engine, with and without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.engines import PLAIN_HEAD, TEXT, TEXT_VOCAB
from e2e.harness import make_row, run_all, tokens_of
from models.tiny import edit_config, make_eagle1, make_eagle3, make_target

from specgen.config import EngineConfig
from specgen.pipeline.engine import Engine

NUM_TOKENS = 16
PROMPT_LENGTHS = (3, 8, 9, 10, 21, 40)  # below, at and past the windows
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOW = {"sliding_window": 9}
SWITCHED = {**WINDOW, "use_sliding_window": True}
# The original lengths of the ropes are so short that every pass of transformers is past them.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 2,
    "short_factor": [1.0] * 8,
    "long_factor": [1 + 0.9 * i for i in range(8)],
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 24}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}
YARN |= {"original_max_position_embeddings": 32}
# family, configuration, whether the EAGLE-1 head below can know what the target says
TARGETS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "mistral": ("mistral", WINDOW, True),
    "qwen2": ("qwen2", {**SWITCHED, "max_window_layers": 1}, True),
    "qwen3": ("qwen3", {**SWITCHED, "layer_types": MIXED}, True),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}, True),
    "mixtral": ("mixtral", WINDOW, True),
    "yarn": ("llama", {"rope_parameters": YARN}, True),
    "longrope": ("llama", {"rope_parameters": LONGROPE}, True),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "attention_bias": True}, True),
    "tied": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}, False),
    # Rows go on past the model's own positions, as far as the rope carries them.
    "linear": (
        "llama",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        },
        True,
    ),
    # Through transformers:
    "cohere": ("cohere", {"logit_scale": 0.5}, False),
    "gemma2": ("gemma2", {**WINDOW, "attn_logit_softcapping": 2.0}, False),
    "gemma3": ("gemma3", WINDOW, False),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}, False),
    "olmo2": ("olmo2", {}, False),
    "phi3": ("phi3", WINDOW, True),
}


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [
        tuple(torch.randint(4, TEXT_VOCAB, (length,), generator=generator).tolist())
        for length in PROMPT_LENGTHS
    ]


def greedy(path: Path) -> list[tuple[int, ...]]:
    """By transformers, each token from a pass over all before it: no cache of theirs either."""
    from transformers import AutoModelForCausalLM

    auto_class: Any = AutoModelForCausalLM
    model = auto_class.from_pretrained(path, attn_implementation="eager").eval()
    rows = []
    with torch.inference_mode():
        for prompt in prompts():
            tokens = torch.tensor([prompt])
            for _ in range(NUM_TOKENS):
                logits = model(tokens, use_cache=False).logits[:, -1:]
                tokens = torch.cat((tokens, logits.argmax(-1)), dim=1)
            rows.append(tuple(tokens[0, len(prompt) :].tolist()))
    return rows


@pytest.mark.parametrize("name", TARGETS)
def test_greedy_tokens_equal_transformers(tmp_path: Path, name: str) -> None:
    family, overrides, agreeable = TARGETS[name]
    path = make_target(
        tmp_path / "target",
        family,
        with_tokenizer=True,
        bigram=agreeable,
        **{**TEXT, **overrides},
    )
    expected = greedy(path)
    assert len({token for row in expected for token in row}) >= 4
    rows = [
        make_row(i, prompt, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        for i, prompt in enumerate(prompts())
    ]
    heads = {
        None: None,
        "eagle1": make_eagle1(tmp_path / "eagle1", path, agreeable=agreeable, **PLAIN_HEAD),
        "eagle3": make_eagle3(tmp_path / "eagle3", path, draft_vocab_size=60, **PLAIN_HEAD),
    }
    for kind, head in heads.items():
        engine = Engine(
            EngineConfig(
                model=str(path),
                draft_model=None if head is None else str(head),
                device="cpu",
                dtype="float32",
                max_model_len=80,
                max_num_seqs=4,
                max_num_batched_tokens=17,  # prompts come in chunks
                num_speculative_tokens=3,
            )
        )
        outputs = run_all(engine, rows, preempt_seed=3)
        assert tokens_of(outputs) == expected, kind
        described = engine.describe()
        native = described["target_backend"] == "native"
        assert native == (name not in ("cohere", "gemma2", "gemma3", "gpt_neox", "olmo2", "phi3"))
        assert bool(described["target_notes"]) == (not native or name == "longrope")
        if kind == "eagle1" and agreeable:
            stats = [choice.stats for output in outputs for choice in output.choices]
            accepted = sum(part.num_accepted_draft_tokens for part in stats)
            assert 10 < accepted < sum(part.num_draft_tokens for part in stats)


def test_a_dynamic_rope_is_the_rope_of_the_longest_row(tmp_path: Path) -> None:
    """Its base is that of rows of max_model_len, whatever the row: a plain rope of another base."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
    path = make_target(
        tmp_path / "target",
        with_tokenizer=True,
        max_position_embeddings=32,
        rope_parameters=rope,
        **TEXT,
    )
    rows = [
        make_row(i, prompt, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        for i, prompt in enumerate(prompts())
    ]
    engine = Engine(EngineConfig(model=str(path), device="cpu", dtype="float32", max_model_len=80))
    tokens = tokens_of(run_all(engine, rows, preempt_seed=3))
    assert "max_model_len 80" in engine.describe()["target_notes"][0]
    base = 1e4 * (3.0 * 80 / 32 - 2.0) ** (16 / 14)
    edit_config(path, rope_parameters={"rope_type": "default", "rope_theta": base})
    assert tokens == greedy(path)
    edit_config(path, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    assert tokens != greedy(path)

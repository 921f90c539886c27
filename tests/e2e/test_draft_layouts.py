"""Heads of every layout through the engine: the target's tokens, and the drafts of the head."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.engines import TEXT_VOCAB
from e2e.harness import histogram_of, make_row, run_all, step_log, tokens_of
from models import layouts
from models.tiny import edit_config, load_state, make_eagle3, save_shards, save_state

from specgen.config import EngineConfig
from specgen.errors import ModelError, UsageError
from specgen.pipeline.engine import Engine
from specgen.pipeline.request import PromptRow, RequestOutput

NUM_TOKENS = 16


def rows(num_tokens: int = NUM_TOKENS) -> list[PromptRow]:
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 9, 30, 17, 4, 23)
    return [
        make_row(
            i,
            torch.randint(4, TEXT_VOCAB, (length,), generator=generator).tolist(),
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
        )
        for i, length in enumerate(lengths)
    ]


def engine(target: Path, draft: Path | None, **config: Any) -> Engine:
    options: dict[str, Any] = {
        "device": "cpu",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 11,
        "num_speculative_tokens": 3,
    }
    draft_model = None if draft is None else str(draft)
    return Engine(EngineConfig(model=str(target), draft_model=draft_model, **options | config))


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> list[tuple[int, ...]]:
    """Tokens without a draft, which test_equality compares with transformers."""
    return tokens_of(run_all(engine(checkpoints["text"], None), rows()))


@pytest.fixture(scope="module")
def official(checkpoints: dict[str, Path]) -> dict[str, list[RequestOutput]]:
    return {
        name: run_all(engine(checkpoints["text"], checkpoints[f"text-{name}"]), rows())
        for name in ("eagle1", "eagle3")
    }


RESTYLED: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "speculators": (
        "eagle3",
        lambda head: layouts.to_speculators(head, norm_before_residual=True),
    ),
    "wrapped-eagle3": ("eagle3", lambda head: layouts.to_wrapped(head, prefix="model.")),
    "layers-0": ("eagle3", layouts.to_bare_layers),
    "speculators-eagle1": ("eagle1", layouts.to_speculators_eagle1),
    "wrapped": ("eagle1", lambda head: layouts.to_wrapped(head, prefix="model.")),
}


@pytest.mark.parametrize("name", RESTYLED)
def test_a_layout_changes_no_draft(
    checkpoints: dict[str, Path],
    expected: list[tuple[int, ...]],
    official: dict[str, list[RequestOutput]],
    tmp_path: Path,
    name: str,
) -> None:
    kind, restyle = RESTYLED[name]
    head = Path(shutil.copytree(checkpoints[f"text-{kind}"], tmp_path / "head"))
    outputs = run_all(engine(checkpoints["text"], restyle(head)), rows())
    assert tokens_of(outputs) == expected == tokens_of(official[kind])
    assert histogram_of(outputs) == histogram_of(official[kind])
    accepted = sum(sum(h[1:]) for h in histogram_of(outputs))
    assert accepted > 20, "a head that is read wrongly accepts nothing"


@pytest.mark.parametrize("as_bin", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("name", ["eagle1", "eagle3", *RESTYLED])
def test_shards_change_no_draft(
    checkpoints: dict[str, Path],
    expected: list[tuple[int, ...]],
    official: dict[str, list[RequestOutput]],
    tmp_path: Path,
    name: str,
    as_bin: bool,
) -> None:
    kind, restyle = RESTYLED.get(name, (name, lambda head: head))
    head = restyle(Path(shutil.copytree(checkpoints[f"text-{kind}"], tmp_path / "head")))
    files = save_shards(head, load_state(head), as_bin=as_bin)
    assert len(files) == 3
    outputs = run_all(engine(checkpoints["text"], head), rows())
    assert tokens_of(outputs) == expected
    assert histogram_of(outputs) == histogram_of(official[kind])
    files[1].unlink()
    with pytest.raises(ModelError, match=r"missing, but .*index\.json lists it"):
        engine(checkpoints["text"], head)


HEADS: dict[str, dict[str, Any]] = {
    "qk-norm": {"qk_norm": True},
    "fc-bias": {"fc_bias": True},
    "window": {"sliding_window": 5},
    "own-width": {
        "hidden_size": 48,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "store_embedding": "own",
    },
    "norm-before-fc": {"fc_norms": "whole"},
    "eagle-3.1": {"fc_norms": "chunks", "norm_output": True},
    "final-state": {"num_aux": 0, "eagle_config": {"use_aux_hidden_state": False}},
}


@pytest.mark.parametrize("name", HEADS)
def test_any_head_leaves_greedy_tokens_alone(
    checkpoints: dict[str, Path], expected: list[tuple[int, ...]], tmp_path: Path, name: str
) -> None:
    head = make_eagle3(tmp_path / "head", checkpoints["text"], draft_vocab_size=40, **HEADS[name])
    running = engine(checkpoints["text"], head)
    outputs = run_all(running, rows(), preempt_seed=3)
    assert tokens_of(outputs) == expected
    assert all(c.stats.num_spec_steps for output in outputs for c in output.choices)


def test_a_head_whose_rope_ends_drafts_no_further(
    checkpoints: dict[str, Path], expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    head = Path(shutil.copytree(checkpoints["text-eagle3"], tmp_path / "head"))
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10}
    edit_config(head, rope_parameters=rope, max_position_embeddings=20)
    limit, k = 20, 3
    running = engine(checkpoints["text"], head, num_speculative_tokens=k)
    (note,) = [n for n in running.describe()["draft_notes"] if "ends at position" in n]
    assert "yarn" in note
    assert str(limit) in note
    with step_log(running) as log:
        outputs = run_all(running, rows(), preempt_seed=2)
    assert tokens_of(outputs) == expected
    drafted = set()
    for step in log:
        if step.record.num_draft_tokens < 0 or step.start == 0:
            continue
        n = len(step.request.prompt_token_ids) + step.start
        # Draft j stands on the head's position n - 2 + j.
        assert step.record.num_draft_tokens == min(max(limit + 2 - n, 0), k), n
        drafted.add(step.record.num_draft_tokens)
    assert drafted == {0, 1, 2, 3}


def test_a_length_of_training_is_no_limit(
    checkpoints: dict[str, Path], official: dict[str, list[RequestOutput]], tmp_path: Path
) -> None:
    head = Path(shutil.copytree(checkpoints["text-eagle3"], tmp_path / "head"))
    edit_config(head, max_position_embeddings=8)
    outputs = run_all(engine(checkpoints["text"], head), rows())
    assert histogram_of(outputs) == histogram_of(official["eagle3"])


def test_settings_replace_what_a_configuration_says(
    checkpoints: dict[str, Path], official: dict[str, list[RequestOutput]], tmp_path: Path
) -> None:
    head = Path(shutil.copytree(checkpoints["text-eagle3"], tmp_path / "head"))
    edit_config(
        head,
        norm_before_residual=...,
        norm_output=True,
        rope_parameters={"rope_type": "default", "rope_theta": 77.0},
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
    )
    right: dict[str, Any] = {
        "draft_aux_layers": (2, 0, 1),
        "draft_rope_theta": 10000.0,
        "draft_norm_output": False,
        "draft_norm_before_residual": True,
    }
    with pytest.raises(ModelError, match="--draft-norm-output false"):
        engine(checkpoints["text"], head, **right | {"draft_norm_output": None})
    running = engine(checkpoints["text"], head, **right)
    assert {key: running.describe()[key] for key in right} == right
    assert "(override)" in running.describe()["draft_notes"][0]
    assert histogram_of(run_all(running, rows())) == histogram_of(official["eagle3"])
    wrong = engine(checkpoints["text"], head, **right | {"draft_norm_before_residual": False})
    assert histogram_of(run_all(wrong, rows())) != histogram_of(official["eagle3"])


def test_an_open_default_is_asked_for(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    head = Path(shutil.copytree(checkpoints["text-eagle3"], tmp_path / "head"))
    edit_config(layouts.to_bare_layers(head), norm_before_residual=...)
    with pytest.raises(ModelError, match="--draft-norm-before-residual true or false"):
        engine(checkpoints["text"], head)


@pytest.mark.parametrize(
    ("override", "flag"),
    [
        ({"draft_aux_layers": (0, 1, 2)}, "--draft-aux-layers"),
        ({"draft_norm_output": True}, "--draft-norm-output"),
        ({"draft_norm_before_residual": False}, "--draft-norm-before-residual"),
    ],
)
def test_a_setting_that_changes_nothing_is_refused(
    checkpoints: dict[str, Path], override: dict[str, Any], flag: str
) -> None:
    with pytest.raises(UsageError, match=flag):
        engine(checkpoints["text"], checkpoints["text-eagle1"], **override)


def test_a_truncated_vocabulary_drafts_its_tokens_alone(
    checkpoints: dict[str, Path], expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    head = Path(shutil.copytree(checkpoints["text-eagle1"], tmp_path / "head"))
    state = load_state(checkpoints["text"])
    lm_head = state.get("lm_head.weight", state["model.embed_tokens.weight"])
    save_state(head, load_state(head) | {"lm_head.weight": lm_head})
    token_map = torch.randperm(TEXT_VOCAB, generator=torch.Generator().manual_seed(4))[:50]
    running = engine(checkpoints["text"], layouts.to_wrapped(head, token_map=token_map))
    allowed = set(token_map.tolist())
    seen: set[int] = set()
    decode = running._runner.decode

    def spy(requests: Any, *args: Any) -> torch.Tensor:
        for request in requests:
            seen.update(running._state.draft_tokens[request.slot].tolist())
        return decode(requests, *args)

    running._runner.decode = spy  # type: ignore[method-assign]
    outputs = run_all(running, rows())
    assert tokens_of(outputs) == expected
    assert seen <= allowed
    assert len(seen) > 10
    assert sum(sum(h[1:]) for h in histogram_of(outputs)) > 10

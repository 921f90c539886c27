"""Heads against a dense forward written from their description: the same drafts, round by round."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from models import layouts, straight_line
from models.paged import Paged, at_last_pairs
from models.tiny import load_state, make_eagle1, make_eagle3, make_target, save_state

from specgen.kernels import select_kernels
from specgen.models.decoder import Decoder
from specgen.models.draft import DraftModel, DraftOverrides
from specgen.models.registry import read_model_config
from specgen.models.weights import inspect_draft, load_draft, load_target

KERNELS = select_kernels("cpu")
K = 4
LENGTH = 48
PROMPT_LENS = (13, 1, 22)
# Accepted drafts of each row and round; a row in the middle of others moves at its own speed.
ACCEPTED = ((0, 4, 2, 1), (3, 0, 0, 4), (4, 1, 2, 0))


@dataclass(frozen=True)
class Case:
    """One head: how it is written, and which target features it must be given."""

    make: Callable[..., Path]
    options: dict[str, Any] = field(default_factory=dict)
    boundaries: tuple[int, ...] | None = (2, 3, 4)
    target: str = "llama"
    overrides: DraftOverrides | None = None
    theta: float = 10000.0
    restyle: Callable[[Path], Path] | None = None
    """Rewrites the official head in another layout."""
    truth: dict[str, Any] = field(default_factory=dict)
    """What the head is, where its configuration says something else."""
    token_map: torch.Tensor | None = None
    """Target ids of the rows of a truncated lm_head."""


EAGLE_IDS = "eagle_aux_hidden_state_layer_ids"
# All three bands of the frequencies occur below the tests' lengths.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 60,
}
# Pairs that are kept, slowed, and in between.
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4, "beta_slow": 1}
YARN |= {"original_max_position_embeddings": 20}
TOKEN_MAP = torch.randperm(96, generator=torch.Generator().manual_seed(3))[:60]
CASES = {
    "eagle1": Case(make_eagle1, {}, None),
    "eagle1_bias_stored_though_declared_false": Case(make_eagle1, {"declared_bias": False}, None),
    "eagle1_no_bias": Case(make_eagle1, {"fc_bias": False, "declared_bias": False}, None),
    "eagle1_no_bias_and_no_word_of_it": Case(make_eagle1, {"fc_bias": False}, None),
    "eagle1_qkv_bias": Case(make_eagle1, {"qkv_bias": True}, None),
    "eagle1_own_embedding": Case(make_eagle1, {"store_embedding": "own"}, None),
    "eagle1_own_lm_head": Case(make_eagle1, {"store_lm_head": True}, None),
    "eagle1_theta": Case(
        make_eagle1, {"rope_parameters": None, "rope_theta": 5e5}, None, theta=5e5
    ),
    "eagle1_bin": Case(make_eagle1, {"as_bin": True}, None),
    "eagle1_tied_qwen2": Case(make_eagle1, {"qkv_bias": True}, None, target="qwen2"),
    "eagle3": Case(make_eagle3),
    "eagle3_bin": Case(make_eagle3, {"as_bin": True}),
    "eagle3_without_t2d": Case(make_eagle3, {"store_t2d": False}),
    "eagle3_whole_vocabulary": Case(make_eagle3, {"draft_vocab_size": None}),
    "eagle3_target_lm_head": Case(make_eagle3, {"draft_vocab_size": None, "store_lm_head": False}),
    "eagle3_norm_before_residual": Case(make_eagle3, {"norm_before_residual": True}),
    "eagle3_nested_outputs": Case(make_eagle3, {"eagle_config": {EAGLE_IDS: [1, 3, 5]}}, (2, 4, 6)),
    "eagle3_nested_boundaries": Case(
        make_eagle3, {"eagle_config": {EAGLE_IDS: [2, 4, 6]}}, (2, 4, 6)
    ),
    "eagle3_top_ids_unsorted": Case(make_eagle3, {EAGLE_IDS: [6, 1, 3]}, (1, 3, 6)),
    "eagle3_two_ids": Case(make_eagle3, {EAGLE_IDS: [0, 5], "num_aux": 2}, (0, 5)),
    "eagle3_overridden_ids": Case(
        make_eagle3, {}, (1, 4, 5), overrides=DraftOverrides(aux_layers=(5, 1, 4))
    ),
    "eagle3_own_width": Case(
        make_eagle3,
        {"hidden_size": 48, "num_attention_heads": 6, "store_embedding": "own"},
    ),
    "eagle3_norm_before_fc": Case(make_eagle3, {"fc_norms": "whole"}),
    "eagle3_fc_norm": Case(make_eagle3, {"fc_norms": "chunks"}),
    "eagle3_fc_norm_older_names": Case(make_eagle3, {"fc_norms": "older"}),
    "eagle3_normed_feedback": Case(make_eagle3, {"fc_norms": "chunks", "norm_output": True}),
    "eagle3_final_state": Case(
        make_eagle3, {"num_aux": 0, "eagle_config": {"use_aux_hidden_state": False}}, None
    ),
    "eagle3_no_rope_keys": Case(make_eagle3, {"rope_parameters": None}),
    "eagle3_overridden_theta": Case(
        make_eagle3, {}, theta=1e6, overrides=DraftOverrides(rope_theta=1e6)
    ),
    "eagle3_qwen3": Case(make_eagle3, {}, target="qwen3"),
    "eagle3_qk_norm": Case(make_eagle3, {"qk_norm": True}, target="qwen3"),
    "eagle3_fc_bias": Case(make_eagle3, {"fc_bias": True}),
    "eagle3_window": Case(make_eagle3, {"sliding_window": 6}),
    "eagle3_layers_0": Case(
        make_eagle3,
        restyle=layouts.to_bare_layers,
        overrides=DraftOverrides(norm_before_residual=False),
    ),
    "eagle3_specforge_raw_feedback": Case(
        make_eagle3,
        {"norm_output": True},
        overrides=DraftOverrides(norm_output=False),
        truth={"norm_output": False},
    ),
    "eagle3_specforge_normed_feedback": Case(
        make_eagle3, {"norm_output": True}, overrides=DraftOverrides(norm_output=True)
    ),
    "speculators": Case(make_eagle3, restyle=layouts.to_speculators),
    "speculators_bin": Case(make_eagle3, {"as_bin": True}, restyle=layouts.to_speculators),
    "speculators_embedding": Case(
        make_eagle3, {"store_embedding": "own"}, restyle=layouts.to_speculators
    ),
    "speculators_qwen3": Case(
        make_eagle3,
        {"qk_norm": True, "norm_before_residual": True},
        target="qwen3",
        restyle=layouts.to_speculators,
    ),
    "speculators_top_ids_are_boundaries": Case(
        make_eagle3, {EAGLE_IDS: [1, 3, 5]}, (1, 3, 5), restyle=layouts.to_speculators
    ),
    "speculators_normed_feedback": Case(
        make_eagle3,
        {"fc_norms": "whole", "norm_output": True, "norm_before_residual": True},
        restyle=layouts.to_speculators,
    ),
    "speculators_fc_norm": Case(
        make_eagle3, {"fc_norms": "chunks", "norm_output": True}, restyle=layouts.to_speculators
    ),
    "speculators_residual_by_flag": Case(
        make_eagle3,
        {"norm_before_residual": True},
        restyle=lambda head: layouts.to_speculators(head, norm_before_residual=...),
        overrides=DraftOverrides(norm_before_residual=True),
    ),
    "speculators_own_width": Case(
        make_eagle3,
        {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "store_embedding": "own",
            "target_hidden_size": 32,
        },
        restyle=layouts.to_speculators,
    ),
    "speculators_window": Case(
        make_eagle3,
        {"sliding_window": 6, "layer_types": ["sliding_attention"]},
        restyle=layouts.to_speculators,
    ),
    "speculators_llama3_rope": Case(
        make_eagle3,
        {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": LLAMA3_ROPE},
        theta=500.0,
        restyle=layouts.to_speculators,
    ),
    # As a speculators head of a Mistral has it, its original length made short.
    "speculators_yarn_rope": Case(
        make_eagle3,
        {"rope_parameters": YARN, "sliding_window": 2048, "use_sliding_window": False},
        theta=100.0,
        restyle=lambda head: layouts.to_speculators(head, norm_before_residual=True),
        truth={"norm_before_residual": True, "sliding_window": None},
    ),
    "eagle3_linear_rope": Case(
        make_eagle3,
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 200.0}},
        theta=200.0,
    ),
    "speculators_eagle1": Case(make_eagle1, {}, None, restyle=layouts.to_speculators_eagle1),
    "speculators_eagle1_no_bias": Case(
        make_eagle1,
        {"fc_bias": False, "store_lm_head": True, "store_embedding": "own"},
        None,
        restyle=layouts.to_speculators_eagle1,
    ),
    "wrapped": Case(make_eagle1, {"store_lm_head": True}, None, restyle=layouts.to_wrapped),
    "wrapped_prefixed": Case(
        make_eagle1,
        {"fc_bias": False, "store_embedding": "own"},
        None,
        restyle=lambda head: layouts.to_wrapped(head, prefix="model.", extra_norm=True),
    ),
    "wrapped_twice_prefixed": Case(
        make_eagle1, {}, None, restyle=lambda head: layouts.to_wrapped(head, prefix="model.model.")
    ),
    "wrapped_truncated": Case(
        make_eagle1,
        {"store_lm_head": True},
        None,
        restyle=lambda head: layouts.to_wrapped(head, token_map=TOKEN_MAP),
        token_map=TOKEN_MAP,
    ),
    "wrapped_truncated_whole_lm_head": Case(
        make_eagle1,
        {"store_lm_head": True},
        None,
        restyle=lambda head: layouts.to_wrapped(head, token_map=TOKEN_MAP, whole_lm_head=True),
        token_map=TOKEN_MAP,
    ),
    "wrapped_whole_vocabulary": Case(
        make_eagle1,
        {"store_lm_head": True},
        None,
        restyle=lambda head: layouts.to_wrapped(
            head, token_map=TOKEN_MAP, whole_lm_head=True, truncated_vocab_size=96
        ),
    ),
    "wrapped_eagle3": Case(
        make_eagle3, restyle=lambda head: layouts.to_wrapped(head, prefix="model.")
    ),
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {
        "llama": make_target(root / "llama"),
        "qwen2": make_target(root / "qwen2", "qwen2", tie_word_embeddings=True),
        "qwen3": make_target(root / "qwen3", "qwen3"),
    }


@pytest.fixture(scope="module")
def sequences() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(4, 96, (3, LENGTH), generator=generator, dtype=torch.int32)


@pytest.fixture(scope="module")
def true_states(
    targets: dict[str, Path], sequences: torch.Tensor
) -> dict[str, tuple[torch.Tensor, ...]]:
    """hidden_states ``[3, LENGTH, H]`` of each target by transformers."""
    from transformers import AutoModelForCausalLM

    states = {}
    for name, path in targets.items():
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
        with torch.inference_mode():
            states[name] = model(sequences.long(), output_hidden_states=True).hidden_states
    return states


class Drafting:
    """The product's side: extends and drafts over paged caches as a decode loop does."""

    def __init__(self, target: Decoder, draft: DraftModel, sequences: torch.Tensor) -> None:
        self.draft, self.sequences = draft, sequences
        self.paged = Paged(draft, 3, LENGTH + 2 * K)
        # True features of every position, by the product's own target.
        cache = Paged(target, 3, LENGTH)
        metadata = cache.prefill([(row, 0, LENGTH) for row in range(3)])
        hidden, aux = target.forward(sequences.flatten(), metadata, cache.caches)
        features = hidden if draft.features == "final" else aux
        assert features is not None
        self.features = features.view(3, LENGTH, -1)

    def write(self, chunks: list[tuple[int, int, int]]) -> None:
        """Chunks none of which ends a prompt."""
        self.draft.write_cache(*self.pairs(chunks), self.paged.prefill(chunks), self.paged.caches)

    def prefill(self, chunks: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Chunks all of which end a prompt: what follows from their last pairs."""
        metadata = self.paged.prefill(chunks)
        assert metadata.query_start_loc is not None
        last = at_last_pairs(metadata, metadata.query_start_loc[1:].long() - 1)
        return self.draft.forward(*self.pairs(chunks), last, self.paged.caches)

    def pairs(self, chunks: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.cat([self.sequences[s, f + 1 : f + n + 1] for s, f, n in chunks])
        features = torch.cat([self.features[s, f : f + n] for s, f, n in chunks])
        return ids, self.draft.fuse(features)

    def extend(self, rows: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """K + 1 pairs a row from its first new position; only ``count`` of them are true."""
        ids = torch.zeros(3, K + 1, dtype=torch.int32)
        features = torch.full((3, K + 1, self.features.shape[-1]), 3.0)
        for i, (row, first, count) in enumerate(rows):
            ids[i, :count] = self.sequences[row, first + 1 : first + count + 1]
            features[i, :count] = self.features[row, first : first + count]
        hidden = self.draft.fuse(features.flatten(0, 1))
        last = torch.tensor([i * (K + 1) + count - 1 for i, (_, _, count) in enumerate(rows)])
        metadata = at_last_pairs(self.paged.decode(rows, K + 1), last)
        return self.draft.forward(ids.flatten(), hidden, metadata, self.paged.caches)

    def propose(
        self, rows: list[tuple[int, int]], out: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts ``[rows, K]`` as target ids and their logits, from the last true pair's outputs.

        ``rows`` gives slot and number of true pairs.
        """
        drafts, logits_of = [], []
        for step in range(K):
            logits = self.draft.compute_logits(out)
            ids = logits.argmax(-1)
            if self.draft.target_ids is not None:
                ids = self.draft.target_ids[ids]
            drafts.append(ids)
            logits_of.append(logits)
            if step < K - 1:
                at = [(slot, num_pairs + step, 1) for slot, num_pairs in rows]
                out, hidden = self.draft.forward(
                    ids.to(torch.int32), hidden, self.paged.decode(at, 1), self.paged.caches
                )
        return torch.stack(drafts, 1), torch.stack(logits_of, 1)


def write(
    case: Case, head: Path, target: Path
) -> tuple[Path, straight_line.Eagle1 | straight_line.Eagle3]:
    """The head on disk in its layout, and written down from the official one."""
    case.make(head, target, **case.options)
    config = json.loads((head / "config.json").read_text()) | case.truth
    state = load_state(head)
    if case.token_map is not None:
        state["token_map"] = case.token_map
        state["lm_head.weight"] = state["lm_head.weight"][case.token_map]
    if case.restyle is not None:
        case.restyle(head)
    kind = straight_line.Eagle1 if case.make is make_eagle1 else straight_line.Eagle3
    return head, kind(state, config, load_state(target), case.theta)


@pytest.mark.parametrize("name", list(CASES))
@torch.inference_mode()
def test_drafts_equal_the_straight_line(
    name: str,
    tmp_path: Path,
    targets: dict[str, Path],
    sequences: torch.Tensor,
    true_states: dict[str, tuple[torch.Tensor, ...]],
) -> None:
    case = CASES[name]
    target_path = targets[case.target]
    path, head = write(case, tmp_path / "head", target_path)
    config = inspect_draft(path, read_model_config(target_path), overrides=case.overrides)
    assert config.aux_layers == (case.boundaries or ())
    target = load_target(target_path, device="cpu", kernels=KERNELS, aux_layers=config.aux_layers)
    draft = load_draft(path, target, device="cpu", kernels=KERNELS, overrides=case.overrides)
    states = true_states[case.target]
    features = (
        states[-1]
        if case.boundaries is None
        else torch.cat([states[boundary] for boundary in case.boundaries], dim=-1)
    )
    product = Drafting(target, draft, sequences)
    seen: set[int] = set()

    def compare(num_pairs: list[int], drafts: torch.Tensor, logits: torch.Tensor) -> None:
        for row, n in enumerate(num_pairs):
            want, want_logits = straight_line.draft_tokens(
                head, sequences[row, : n + 1].long(), features[row, :n], K
            )
            assert drafts[row].tolist() == want, (row, n)
            stacked = torch.stack(want_logits)
            if case.token_map is not None:  # the product's rows ascend
                stacked = stacked[:, case.token_map.argsort()]
            assert (logits[row] - stacked).abs().max() < 1e-4 * stacked.abs().max()
            seen.update(want)

    # Prompts in chunks: the last pair of a chunk takes the prompt's next token.
    product.write([(0, 0, 5), (2, 0, 9)])
    out, hidden = product.prefill([(0, 5, 8), (1, 0, 1), (2, 9, 13)])
    num_pairs = list(PROMPT_LENS)
    drafts, logits = product.propose(list(enumerate(num_pairs)), out, hidden)
    compare(num_pairs, drafts, logits)
    for accepted in zip(*ACCEPTED, strict=True):
        rows = [(row, num_pairs[row], accepted[row] + 1) for row in range(3)]
        out, hidden = product.extend(rows)
        num_pairs = [first + count for _, first, count in rows]
        drafts, logits = product.propose(list(enumerate(num_pairs)), out, hidden)
        compare(num_pairs, drafts, logits)
    assert len(seen) >= 4


@pytest.mark.parametrize("name", list(CASES))
def test_every_parameter_of_a_head_has_exactly_one_source(
    name: str, tmp_path: Path, targets: dict[str, Path]
) -> None:
    case = CASES[name]
    target_path = targets[case.target]
    path, _ = write(case, tmp_path / "head", target_path)
    config = inspect_draft(path, read_model_config(target_path), overrides=case.overrides)
    target = load_target(target_path, device="cpu", kernels=KERNELS, aux_layers=config.aux_layers)
    draft = load_draft(path, target, device="cpu", kernels=KERNELS, overrides=case.overrides)
    assert isinstance(draft, torch.nn.Module)
    parameters = dict(draft.named_parameters())
    slots = draft.slots()
    assert sum(slot.numel() for slot in slots.values()) == sum(
        parameter.numel() for parameter in parameters.values()
    )
    owners = {parameter.data_ptr() for parameter in target.parameters()}
    assert not owners & {parameter.data_ptr() for parameter in parameters.values()}


def test_token_maps_are_inverse(tmp_path: Path, targets: dict[str, Path]) -> None:
    path = make_eagle3(tmp_path / "head", targets["llama"], draft_vocab_size=40)
    target = load_target(targets["llama"], device="cpu", kernels=KERNELS, aux_layers=(2, 3, 4))
    draft = load_draft(path, target, device="cpu", kernels=KERNELS)
    state = load_state(path)
    assert draft.target_ids is not None
    assert draft.draft_ids is not None
    assert draft.target_ids.dtype == draft.draft_ids.dtype == torch.int32
    assert draft.target_ids.tolist() == state["t2d"].nonzero().flatten().tolist()
    assert draft.draft_ids[draft.target_ids.long()].tolist() == list(range(40))
    assert (draft.draft_ids == -1).sum() == 96 - 40


def test_identity_map_over_the_whole_vocabulary_is_dropped(
    tmp_path: Path, targets: dict[str, Path]
) -> None:
    path = make_eagle3(tmp_path / "head", targets["llama"], draft_vocab_size=96)
    target = load_target(targets["llama"], device="cpu", kernels=KERNELS, aux_layers=(2, 3, 4))
    draft = load_draft(path, target, device="cpu", kernels=KERNELS)
    assert draft.target_ids is None
    assert draft.draft_ids is None


def test_an_embedding_stored_twice_is_kept_once(
    tmp_path: Path, targets: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    target = load_target(targets["llama"], device="cpu", kernels=KERNELS)
    same = make_eagle1(tmp_path / "same", targets["llama"], store_embedding="same")
    draft = load_draft(same, target, device="cpu", kernels=KERNELS)
    assert isinstance(draft, torch.nn.Module)
    assert draft.embed_weight.data_ptr() == target.embed_weight.data_ptr()
    assert not caplog.records
    state = load_state(same)
    state["embed_tokens.weight"][3:5] *= 1e-5
    tiny = {"model.embed_tokens.weight": state["embed_tokens.weight"].bfloat16().float()}
    other = shutil.copytree(targets["llama"], tmp_path / "target")
    save_state(other, load_state(other) | tiny)
    state["embed_tokens.weight"] = tiny["model.embed_tokens.weight"].half()
    save_state(same, state)
    rounded = load_target(other, device="cpu", kernels=KERNELS)
    assert not torch.equal(state["embed_tokens.weight"].float(), rounded.embed_weight)
    draft = load_draft(same, rounded, device="cpu", kernels=KERNELS)
    assert isinstance(draft, torch.nn.Module)
    assert draft.embed_weight.data_ptr() == rounded.embed_weight.data_ptr()
    assert not caplog.records
    state["embed_tokens.weight"] = 1.01 * tiny["model.embed_tokens.weight"]
    save_state(same, state)
    draft = load_draft(same, rounded, device="cpu", kernels=KERNELS)
    assert isinstance(draft, torch.nn.Module)
    assert draft.embed_weight.data_ptr() != rounded.embed_weight.data_ptr()
    caplog.clear()
    own = make_eagle1(tmp_path / "own", targets["llama"], store_embedding="own")
    draft = load_draft(own, target, device="cpu", kernels=KERNELS)
    assert isinstance(draft, torch.nn.Module)
    assert draft.embed_weight.data_ptr() != target.embed_weight.data_ptr()
    assert "differs from the target's" in caplog.text
    assert any("differs from the target's" in note for note in draft.config.notes)


def test_a_rope_table_is_shared_only_with_an_equal_rope(
    tmp_path: Path, targets: dict[str, Path]
) -> None:
    target = load_target(targets["llama"], device="cpu", kernels=KERNELS)
    equal = make_eagle1(tmp_path / "equal", targets["llama"])
    other = make_eagle1(tmp_path / "other", targets["llama"], rope_parameters=None, rope_theta=5e5)
    tables = []
    for path in (equal, other):
        draft = load_draft(path, target, device="cpu", kernels=KERNELS)
        assert isinstance(draft, torch.nn.Module)
        tables.append(draft.cos_sin)
    assert tables[0].data_ptr() == target.cos_sin.data_ptr()
    assert tables[1].shape == target.cos_sin.shape
    assert not torch.equal(tables[1], target.cos_sin)

"""The tools that build the built-in pair, at toy size on the CPU."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from tools.build_pair import evaluate, heldout, wordnet
from tools.build_pair.companion import Companion
from tools.build_pair.draft import Draft, load_draft, save_draft
from tools.build_pair.losses import draft_loss
from tools.build_pair.model import Shape, Target, load_target, save_target
from tools.build_pair.readers import is_prose
from tools.build_pair.sample_target import Completions, Sampler, repeats

SHAPE = Shape(hidden=32, layers=8, heads=2, kv_heads=1, head_dim=16, intermediate=48, vocab=64)


@pytest.fixture
def target() -> Target:
    torch.manual_seed(0)
    model = Target(SHAPE)
    model.reset()
    return model.requires_grad_(False)


def test_target_checkpoint_is_what_transformers_computes(target: Target, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_target(target, tmp_path)
    ours = load_target(tmp_path, "cpu", torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(7, 64, (2, 11))
    last, streams = ours(tokens)
    with torch.no_grad():
        output = theirs(tokens, output_hidden_states=True)
    torch.testing.assert_close(ours.head(last), output.logits, atol=1e-5, rtol=1e-4)
    for boundary in range(SHAPE.layers):
        expected = output.hidden_states[boundary]
        torch.testing.assert_close(streams[boundary], expected, atol=1e-5, rtol=1e-4)


def test_sampler_continues_greedily_like_a_full_forward(target: Target) -> None:
    prompts = torch.tensor([[0, 9, 8, 2], [0, 11, 12, 13]])
    lengths = torch.tensor([3, 4])
    done = Sampler(target, 2, 12).sample(prompts, lengths, torch.zeros(2))
    for row in range(2):
        end = int(done.lengths[row])
        last, _ = target(done.tokens[row : row + 1, :end])
        wanted = target.head(last).argmax(-1)[0]
        start = int(lengths[row])
        assert done.tokens[row, start:end].tolist() == wanted[start - 1 : end - 1].tolist()


@pytest.mark.parametrize("vocab", [None, 24])
def test_parallel_chain_equals_a_chain_from_one_position(
    target: Target, tmp_path: Path, vocab: int | None
) -> None:
    draft = Draft(SHAPE, target.embed_tokens.weight, vocab)
    draft.reset(torch.arange(0, 2 * vocab, 2) if vocab else None)
    save_draft(draft, tmp_path)
    draft = load_draft(tmp_path, SHAPE, target.embed_tokens.weight, torch.float32)
    tokens = torch.randint(7, 64, (1, 10))
    last, aux = target.features(tokens, draft.aux)
    features = aux if draft.eagle3 else last
    given = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1)
    chains = draft.chain(features, given, 4, lambda q, _: q.argmax(-1))
    start = 6  # what a cache would do: the true prefix, then own hidden states one by one
    known, hidden = given[:, : start + 1], draft.first(features[:, : start + 1])
    for number in range(4):
        past: list[tuple[torch.Tensor, torch.Tensor]] = []
        out = draft.step(hidden, known, past, 0)
        token = draft.ids[draft.logits(out[:, -1:]).argmax(-1)]
        assert int(token) == int(chains[number][0, start])
        known, hidden = torch.cat([known, token], 1), torch.cat([hidden, out[:, -1:]], 1)


def test_loss_at_a_label_is_the_cross_entropy_of_a_chain_that_ends_there(target: Target) -> None:
    draft = Draft(SHAPE, target.embed_tokens.weight, SHAPE.vocab)
    draft.reset(torch.arange(SHAPE.vocab))
    draft.lm_head.weight.data *= 40  # far from uniform: another index has another loss
    tokens = torch.randint(7, 64, (1, 9))
    last, aux = target.features(tokens, draft.aux)
    counted = torch.zeros(1, 9, dtype=torch.bool)
    counted[0, 5] = True  # index 5 predicts token 6
    with torch.no_grad():
        found, _ = draft_loss(draft, target, tokens, last, aux, counted, steps=3, decay=0.5)
        wanted = target.head(last[0, 5]).softmax(-1)
        total = 0.0
        for passes, weight in enumerate((1.0, 0.5, 0.25)):
            start = 4 - passes  # this pass began there, on true tokens
            given, rows = tokens[:, 1:], list[torch.Tensor]()

            def choose(
                logits: torch.Tensor,
                number: int,
                given: torch.Tensor = given,
                rows: list[torch.Tensor] = rows,
            ) -> torch.Tensor:
                rows.append(logits)
                ahead = [min(t + number + 1, 7) for t in range(8)]
                return given[:, ahead]

            draft.chain(aux[:, :8], given, passes + 1, choose)
            total += weight * -float((wanted * rows[passes][0, start].log_softmax(-1)).sum())
    # The loss is taken in bfloat16.
    assert float(found) == pytest.approx(total / 1.75, rel=2e-2)


def test_companion_teaches_the_target_and_the_pull_reaches_its_head_only_on_corpus() -> None:
    torch.manual_seed(1)
    model = Target(SHAPE)
    model.reset()
    companion = Companion(model, compiled=False)
    tokens = torch.randint(7, 64, (4, 12))
    last, streams = model(tokens)
    companion.on_corpus(tokens, last, streams).backward()
    deep = model.layers[7].mlp.down_proj.weight.grad  # feeds boundary 8 and the head
    assert deep is not None
    assert bool(deep.abs().sum() > 0)
    assert model.norm.weight.grad is not None  # before the head: only the pull goes there
    model.zero_grad()
    companion.on_samples(Completions(tokens, torch.full((4,), 3), torch.full((4,), 12))).backward()
    assert model.layers[7].mlp.down_proj.weight.grad is not None
    assert model.norm.weight.grad is None
    assert "lm_head.weight" not in companion.learnt()


def test_rounds_account_for_every_token() -> None:
    tokens = torch.tensor([[0, 7, 10, 11, 12, 13, 14, 15]])
    done = Completions(tokens, torch.tensor([2]), torch.tensor([8]))
    right = torch.cat([tokens[:, 2:], tokens[:, :2]], dim=1)
    second = torch.cat([tokens[:, 3:], tokens[:, :3]], dim=1)
    found = evaluate.rounds([right, second], done, 2)
    # Five tokens after the first: 2 + 1, then the last two are accepted and end the text.
    assert found["steps"] == 2
    assert found["mean_acceptance_length"] == 3.0
    found = evaluate.rounds([second, second], done, 2)
    assert found["mean_acceptance_length"] == 1.0


def test_repeats_are_counted_within_a_text() -> None:
    assert evaluate.repeated_share(["a b c d e f g"]) == 0.0
    assert evaluate.repeated_share(["a b c d a b c d"]) == pytest.approx(1 / 5)
    tokens = torch.tensor([[0, 9, 1, 2, 3, 4, 1, 2, 3, 4]])
    marks = repeats(tokens, torch.tensor([2]), torch.tensor([10]))
    assert marks[0].nonzero()[:, 0].tolist() == [9]


def test_prose_is_told_from_code() -> None:
    assert is_prose("The server reads the file once, when it starts, and keeps it in memory.")
    assert not is_prose("x = foo(bar)[0]; y = {a: 1, b: 2}; return x_1 + y_2 - z_3 * w_4;")


def test_wordnet_chats_answer_about_the_word() -> None:
    entry = wordnet.Synset("n", ["cat"], "a small animal", ["the cat sat on the mat"])
    chats = list(wordnet.chats({"n1": entry}, random.Random(0)))
    assert chats[0] == ("cat", chats[0][1], "Cat (noun): a small animal.")
    assert any(answer == "The cat sat on the mat." for _, _, answer in chats)


def test_heldout_check_finds_a_shared_window(tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    text = "one two three four five six seven eight nine ten"
    train.write_text(json.dumps({"source": "s", "text": text}) + "\n")
    prompts = [{"prompt": "zero two three four five six seven eight nine"}, {"prompt": "one two"}]
    assert heldout.seen_in_training(prompts, train) == {0}

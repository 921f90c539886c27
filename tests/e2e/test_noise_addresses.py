"""Every draw of the engine is at its published address: seed, position, stream, place, sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.engines import EngineShop
from e2e.harness import device_rows, make_row, run_all

from specgen.kernels.reference.rng import accept_uniform, token_gumbel
from specgen.kernels.streams import DRAFT, TARGET
from specgen.pipeline.engine import Engine
from specgen.pipeline.request import PromptRow, RequestOutput

TEMPERATURE = 0.8
K = 3


def rows() -> list[PromptRow]:
    return [
        make_row(i, (5,) * (i + 1), n=2, temperature=TEMPERATURE, max_tokens=16, ignore_eos=True)
        for i in range(4)
    ]


def noise(seed: int, ids: torch.Tensor, position: int, stream: int, j: int, sample: int) -> Any:
    """Gumbel noise of ``ids`` at one address."""
    one = torch.ones(1, dtype=torch.int32)
    seeds = torch.tensor([seed], dtype=torch.int64)
    return token_gumbel(seeds, ids[None].int(), position * one, stream, j * one, sample * one)[0]


def chosen(logits: torch.Tensor, g: torch.Tensor) -> int:
    return int((logits / TEMPERATURE + g).argmax())


def target_logits(checkpoints: dict[str, Path], output: RequestOutput) -> list[torch.Tensor]:
    """Logits [n, V] of transformers over prompt and completion, sample by sample."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(checkpoints["text"], dtype=torch.float32).eval()
    with torch.no_grad():
        return [
            model(torch.tensor([[*output.prompt_token_ids, *choice.token_ids]])).logits[0]
            for choice in output.choices
        ]


@pytest.mark.parametrize("draft", [None, "eagle1"])
def test_plain_tokens_are_the_target_stream_over_the_logits_of_transformers(
    engine_of: EngineShop, checkpoints: dict[str, Path], draft: str | None
) -> None:
    """All tokens without a draft; with one, the first token."""
    engine = engine_of("text", draft, draft_sample="greedy", max_num_seqs=8)
    for output in run_all(engine, rows(), preempt_seed=0):
        prompt_len = len(output.prompt_token_ids)
        for choice, logits in zip(output.choices, target_logits(checkpoints, output), strict=True):
            ids = torch.arange(logits.shape[1])
            expected = [
                chosen(logits[n - 1], noise(choice.seed, ids, n, TARGET, 0, choice.index))
                for n in range(prompt_len, prompt_len + (16 if draft is None else 1))
            ]
            assert list(choice.token_ids[: len(expected)]) == expected


@pytest.mark.parametrize("draft", ["eagle1", "eagle3"])
def test_sampled_drafts_are_the_draft_stream_over_the_stored_logits(
    engine_of: EngineShop, draft: str
) -> None:
    """Draft j of a row with n tokens is drawn for position n + j, from the q that judges it."""
    engine = engine_of("text", draft, draft_sample="gumbel", max_num_seqs=8)
    state, model = engine._state, engine._pipeline.draft
    assert state.draft_logits is not None
    assert model is not None
    ids = model.target_ids
    if ids is None:
        ids = torch.arange(state.draft_logits.shape[-1])
    decode = engine._runner.decode
    num_checked = 0

    def spy(requests: Any, *args: Any) -> torch.Tensor:
        nonlocal num_checked
        for request, slot, n in device_rows(engine, requests):
            for j in range(K):
                g = noise(request.seed, ids, n + j, DRAFT, j, request.sample_index)
                token = int(ids[chosen(state.draft_logits[slot, j], g)])  # type: ignore[index]
                assert int(state.draft_tokens[slot, j]) == token
                num_checked += 1
        return decode(requests, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._runner, "decode", spy)
        run_all(engine, rows(), preempt_seed=1)
    assert num_checked > 100


def test_acceptance_and_recovery_are_at_their_addresses(
    engine_of: EngineShop, checkpoints: dict[str, Path]
) -> None:
    """Whole steps judged again in Python: uniforms on ACCEPT at (n + i, i), tokens on TARGET."""
    engine: Engine = engine_of("text", "eagle1", draft_sample="greedy", max_num_seqs=8)
    proposals: dict[tuple[int, int, int], list[int]] = {}
    decode = engine._runner.decode

    def spy(requests: Any, *args: Any) -> torch.Tensor:
        for request, slot, n in device_rows(engine, requests):
            key = (request.row.index, request.sample_index, n)
            proposals[key] = engine._state.draft_tokens[slot].tolist()
        return decode(requests, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._runner, "decode", spy)
        outputs = run_all(engine, rows(), preempt_seed=2)
    num_steps = 0
    for output in outputs:
        prompt_len = len(output.prompt_token_ids)
        for choice, logits in zip(output.choices, target_logits(checkpoints, output), strict=True):
            whole = [*output.prompt_token_ids, *choice.token_ids]
            ids = torch.arange(logits.shape[1])
            n = prompt_len + 1
            while n < len(whole):
                drafts = proposals[output.row.index, choice.index, n]
                emitted = judge(logits, whole, n, drafts, choice.seed, choice.index, ids)
                assert whole[n : n + len(emitted)] == emitted[: len(whole) - n]
                n += len(emitted)
                num_steps += 1
    assert num_steps > 50


def judge(
    logits: torch.Tensor,
    whole: list[int],
    n: int,
    drafts: list[int],
    seed: int,
    sample: int,
    ids: torch.Tensor,
) -> list[int]:
    """One step of greedy drafts: those accepted, and the token behind them (if it was kept)."""
    one = torch.ones(1, dtype=torch.int32)
    seeds = torch.tensor([seed], dtype=torch.int64)
    for i in range(K + 1):
        if n + i - 1 >= len(whole) - 1:  # beyond the row's end
            return drafts[:i]
        scores = logits[n + i - 1] / TEMPERATURE
        g = noise(seed, ids, n + i, TARGET, 0, sample)
        if i == K:
            return [*drafts, int((scores + g).argmax())]
        u = float(accept_uniform(seeds, (n + i) * one, i * one, sample * one))
        if not u < float(scores.softmax(-1)[drafts[i]]):
            scores[drafts[i]] = -torch.inf
            return [*drafts[:i], int((scores + g).argmax())]
        if whole[n + i] != drafts[i]:  # accepted here, not there: let the caller see it
            return drafts[: i + 1]
    raise AssertionError("unreachable")

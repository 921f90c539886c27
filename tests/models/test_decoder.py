"""Targets against transformers: logits and features, prefill and decode, over paged caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.paged import Paged, at_last_pairs
from models.passes import (
    Expected,
    check_against,
    random_sequences,
    relative_error,
    run_all,
    run_transformers,
)
from models.tiny import make_target

from specgen.kernels import select_kernels
from specgen.models.decoder import Decoder
from specgen.models.rotary import TABLE_MARGIN
from specgen.models.weights import load_target

KERNELS = select_kernels("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def longrope(**changes: Any) -> dict[str, Any]:
    steps = [0.1 * i for i in range(8)]
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 20,
        "short_factor": [1 + step for step in steps],
        "long_factor": [1 + 9 * step for step in steps],
        **changes,
    }


def yarn(**changes: Any) -> dict[str, Any]:
    base = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}
    return {**base, "original_max_position_embeddings": 32, **changes}


MIXED = ["sliding_attention", "full_attention"] * 3 + ["full_attention"]
# Windows and original rope lengths are shorter than the sequences, so that both sides are seen.
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 4, "head_dim": 8}),
    "llama3": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama3.1": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "linear_rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "one_kv_head": ("llama", {"num_key_value_heads": 1, "num_attention_heads": 2}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3_bias": ("qwen3", {"attention_bias": True, "head_dim": 32}),
    "mistral": ("mistral", {}),
    "mistral_window": ("mistral", {"sliding_window": 9}),
    "qwen2_upper_windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3},
    ),
    "qwen3_mixed_windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": MIXED},
    ),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe_some_dense": (
        "qwen3_moe",
        {"mlp_only_layers": [1], "decoder_sparse_step": 2, "attention_bias": True},
    ),
    "mixtral": ("mixtral", {"sliding_window": 9}),
    "yarn": ("llama", {"rope_parameters": yarn()}),
    "yarn_all_keys": (
        "qwen2",
        {
            "rope_parameters": yarn(
                mscale=1.0, mscale_all_dim=0.7, beta_fast=16.0, beta_slow=2.0, truncate=False
            )
        },
    ),
    "yarn_attention_factor": (
        "qwen3",
        {"rope_parameters": yarn(original_max_position_embeddings=64, attention_factor=0.8)},
    ),
}


@pytest.fixture(scope="module", params=list(TARGETS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = TARGETS[request.param]
    return make_target(tmp_path_factory.mktemp("target") / request.param, family, **overrides)


@pytest.fixture(scope="module")
def sequences() -> list[torch.Tensor]:
    return random_sequences()


@pytest.fixture(scope="module")
def expected(checkpoint: Path, sequences: list[torch.Tensor]) -> Expected:
    return run_transformers(checkpoint, sequences)


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> Decoder:
    return load_target(checkpoint, device="cpu", kernels=KERNELS, aux_layers=tuple(range(8)))


def test_logits_and_features_equal_transformers(
    decoder: Decoder, sequences: list[torch.Tensor], expected: Expected
) -> None:
    check_against(decoder, sequences, expected)
    size = decoder.config.hidden_size
    for (_, aux), (_, states) in zip(run_all(decoder, sequences), expected, strict=True):
        last = aux[:, decoder.num_layers * size :]
        assert relative_error(decoder.norm(last.contiguous()), states[-1]) < 1e-4


def test_greedy_outputs_vary(expected: Expected) -> None:
    """The other tests show little on a model that says the same whatever it reads."""
    choices = torch.cat([logits.argmax(-1) for logits, _ in expected])
    assert choices.unique().numel() >= 10


# Ropes that follow from the length: transformers takes that of each pass, the decoder that of the
# longest row. The definitions agree on passes that are of that length, or on its side of the limit.
LENGTH_ROPES: dict[str, tuple[dict[str, Any], int, int]] = {
    "dynamic": (
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
        },
        61,
        61,
    ),
    "dynamic_within": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}},
        256,
        61,
    ),
    "longrope_long": ({"rope_parameters": longrope()}, 256, 61),
    "longrope_factor": ({"rope_parameters": longrope(factor=4.0)}, 21, 21),
    "longrope_short": ({"rope_parameters": longrope(attention_factor=1.2)}, 20, 20),
}


@pytest.mark.parametrize("name", LENGTH_ROPES)
def test_ropes_of_a_length_equal_transformers_at_that_length(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    overrides, max_model_len, length = LENGTH_ROPES[name]
    path = make_target(tmp_path / "t", "llama", **overrides)
    decoder = load_target(path, device="cpu", kernels=KERNELS, max_model_len=max_model_len)
    assert len(decoder.notes) == 1
    assert str(max_model_len) in decoder.notes[0]
    assert decoder.cos_sin.shape[0] == max_model_len + TABLE_MARGIN
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 96, (length,), generator=generator, dtype=torch.int32)
    paged = Paged(decoder, 1, length)
    hidden = []
    with torch.inference_mode():
        want = model(ids[None].long()).logits[0]
        # In chunks: one frequency for all, or the keys of the first would be of another rope.
        for first in range(0, length, 17):
            part = ids[first : first + 17]
            metadata = paged.prefill([(0, first, len(part))])
            hidden.append(decoder.forward(part, metadata, paged.caches)[0])
        got = decoder.compute_logits(torch.cat(hidden))
    assert relative_error(got, want) < 1e-4
    assert want.argmax(-1).unique().numel() >= 4


@pytest.mark.parametrize("aux_layers", [(2, 3, 4), (0, 7), (7,)])
def test_aux_layers_are_concatenated_in_ascending_order(
    tmp_path: Path, aux_layers: tuple[int, ...]
) -> None:
    path = make_target(tmp_path / "t")
    every = load_target(path, device="cpu", kernels=KERNELS, aux_layers=tuple(range(8)))
    some = load_target(path, device="cpu", kernels=KERNELS, aux_layers=aux_layers)
    none = load_target(path, device="cpu", kernels=KERNELS)
    ids = torch.arange(10, 19, dtype=torch.int32)
    results = []
    for model in (every, some, none):
        paged = Paged(model, 1, 9)
        results.append(model.forward(ids, paged.prefill([(0, 0, 9)]), paged.caches))
    size = every.config.hidden_size
    assert results[0][1] is not None
    chunks = results[0][1].split(size, dim=-1)
    assert results[1][1] is not None
    assert torch.equal(results[1][1], torch.cat([chunks[b] for b in aux_layers], dim=-1))
    assert results[2][1] is None
    assert torch.equal(results[2][0], results[0][0])


@pytest.mark.parametrize("aux_layers", [(), (2, 4), (1, 7)])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_moe", "gemma2"])
def test_last_tokens_alone_have_the_states_that_they_have_among_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, aux_layers: tuple[int, ...]
) -> None:
    """And the same entries of all tokens are in the cache; what is behind them has fewer rows."""
    window = {"sliding_window": 5} if family == "mistral" else {}
    path = make_target(tmp_path / "t", family, num_hidden_layers=7, **window)
    target = load_target(path, device="cpu", kernels=KERNELS, aux_layers=aux_layers)
    num_rows: list[int] = []
    if isinstance(target, Decoder):
        norm = target.layers[-1].post_attention_norm
        add = norm.add

        def counted(x: torch.Tensor, residual: torch.Tensor) -> Any:
            num_rows.append(residual.shape[0])
            return add(x, residual)

        monkeypatch.setattr(norm, "add", counted)
    ids = torch.arange(4, 31, dtype=torch.int32)
    last_idx = torch.tensor([8, 9, 26])
    results, caches = [], []
    for is_cut in (False, True):
        paged = Paged(target, 3, 20)
        metadata = paged.prefill([(1, 0, 9), (0, 0, 1), (2, 0, 17)])
        last = at_last_pairs(metadata, last_idx) if is_cut else None
        with torch.inference_mode():
            results.append(target.forward(ids, metadata, paged.caches, last))
        caches.append(paged.caches)
    (every, every_aux), (some, some_aux) = results
    assert some.shape[0] == len(last_idx)
    torch.testing.assert_close(some, every[last_idx], rtol=1e-5, atol=1e-5)
    assert (every_aux is None) == (some_aux is None) == (not aux_layers)
    if every_aux is not None and some_aux is not None:
        torch.testing.assert_close(some_aux, every_aux)
    for entries, others in zip(*caches, strict=True):
        torch.testing.assert_close(entries, others)
    if num_rows:
        assert num_rows == [27, 27 if 7 in aux_layers else 3]


def test_every_parameter_has_exactly_one_source(checkpoint: Path) -> None:
    decoder = load_target(checkpoint, device="cpu", kernels=KERNELS)
    slots = decoder.slots()
    elements = sum(slot.numel() for slot in slots.values())
    assert elements == sum(parameter.numel() for parameter in decoder.parameters())
    for slot in slots.values():
        slot.data.fill_(7.0)
    assert all((parameter == 7.0).all() for parameter in decoder.parameters())


def test_forward_in_low_precision_follows_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = make_target(tmp_path / "t")
    decoder = load_target(path, device="cpu", dtype="bfloat16", kernels=KERNELS, aux_layers=(2,))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    ids = torch.arange(4, 40, dtype=torch.int32)
    paged = Paged(decoder, 1, 36)
    caches = [(k.bfloat16(), v.bfloat16()) for k, v in paged.caches]
    with torch.inference_mode():
        hidden, aux = decoder.forward(ids, paged.prefill([(0, 0, 36)]), caches)
        logits = decoder.compute_logits(hidden)
        want = model(ids[None].long()).logits[0]
    assert aux is not None
    assert {hidden.dtype, aux.dtype, logits.dtype} == {torch.bfloat16}
    assert relative_error(logits.float(), want.float()) < 0.05

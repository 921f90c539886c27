"""Target and head inside one CUDA graph: nothing in a forward pass may ask the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.paged import Paged, at_last_pairs
from models.tiny import edit_config, make_eagle1, make_eagle3, make_llama, make_target

from specgen.kernels import select_kernels
from specgen.models.attention import AttentionMetadata
from specgen.models.registry import read_model_config
from specgen.models.weights import inspect_draft, load_draft, load_target

pytestmark = pytest.mark.gpu


def _cuda(metadata: AttentionMetadata) -> AttentionMetadata:
    fields: dict[str, Any] = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in vars(metadata).items()
    }
    return AttentionMetadata(**fields)


TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen3_moe": {"norm_topk_prob": True},
}


@pytest.mark.parametrize(
    ("family", "make"),
    [
        ("llama", make_eagle1),
        ("llama", make_eagle3),
        ("mistral", make_eagle3),
        ("qwen3_moe", make_eagle3),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_a_captured_round_equals_an_eager_one(
    family: str, make: Callable[..., Path], dtype: str, tmp_path: Path
) -> None:
    path = make_target(tmp_path / "target", family, **TARGETS[family])
    head = make(tmp_path / "head", path)
    kernels = select_kernels("cuda")
    options: dict[str, Any] = {"device": "cuda", "kernels": kernels, "dtype": dtype}
    aux_layers = inspect_draft(head, read_model_config(path)).aux_layers
    target = load_target(path, aux_layers=aux_layers, **options)
    draft = load_draft(head, target, **options)
    pages = [Paged(target, 3, 24), Paged(draft, 3, 24)]
    caches = [
        [(k.to("cuda", target.dtype), v.to("cuda", target.dtype)) for k, v in paged.caches]
        for paged in pages
    ]
    rows = [(0, 3, 4), (2, 9, 2), (1, 0, 4)]
    metadata = [_cuda(paged.decode(rows, 4)) for paged in pages]
    last_pairs = at_last_pairs(metadata[1], torch.tensor([3, 5, 11], device="cuda"))
    ids = torch.arange(12, dtype=torch.int32, device="cuda") + 5

    def round_() -> list[torch.Tensor]:
        hidden, aux = target.forward(ids, metadata[0], caches[0])
        fused = draft.fuse(hidden if aux is None else aux)
        out, feedback = draft.forward(ids, fused, metadata[1], caches[1])
        again, _ = draft.forward(ids, feedback, metadata[1], caches[1])
        last, _ = draft.forward(ids, fused, last_pairs, caches[1])
        return [target.compute_logits(hidden), *map(draft.compute_logits, (out, again, last))]

    round_()  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = round_()
    for shift in (0, 17):
        ids.add_(shift)
        graph.replay()
        for got, want in zip(captured, round_(), strict=True):
            pairs = [0, 1, 2, 3, 4, 5, 8, 9, 10, 11] if len(got) == 12 else [0, 1, 2]
            real = torch.tensor(pairs, device="cuda")
            torch.testing.assert_close(got[real], want[real], rtol=0.0, atol=0.0)
            assert torch.isfinite(got[real]).all()


def test_auto_dtype_on_a_gpu_is_the_checkpoints(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "target")
    edit_config(path, dtype="bfloat16")
    target = load_target(path, device="cuda", kernels=select_kernels("cuda"))
    assert target.dtype == torch.bfloat16
    assert target.device.type == "cuda"
    assert target.cos_sin.dtype == torch.float32

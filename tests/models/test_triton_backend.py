"""Targets and heads on the Triton kernels (interpreted without a GPU) against the torch twins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.paged import Paged, at_last_pairs
from models.tiny import make_eagle1, make_eagle3, make_target

from specgen.kernels import select_kernels
from specgen.models.registry import read_model_config
from specgen.models.weights import inspect_draft, load_draft, load_target

SMALL = {"num_hidden_layers": 3, "vocab_size": 40}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "llama_eagle1": ("llama", make_eagle1, {}),
    "qwen3_eagle3": ("qwen3", make_eagle3, {"draft_vocab_size": 24, "fc_norms": "chunks"}),
}


def run(
    backend: str, device: str, target_path: Path, head: Path, dtype: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs of a packed prefill, a decode pass and an extend pass, of target and head; caches."""
    kernels = select_kernels(device, backend)
    aux_layers = inspect_draft(head, read_model_config(target_path)).aux_layers
    options: dict[str, Any] = {"device": device, "kernels": kernels, "dtype": dtype}
    target = load_target(target_path, aux_layers=aux_layers, **options)
    draft = load_draft(head, target, **options)
    pages = [Paged(target, 2, 16), Paged(draft, 2, 16)]
    for paged in pages:
        paged.caches = [
            (k.to(device, target.dtype), v.to(device, target.dtype)) for k, v in paged.caches
        ]
    outputs = []
    ids = torch.arange(4, 16, dtype=torch.int32, device=device)
    for kind in ("prefill", "decode"):
        metadata = [
            paged.prefill([(1, 0, 7), (0, 0, 3)], padding=2)
            if kind == "prefill"
            else paged.decode([(0, 3, 2), (1, 7, 3)], 3)
            for paged in pages
        ]
        on_device = [_to(m, device) for m in metadata]
        tokens = ids[: len(on_device[0].positions)]
        hidden, aux = target.forward(tokens, on_device[0], pages[0].caches)
        fused = draft.fuse(hidden if aux is None else aux)
        out, feedback = draft.forward(tokens, fused, on_device[1], pages[1].caches)
        # Padding tokens and pairs past a row's end may hold anything.
        real = torch.tensor(
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] if kind == "prefill" else [0, 1, 3, 4, 5]
        )
        for tensor in (target.compute_logits(hidden), draft.compute_logits(out), feedback):
            outputs.append(tensor.float().cpu()[real])
    # As the decode pass, of which the last true pairs go on.
    last = at_last_pairs(on_device[1], torch.tensor([1, 5], device=device))
    outputs += [t.float().cpu() for t in draft.forward(tokens, fused, last, pages[1].caches)]
    torch.testing.assert_close(outputs[-1], outputs[-3][[1, 4]], rtol=2e-4, atol=2e-4)
    written = [c.float().cpu().flatten(0, 1)[:-8] for p in pages for kv in p.caches for c in kv]
    return outputs, written


def _to(metadata: Any, device: str) -> Any:
    fields = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in vars(metadata).items()
    }
    return type(metadata)(**fields)


@pytest.mark.parametrize("name", list(CASES))
@torch.inference_mode()
def test_models_on_triton_equal_the_twins(name: str, tmp_path: Path, device: str) -> None:
    family, make, options = CASES[name]
    target = make_target(tmp_path / "target", family, **SMALL)
    head = make(tmp_path / "head", target, **options)
    want, want_caches = run("reference", "cpu", target, head, "float32")
    got, got_caches = run("triton", device, target, head, "float32")
    for a, b in zip([*got, *got_caches], [*want, *want_caches], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)

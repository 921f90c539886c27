"""Loading targets and drafts: strictly, tensor by tensor, straight to the device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from specgen.errors import ModelError
from specgen.load_format import is_dummy
from specgen.models.checkpoint import Checkpoint
from specgen.models.config import ModelConfig
from specgen.models.decoder import Decoder
from specgen.models.draft_weights import inspect_draft, load_draft
from specgen.models.dummy import fill_dummy
from specgen.models.filling import FLOATS, check_tensors, fill_tensors, named_dtype
from specgen.models.host_memory import refuse_what_does_not_fit
from specgen.models.registry import read_model_config
from specgen.models.target import TargetModel

if TYPE_CHECKING:
    from specgen.kernels import Kernels

__all__ = ["LoadFormat", "inspect_draft", "load_draft", "load_target", "resolve_dtype"]

LoadFormat = Literal["auto", "dummy"]


def load_target(
    path: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | str = "auto",
    kernels: Kernels,
    aux_layers: tuple[int, ...] = (),
    max_model_len: int | None = None,
    load_format: str = "auto",
    trust_remote_code: bool = False,
) -> TargetModel:
    """Load a target: natively, or through transformers where no native family matches.

    Args:
        path: directory with ``config.json`` and weights (for dummies the configuration alone).
        device: where the parameters go; ``"meta"`` checks headers and reads no tensor.
        dtype: of the parameters; ``"auto"`` is the checkpoint's on CUDA and float32 on a CPU.
        kernels: operations to run on.
        aux_layers: boundaries whose features the draft needs, see :class:`Decoder`.
        max_model_len: tokens of the longest row, see :class:`Decoder`.
        load_format: ``"auto"``, or fixed pseudo-random weights, see :func:`fill_dummy`.
        trust_remote_code: whether code beside the checkpoint may run (transformers only).

    Raises:
        ModelError: anything about the checkpoint that is missing, damaged, unsupported or unused.
    """
    config = read_model_config(path, trust_remote_code=trust_remote_code)
    checkpoint = None if is_dummy(load_format) else Checkpoint.open(path)
    resolved = resolve_dtype(dtype, device, config, checkpoint)
    if config.backend == "transformers":
        from specgen.models.transformers_target import load_transformers_target

        return load_transformers_target(
            path,
            config,
            device=device,
            dtype=resolved,
            kernels=kernels,
            aux_layers=aux_layers,
            max_model_len=max_model_len,
            load_format=load_format,
            trust_remote_code=trust_remote_code,
        )

    def build(place: torch.device | str) -> Decoder:
        return Decoder(
            config, kernels, aux_layers, max_model_len=max_model_len, device=place, dtype=resolved
        )

    if torch.device(device).type == "cpu":
        refuse_what_does_not_fit(build("meta"), str(path))
    decoder = build(device)
    slots = decoder.slots()
    if checkpoint is None:
        fill_dummy(slots, load_format)
        return decoder
    spare: set[str] = set()
    if config.tie_word_embeddings and "lm_head.weight" in checkpoint.tensors:
        spare.add("lm_head.weight")
    check_tensors(slots, checkpoint, spare)
    if decoder.device.type == "meta":
        return decoder
    fill_tensors(slots, checkpoint)
    if spare:
        head = checkpoint.load("lm_head.weight").to(device=device, dtype=resolved)
        if not torch.equal(head, decoder.embed_weight):
            info = checkpoint.tensors["lm_head.weight"]
            raise ModelError(
                f'{info.file}: tensor "lm_head.weight" differs from "model.embed_tokens.weight", '
                'but config.json says "tie_word_embeddings": true',
                hint='set "tie_word_embeddings" to false if the model has a head of its own',
            )
    return decoder


def resolve_dtype(
    dtype: torch.dtype | str,
    device: torch.device | str,
    config: ModelConfig,
    checkpoint: Checkpoint | None = None,
) -> torch.dtype:
    """The dtype to run in: as asked; for ``"auto"`` the checkpoint's on CUDA, float32 on a CPU."""
    if dtype != "auto":
        return named_dtype(dtype)
    if torch.device(device).type == "cpu":
        return torch.float32
    if config.dtype is not None:
        return named_dtype(config.dtype)
    for info in checkpoint.tensors.values() if checkpoint is not None else ():
        if info.dtype in FLOATS[1:]:
            assert isinstance(info.dtype, torch.dtype)
            return info.dtype
    return torch.bfloat16

"""Loading targets and drafts: strictly, file by file, straight to the device.

Strict means that every tensor of the checkpoint is used, every parameter is filled, and every shape
fits, all of it checked from the file headers before any weight is read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from specgen.errors import ModelError, UsageError
from specgen.models.checkpoint import Checkpoint, TensorInfo
from specgen.models.config import ConfigReader, DraftConfig, ModelConfig
from specgen.models.decoder import Decoder
from specgen.models.draft import DraftModel, DraftOverrides
from specgen.models.draft_head import DraftHead
from specgen.models.draft_layout import DraftSource, recognise_draft
from specgen.models.dummy import fill_dummy
from specgen.models.eagle import Eagle1Draft, parse_eagle1_config
from specgen.models.eagle3 import Eagle3Draft, parse_eagle3_config
from specgen.models.registry import read_model_config
from specgen.models.target import TargetModel
from specgen.models.token_map import invert_target_ids, read_target_ids, read_token_map

if TYPE_CHECKING:
    from specgen.kernels import Kernels

__all__ = ["LoadFormat", "inspect_draft", "load_draft", "load_target", "resolve_dtype"]

LoadFormat = Literal["auto", "dummy"]

logger = logging.getLogger(__name__)

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Rope frequencies that old checkpoints store; they follow from the configuration.
_DERIVED_SUFFIX = "rotary_emb.inv_freq"


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
        path: directory with ``config.json`` and weights (for ``"dummy"`` the configuration alone).
        device: where the parameters go; ``"meta"`` checks headers and reads no tensor.
        dtype: of the parameters; ``"auto"`` is the checkpoint's on CUDA and float32 on a CPU.
        kernels: operations to run on.
        aux_layers: boundaries whose features the draft needs, see :class:`Decoder`.
        max_model_len: tokens of the longest row, see :class:`Decoder`.
        load_format: ``"auto"``, or ``"dummy"`` for fixed pseudo-random weights.
        trust_remote_code: whether code beside the checkpoint may run (transformers only).

    Raises:
        ModelError: anything about the checkpoint that is missing, damaged, unsupported or unused.
    """
    config = read_model_config(path, trust_remote_code=trust_remote_code)
    checkpoint = None if load_format == "dummy" else Checkpoint.open(path)
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
    decoder = Decoder(
        config, kernels, aux_layers, max_model_len=max_model_len, device=device, dtype=resolved
    )
    slots = decoder.slots()
    if checkpoint is None:
        fill_dummy(slots)
        return decoder
    spare: set[str] = set()
    if config.tie_word_embeddings and "lm_head.weight" in checkpoint.tensors:
        spare.add("lm_head.weight")
    _check(slots, checkpoint, spare)
    if decoder.device.type == "meta":
        return decoder
    _fill(slots, checkpoint)
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


def inspect_draft(
    path: str | Path,
    target: ModelConfig,
    *,
    load_format: str = "auto",
    overrides: DraftOverrides | None = None,
) -> DraftConfig:
    """Recognise a draft from its configuration and file headers, before anything is loaded.

    Raises:
        ModelError: as :func:`load_draft`, but for what only the weights' values show.
    """
    checkpoint = None if load_format == "dummy" else Checkpoint.open(path)
    return _read_draft(path, checkpoint, target, overrides or DraftOverrides())[1]


def load_draft(
    path: str | Path,
    target: TargetModel,
    *,
    device: torch.device | str,
    dtype: torch.dtype | str = "auto",
    kernels: Kernels,
    load_format: str = "auto",
    overrides: DraftOverrides | None = None,
) -> DraftModel:
    """Load the draft of a loaded target; embedding and lm_head are shared where they are the same.

    Args:
        path: directory with ``config.json`` and weights.
        target: the target, loaded with the draft's ``aux_layers``.
        device: must be the target's; on ``"meta"`` headers are checked and no tensor is read.
        dtype: ``"auto"`` or the target's.
        kernels: operations to run on.
        load_format: as for :func:`load_target`.
        overrides: facts that replace the configuration's.

    Raises:
        ModelError: anything about the checkpoint that is missing, damaged, unsupported, unused or
            made for another target.
    """
    wanted = target.dtype if dtype == "auto" else _named_dtype(dtype)
    assert wanted == target.dtype, (wanted, target.dtype)
    assert torch.device(device).type == target.device.type, (device, target.device)
    checkpoint = None if load_format == "dummy" else Checkpoint.open(path)
    source, config = _read_draft(path, checkpoint, target.config, overrides or DraftOverrides())
    assert config.features == "final" or config.aux_layers == target.aux_layers, (
        config.aux_layers,
        target.aux_layers,
    )
    draft: Eagle1Draft | Eagle3Draft
    if config.layout == "eagle1":
        draft = Eagle1Draft(config, target, kernels)
    else:
        draft = Eagle3Draft(config, target, kernels)
    target_ids = _fill_draft(draft, source, checkpoint)
    if target_ids is not None:
        draft.target_ids = target_ids.to(target.device)
        draft.draft_ids = invert_target_ids(draft.target_ids, config.vocab_size)
    if checkpoint is not None and target.device.type != "meta":
        _compare_embedding(draft, target, checkpoint.tensors, source)
    return draft


def resolve_dtype(
    dtype: torch.dtype | str,
    device: torch.device | str,
    config: ModelConfig,
    checkpoint: Checkpoint | None = None,
) -> torch.dtype:
    """The dtype to run in: as asked; for ``"auto"`` the checkpoint's on CUDA, float32 on a CPU."""
    if dtype != "auto":
        return _named_dtype(dtype)
    if torch.device(device).type == "cpu":
        return torch.float32
    if config.dtype is not None:
        return _named_dtype(config.dtype)
    for info in checkpoint.tensors.values() if checkpoint is not None else ():
        if info.dtype in _FLOATS[1:]:
            assert isinstance(info.dtype, torch.dtype)
            return info.dtype
    return torch.bfloat16


def _named_dtype(dtype: torch.dtype | str) -> torch.dtype:
    resolved = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert isinstance(resolved, torch.dtype), dtype
    return resolved


def _read_draft(
    path: str | Path,
    checkpoint: Checkpoint | None,
    target: ModelConfig,
    overrides: DraftOverrides,
) -> tuple[DraftSource, DraftConfig]:
    tensors = None if checkpoint is None else checkpoint.tensors
    source = recognise_draft(ConfigReader.from_directory(path), tensors)
    if source.layout == "eagle3":
        config = parse_eagle3_config(source, target, overrides)
    else:
        config = parse_eagle1_config(source, target, overrides)
    _refuse_idle_overrides(config, overrides)
    return source, config


def _refuse_idle_overrides(config: DraftConfig, overrides: DraftOverrides) -> None:
    """An override that changes nothing was given for another head."""
    if overrides.aux_layers is not None and config.features != "aux":
        raise UsageError("--draft-aux-layers: this head takes the target's final state")
    for name in ("norm_output", "norm_before_residual"):
        if config.layout == "eagle1" and getattr(overrides, name) is not None:
            raise UsageError(f"--draft-{name.replace('_', '-')}: an EAGLE-1 head has no such norm")


def _fill_draft(
    draft: Eagle1Draft | Eagle3Draft, source: DraftSource, checkpoint: Checkpoint | None
) -> torch.Tensor | None:
    """Fill the parameters and return the target ids of the draft vocabulary, if it has its own."""
    config = draft.config
    slots = {source.stored_name(name): slot for name, slot in draft.slots().items()}
    if checkpoint is None:
        fill_dummy(slots)
        if config.draft_vocab_size == config.vocab_size:
            return None
        spread = torch.arange(config.draft_vocab_size) * config.vocab_size
        return (spread // config.draft_vocab_size).to(torch.int32)
    spare = {source.stored_name(name) for name in source.unused}
    if "token_map" in config.stored:
        return _fill_truncated(draft, slots, source, checkpoint, spare)
    maps: set[str] = {name for name in ("d2t", "t2d") if name in config.stored}
    _check(slots, checkpoint, maps | spare)
    target_ids = None
    if draft.embed_weight.is_meta:
        return target_ids
    if maps:
        no_offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        target_ids = read_target_ids(
            checkpoint.load("d2t") if "d2t" in maps else no_offsets,
            checkpoint.load("t2d") if "t2d" in maps else None,
            draft_vocab_size=config.draft_vocab_size,
            vocab_size=config.vocab_size,
            file=checkpoint.tensors[min(maps)].file,
        )
    _fill(slots, checkpoint)
    return target_ids


def _fill_truncated(
    draft: Eagle1Draft | Eagle3Draft,
    slots: dict[str, torch.Tensor],
    source: DraftSource,
    checkpoint: Checkpoint,
    spare: set[str],
) -> torch.Tensor | None:
    """Fill a head whose ``token_map`` lists target ids in any order; ours ascend.

    Its lm_head has a row for each of them, or one for every token of the target.
    """
    config = draft.config
    name = source.stored_name("lm_head.weight")
    del slots[name]
    _check(slots, checkpoint, spare | {name, "token_map"})
    info = checkpoint.tensors[name]
    rows = info.shape[0] if info.shape else 0
    whole = rows == config.vocab_size
    _check_tensor(name, info, (rows if whole else config.draft_vocab_size, config.hidden_size))
    if draft.embed_weight.is_meta:
        return None
    ids, order = read_token_map(
        checkpoint.load("token_map"),
        draft_vocab_size=config.draft_vocab_size,
        vocab_size=config.vocab_size,
        file=checkpoint.tensors["token_map"].file,
    )
    _fill(slots, checkpoint)
    head = checkpoint.load(name)
    draft.lm_head_weight.copy_(head[ids.long() if whole else order])
    return ids


def _compare_embedding(
    draft: DraftHead,
    target: TargetModel,
    tensors: Mapping[str, TensorInfo],
    source: DraftSource,
) -> None:
    """Share an embedding stored twice; warn of one that is the head's own."""
    if "embed_tokens" not in draft.config.stored:
        return
    same_shape = draft.embed_weight.shape == target.embed_weight.shape
    if same_shape and torch.equal(draft.embed_weight, target.embed_weight):
        draft.share_embedding(target)
        return
    note = "the head brings an embedding that differs from the target's"
    draft.config = replace(draft.config, notes=(*draft.config.notes, note))
    if same_shape:
        logger.warning("%s: %s", tensors[source.stored_name("embed_tokens.weight")].file, note)


def _check(slots: Mapping[str, torch.Tensor], checkpoint: Checkpoint, spare: set[str]) -> None:
    """Names, shapes and dtypes of the whole checkpoint against what is to be filled."""
    tensors = checkpoint.tensors
    missing = [name for name in slots if name not in tensors]
    extra = [
        name
        for name in tensors
        if name not in slots and name not in spare and not name.endswith(_DERIVED_SUFFIX)
    ]
    if missing:
        hint = "the checkpoint is incomplete, or its config.json is of another model"
        if extra:
            hint += f"; it holds {_listed(extra)} instead"
        raise ModelError(f"{checkpoint.path}: tensor {_listed(missing)} is missing", hint=hint)
    if extra:
        raise ModelError(
            f"{tensors[extra[0]].file}: tensor {_listed(extra)} is not part of the model that "
            "config.json describes",
            hint="a tensor left unused changes what the model computes: check config.json",
        )
    for name, slot in slots.items():
        _check_tensor(name, tensors[name], tuple(slot.shape))


def _check_tensor(name: str, info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        raise ModelError(
            f'{info.file}: tensor "{name}" has shape {list(info.shape)}, expected {list(shape)}',
            hint="config.json and weights are of different models",
        )
    if info.dtype not in _FLOATS:
        raise ModelError(
            f'{info.file}: tensor "{name}" has dtype {info.dtype}, expected a float type',
            hint="quantized weights are not supported",
        )


def _fill(slots: Mapping[str, torch.Tensor], checkpoint: Checkpoint) -> None:
    for name, tensor in checkpoint.stream(set(slots)):
        slot = slots[name]
        slot.copy_(tensor)
        narrowed = slot.dtype == torch.float16 and tensor.dtype != torch.float16
        if narrowed and not torch.isfinite(slot).all() and torch.isfinite(tensor).all():
            raise ModelError(
                f'{checkpoint.tensors[name].file}: tensor "{name}" has values beyond float16',
                hint="use --dtype bfloat16 or float32",
            )


def _listed(names: list[str]) -> str:
    shown = ", ".join(f'"{name}"' for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} (and {len(names) - 3} more)"

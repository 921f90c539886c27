"""Loading drafts: recognised first, then filled strictly, sharing with the target what is equal."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specgen.errors import UsageError
from specgen.load_format import is_dummy
from specgen.models.checkpoint import Checkpoint, TensorInfo
from specgen.models.config import ConfigReader, DraftConfig, ModelConfig
from specgen.models.draft import DraftModel, DraftOverrides
from specgen.models.draft_head import DraftHead
from specgen.models.draft_layout import DraftSource, recognise_draft
from specgen.models.dummy import fill_dummy
from specgen.models.eagle import Eagle1Draft, parse_eagle1_config
from specgen.models.eagle3 import Eagle3Draft, parse_eagle3_config
from specgen.models.filling import check_shape, check_tensors, fill_tensors, named_dtype
from specgen.models.target import TargetModel
from specgen.models.token_map import invert_target_ids, read_target_ids, read_token_map

if TYPE_CHECKING:
    from specgen.kernels import Kernels

__all__ = ["inspect_draft", "load_draft"]

logger = logging.getLogger(__name__)


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
    checkpoint = None if is_dummy(load_format) else Checkpoint.open(path)
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
        device: must be the target's; on ``"meta"`` headers and vocabulary maps are checked
            and no weight is read.
        dtype: ``"auto"`` or the target's.
        kernels: operations to run on.
        load_format: ``"auto"``, or fixed pseudo-random weights, see :func:`fill_dummy`.
        overrides: facts that replace the configuration's.

    Raises:
        ModelError: anything about the checkpoint that is missing, damaged, unsupported, unused or
            made for another target.
    """
    wanted = target.dtype if dtype == "auto" else named_dtype(dtype)
    assert wanted == target.dtype, (wanted, target.dtype)
    assert torch.device(device).type == target.device.type, (device, target.device)
    checkpoint = None if is_dummy(load_format) else Checkpoint.open(path)
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
    target_ids = _fill_draft(draft, source, checkpoint, load_format)
    if target_ids is not None:
        draft.target_ids = target_ids.to(target.device)
        draft.draft_ids = invert_target_ids(draft.target_ids, config.vocab_size)
    if checkpoint is not None and target.device.type != "meta":
        checkpoint.close()
        _compare_embedding(draft, target, checkpoint.tensors, source)
    return draft


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
    draft: Eagle1Draft | Eagle3Draft,
    source: DraftSource,
    checkpoint: Checkpoint | None,
    load_format: str,
) -> torch.Tensor | None:
    """Fill the parameters and return the target ids of the draft vocabulary, if it has its own.

    On the meta device everything is checked, vocabulary maps by their values too, and nothing else
    is read.
    """
    config = draft.config
    slots = {source.stored_name(name): slot for name, slot in draft.slots().items()}
    if checkpoint is None:
        fill_dummy(slots, load_format)
        if config.draft_vocab_size == config.vocab_size:
            return None
        spread = torch.arange(config.draft_vocab_size) * config.vocab_size
        return (spread // config.draft_vocab_size).to(torch.int32)
    spare = {source.stored_name(name) for name in source.unused}
    if "token_map" in config.stored:
        return _fill_truncated(draft, slots, source, checkpoint, spare)
    maps: set[str] = {name for name in ("d2t", "t2d") if name in config.stored}
    check_tensors(slots, checkpoint, maps | spare)
    target_ids = None
    if maps:
        no_offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        target_ids = read_target_ids(
            checkpoint.load("d2t") if "d2t" in maps else no_offsets,
            checkpoint.load("t2d") if "t2d" in maps else None,
            draft_vocab_size=config.draft_vocab_size,
            vocab_size=config.vocab_size,
            file=checkpoint.tensors[min(maps)].file,
        )
    if draft.embed_weight.is_meta:
        return target_ids
    if target_ids is not None and int(target_ids[-1]) == len(target_ids) - 1:
        # Nobody's most frequent tokens: what trainers leave that never filled the map.
        logger.warning(
            '%s: tensor "d2t" is zero throughout: the head drafts the first %d tokens only, or its '
            "map was never filled",
            checkpoint.tensors["d2t"].file,
            len(target_ids),
        )
    fill_tensors(slots, checkpoint)
    return target_ids


def _fill_truncated(
    draft: Eagle1Draft | Eagle3Draft,
    slots: dict[str, torch.Tensor],
    source: DraftSource,
    checkpoint: Checkpoint,
    spare: set[str],
) -> torch.Tensor:
    """Fill a head whose ``token_map`` lists target ids in any order; ours ascend.

    Its lm_head has a row for each of them, or one for every token of the target.
    """
    config = draft.config
    name = source.stored_name("lm_head.weight")
    del slots[name]
    check_tensors(slots, checkpoint, spare | {name, "token_map"})
    info = checkpoint.tensors[name]
    rows = info.shape[0] if info.shape else 0
    whole = rows == config.vocab_size
    check_shape(name, info, (rows if whole else config.draft_vocab_size, config.hidden_size))
    ids, order = read_token_map(
        checkpoint.load("token_map"),
        draft_vocab_size=config.draft_vocab_size,
        vocab_size=config.vocab_size,
        file=checkpoint.tensors["token_map"].file,
    )
    if draft.embed_weight.is_meta:
        return ids
    fill_tensors(slots, checkpoint)
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
    if same_shape and _equal_in_half(draft.embed_weight, target.embed_weight):
        draft.share_embedding(target)
        return
    note = "the head brings an embedding that differs from the target's"
    draft.config = replace(draft.config, notes=(*draft.config.notes, note))
    if same_shape:
        logger.warning("%s: %s", tensors[source.stored_name("embed_tokens.weight")].file, note)


def _equal_in_half(stored: torch.Tensor, own: torch.Tensor, num_values: int = 2**18) -> bool:
    """Whether two matrices are one, but for what float16 rounds away.

    Many heads are published in float16 beside targets in bfloat16, whose smallest values it cuts.
    So many values at a time are compared: on a CPU their copies are host memory beside the weights.
    """
    num_rows = max(1, num_values // own.shape[1])
    for a, b in zip(stored.split(num_rows), own.split(num_rows), strict=True):
        difference = (a.float() - b.float()).abs()
        if (difference > 2.0**-11 * b.float().abs() + 2.0**-24).any():
            return False
    return True

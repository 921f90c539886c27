"""The map between draft and target vocabulary.

EAGLE-3 heads store it as ``d2t`` and ``t2d``, wrapped EAGLE-1 heads as ``token_map``.
"""

from __future__ import annotations

from pathlib import Path

import torch

from specgen.errors import ModelError

__all__ = ["invert_target_ids", "read_target_ids", "read_token_map"]


def read_target_ids(
    d2t: torch.Tensor,
    t2d: torch.Tensor | None,
    *,
    draft_vocab_size: int,
    vocab_size: int,
    file: Path,
) -> torch.Tensor | None:
    """Target ids of the draft vocabulary from the stored offsets: ``target = draft + d2t[draft]``.

    Args:
        d2t: int64 ``[Vd]`` offsets.
        t2d: bool ``[V]``, whether a target id is in the draft vocabulary; None where not stored.
        draft_vocab_size: Vd.
        vocab_size: V.
        file: named in errors.

    Returns:
        int32 ``[Vd]``, strictly increasing, or None for the identity over the whole vocabulary.

    Raises:
        ModelError: wrong dtype or shape, or not a map of offsets.
    """
    if d2t.dtype not in (torch.int64, torch.int32) or d2t.shape != (draft_vocab_size,):
        raise ModelError(
            f'{file}: tensor "d2t" is {d2t.dtype} of shape {list(d2t.shape)}, '
            f"expected int64 of shape {[draft_vocab_size]}"
        )
    offsets = d2t.to(torch.int64)
    draft_ids = torch.arange(draft_vocab_size)
    ids = draft_ids + offsets
    bad = (ids < 0) | (ids >= vocab_size)
    bad[1:] |= ids[1:] <= ids[:-1]
    # Offsets repeat wherever neighbouring tokens are both drafted; absolute ids never repeat.
    looks_absolute = bool(
        draft_vocab_size > 1 and (offsets[1:] > offsets[:-1]).all() and offsets[-1] < vocab_size
    )
    hint = '"d2t" holds offsets: target id = draft id + d2t[draft id]'
    if looks_absolute:
        hint += "; these values look like absolute target ids"
    if bad.any():
        first = int(bad.nonzero()[0, 0])
        raise ModelError(
            f'{file}: tensor "d2t" maps draft id {first} to target id {int(ids[first])}, which is '
            f"not above the one before and below the vocabulary size {vocab_size}",
            hint=hint,
        )
    if t2d is not None:
        if t2d.shape != (vocab_size,):
            raise ModelError(
                f'{file}: tensor "t2d" has shape {list(t2d.shape)}, expected {[vocab_size]}'
            )
        flagged = t2d.bool().nonzero().flatten()
        if not torch.equal(flagged, ids):
            raise ModelError(
                f'{file}: tensor "t2d" flags {flagged.numel()} target ids, which are not the '
                f'{draft_vocab_size} that "d2t" leads to',
                hint=hint,
            )
    elif looks_absolute:
        raise ModelError(
            f'{file}: tensor "d2t" rises at every step, from {int(offsets[0])} to '
            f'{int(offsets[-1])}, and there is no "t2d" to tell offsets from absolute ids',
            hint=hint,
        )
    if draft_vocab_size == vocab_size:
        return None
    return ids.to(torch.int32)


def read_token_map(
    token_map: torch.Tensor, *, draft_vocab_size: int, vocab_size: int, file: Path
) -> tuple[torch.Tensor, torch.Tensor]:
    """Target ids of a map of absolute ids in any order, ascending, and the order that sorts them.

    Args:
        token_map: integers ``[Vd]``.
        draft_vocab_size: Vd.
        vocab_size: V.
        file: named in errors.

    Returns:
        int32 ``[Vd]``, strictly increasing; int64 ``[Vd]``, the draft rows in that order.

    Raises:
        ModelError: wrong dtype or shape, a repeated id, or one outside the target's vocabulary.
    """
    if token_map.dtype not in (torch.int64, torch.int32) or token_map.shape != (draft_vocab_size,):
        raise ModelError(
            f'{file}: tensor "token_map" is {token_map.dtype} of shape {list(token_map.shape)}, '
            f"expected int64 of shape {[draft_vocab_size]}"
        )
    ids, order = token_map.to(torch.int64).sort(stable=True)
    bad = (ids < 0) | (ids >= vocab_size)
    bad[1:] |= ids[1:] == ids[:-1]
    if bad.any():
        raise ModelError(
            f'{file}: tensor "token_map" holds {int(ids[bad][0])}, which is repeated or not a '
            f"token of the target, whose ids end at {vocab_size - 1}",
            hint="the head was made for another target, or the file is damaged",
        )
    return ids.to(torch.int32), order


def invert_target_ids(target_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int32 ``[V]``: draft id of every target id, -1 outside the draft vocabulary."""
    draft_ids = torch.full((vocab_size,), -1, dtype=torch.int32, device=target_ids.device)
    count = target_ids.shape[0]
    draft_ids[target_ids.long()] = torch.arange(count, dtype=torch.int32, device=target_ids.device)
    return draft_ids

"""What every draft model offers, and which layout a checkpoint is in.

A layout is recognised by the configuration *and* the tensor names, never by the name of a
directory: a head run under the wrong layout raises nothing by itself and only drafts badly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from specgen.errors import ModelError
from specgen.models.attention import AttentionMetadata, KVCache
from specgen.models.config import ConfigReader, DraftConfig

if TYPE_CHECKING:
    from specgen.models.checkpoint import TensorInfo

__all__ = ["DraftModel", "DraftOverrides", "Layout", "recognise_layout"]

Layout = Literal["eagle1", "eagle3"]

_SUPPORTED = "supported drafts: the official EAGLE-1 (EAGLE-2) and EAGLE-3 layouts"


@dataclass(frozen=True, kw_only=True)
class DraftOverrides:
    """Facts of a head that its configuration is known to get wrong; None keeps what it says."""

    aux_layers: tuple[int, ...] | None = None
    """Boundaries ``0..num_layers`` of the target whose streams feed ``fc``."""
    rope_theta: float | None = None
    norm_output: bool | None = None
    """Whether later passes are fed the normed hidden state."""


class DraftModel(Protocol):
    """A head that drafts from target features; the pair (feature P, token P+1) predicts token P+2.

    The first pass over a pair takes ``fuse(features)`` as hidden; later ones take the feedback
    hidden of the pass before.
    """

    config: DraftConfig
    features: Literal["aux", "final"]
    """Which output of the target :meth:`fuse` takes: auxiliary streams or the final hidden."""
    aux_layers: tuple[int, ...]
    target_ids: torch.Tensor | None
    """int32 ``[Vd]``: target id of a draft id; None where they are the same."""
    draft_ids: torch.Tensor | None
    """int32 ``[V]``: draft id of a target id, -1 outside the draft vocabulary."""
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Target features ``[T, A*Ht]`` (or ``[T, Ht]``) -> hidden of the first pass ``[T, H]``."""
        ...

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: Sequence[KVCache],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run T pairs: target ids int32 ``[T]`` and hidden ``[T, H]``.

        Returns:
            What :meth:`compute_logits` takes, and what the next pass takes as hidden, both
            ``[T, H]``.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[R, H] -> [R, Vd]``."""
        ...

    def slots(self) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the tensor to copy into, for every parameter of its own."""
        ...


def recognise_layout(reader: ConfigReader, tensors: Mapping[str, TensorInfo] | None) -> Layout:
    """Tell the layout of a draft checkpoint.

    Args:
        reader: its configuration.
        tensors: its tensors; None where there are none to look at (dummy weights).

    Raises:
        ModelError: the layout is another one, named where it is known.
    """
    refused = _name_refused(reader, tensors or ())
    if refused is not None:
        raise ModelError(f"{reader.source}: {refused} is not supported", hint=_SUPPORTED)
    if tensors is None:
        return _layout_of_config(reader)
    directory = reader.source.removesuffix("config.json")
    midlayers = [name for name in tensors if name.startswith("midlayer.")]
    first_layer = [name for name in tensors if name.startswith("layers.0.")]
    if midlayers and first_layer:
        raise ModelError(
            f'{directory}: holds both "{midlayers[0]}" and "{first_layer[0]}": neither an EAGLE-1 '
            "nor an EAGLE-3 head",
            hint=_SUPPORTED,
        )
    if midlayers:
        return "eagle3"
    if first_layer and "fc.weight" in tensors:
        if "d2t" in tensors:
            raise ModelError(
                f'{directory}: "layers.0" beside "d2t" is the speculators EAGLE-3 layout (without '
                'its "speculators_model_type"), which is not supported',
                hint=_SUPPORTED,
            )
        if _layout_of_config(reader) == "eagle3":
            raise ModelError(
                f'{reader.source}: describes an EAGLE-3 head, but "{first_layer[0]}" is a tensor '
                "of the EAGLE-1 layout",
                hint="configuration and weights are of different heads: fetch both again",
            )
        return "eagle1"
    first_names = ", ".join(f'"{name}"' for name in list(tensors)[:4])
    raise ModelError(
        f"{directory}: not a draft of a known layout; its tensors begin {first_names}",
        hint=_SUPPORTED,
    )


def _layout_of_config(reader: ConfigReader) -> Layout:
    named = "eagle3" in _architectures(reader).lower()
    keys = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")
    return "eagle3" if named or any(reader.get(key) is not None for key in keys) else "eagle1"


def _architectures(reader: ConfigReader) -> str:
    value = reader.get("architectures")
    return " ".join(map(str, value)) if isinstance(value, list) else str(value or "")


def _name_refused(reader: ConfigReader, names: Iterable[str]) -> str | None:
    """What a checkpoint of a known but unsupported layout is called."""
    names = tuple(names)
    architectures = _architectures(reader).lower()
    speculators_type = reader.get("speculators_model_type")
    if "mask_hidden" in names or speculators_type in ("peagle", "p-eagle", "p_eagle"):
        return 'a P-EAGLE head ("mask_hidden")'
    if "dflash" in architectures or reader.get("dflash_config") or speculators_type == "dflash":
        return "a DFlash draft"
    if speculators_type is not None:
        return f'the speculators layout ("speculators_model_type": {speculators_type!r})'
    if reader.get("model_type") == "eagle" and reader.get("model") is not None:
        return 'the wrapped layout ("model_type": "eagle" around an inner "model")'
    if "medusa" in architectures or reader.get("medusa_num_heads") or "0.0.linear.weight" in names:
        return "a Medusa draft"
    if "mtp" in architectures or any(".eh_proj." in n or n.startswith("mtp.") for n in names):
        return "an MTP draft"
    return None

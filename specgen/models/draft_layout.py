"""Which layout a draft checkpoint is in, and how it reads in the official one's terms.

A layout is recognised by the configuration *and* the tensor names, never by the name of a
directory: a head run under the wrong layout raises nothing by itself and only drafts badly.

Heads of one architecture are published under several names: speculators nests the layer's
configuration and calls the layer ``layers.0``, vLLM wraps an official head. Here those are brought
back to the official keys and names, so that only two architectures are left to parse and to fill.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specgen.errors import ModelError
from specgen.models.config import ConfigReader
from specgen.models.draft import Layout

if TYPE_CHECKING:
    from specgen.models.checkpoint import TensorInfo

__all__ = ["DraftSource", "recognise_draft"]

SUPPORTED = (
    "supported drafts: EAGLE-1 (EAGLE-2) and EAGLE-3 heads in the official, the speculators and "
    "the wrapped layout"
)
_EAGLE3_KEYS = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")
# What speculators keeps beside the layer's own configuration.
_SPECULATORS_KEYS = (
    *_EAGLE3_KEYS,
    "target_hidden_size",
    "num_aux_hidden_states",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "quantization_config",
)
_WRAPPER_KEYS = ("architectures", "model", "model_type")


@dataclass(frozen=True, kw_only=True)
class DraftSource:
    """A draft checkpoint, read as if it were in the official layout of its architecture."""

    layout: Layout
    origin: str
    """The layout it is stored in, for people: official, speculators or wrapped."""
    reader: ConfigReader
    tensors: Mapping[str, TensorInfo] | None
    """Under their official names; None for dummy weights."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Official prefix -> stored prefix, longest first where several fit."""
    unused: frozenset[str] = frozenset()
    """Stored tensors (official names) that the layout keeps and nothing reads."""
    made_for: str | None = None
    """The target that the checkpoint names as its own."""
    made_for_architecture: str | None = None
    """That target's architecture."""

    @property
    def defaults_are_known(self) -> bool:
        """Whether absent keys of an EAGLE-3 head mean the same to every reader of the layout."""
        return "midlayer." not in self.renamed or self.renamed["midlayer."].endswith("midlayer.")

    def stored_name(self, name: str) -> str:
        """What the checkpoint calls the tensor of an official name."""
        for official, stored in self.renamed.items():
            if name.startswith(official):
                return stored + name.removeprefix(official)
        return name


def recognise_draft(reader: ConfigReader, tensors: Mapping[str, TensorInfo] | None) -> DraftSource:
    """Tell the layout of a draft checkpoint.

    Args:
        reader: its configuration, as stored.
        tensors: its tensors, as stored; None where there are none to look at (dummy weights).

    Raises:
        ModelError: the layout is another one, named where it is known.
    """
    refused = _name_refused(reader, tensors or ())
    if refused is not None:
        raise ModelError(f"{reader.source}: {refused} is not supported", hint=SUPPORTED)
    kind = reader.get("speculators_model_type")
    if kind == "eagle3":
        return _speculators_eagle3(reader, tensors)
    if kind == "eagle":
        return _speculators_eagle1(reader, tensors)
    if reader.get("model_type") == "eagle" and reader.get("model") is not None:
        return _wrapped(reader, tensors)
    return _by_tensors(reader, tensors, "official")


def _speculators_eagle3(
    reader: ConfigReader, tensors: Mapping[str, TensorInfo] | None
) -> DraftSource:
    renamed = {"midlayer.": "layers.0."}
    if tensors is not None and not any(name.startswith("layers.0.") for name in tensors):
        raise _unknown(reader, tensors, '"layers.0" of the speculators EAGLE-3 layout')
    return DraftSource(
        layout="eagle3",
        origin="speculators",
        reader=_flattened(reader),
        tensors=_official(tensors, renamed),
        renamed=renamed,
        made_for=_verifier(reader),
        made_for_architecture=_verifier_architecture(reader),
    )


def _speculators_eagle1(
    reader: ConfigReader, tensors: Mapping[str, TensorInfo] | None
) -> DraftSource:
    extra = [n for n in tensors or () if n.split(".")[0].endswith("_layernorm")]
    if reader.flag("layernorms") or extra:
        raise ModelError(
            f"{reader.source}: the speculators EAGLE-1 layout with layer norms of its own "
            f"({extra[0] if extra else 'layernorms'}) is not supported",
            hint=SUPPORTED,
        )
    renamed = {"layers.0.": "transformer.", "fc.": "fusion_fc."}
    if tensors is not None and "fusion_fc.weight" not in tensors:
        raise _unknown(reader, tensors, '"fusion_fc.weight" of the speculators EAGLE-1 layout')
    return DraftSource(
        layout="eagle1",
        origin="speculators",
        reader=_flattened(reader, bias=reader.flag("fusion_bias")),
        tensors=_official(tensors, renamed),
        renamed=renamed,
        made_for=_verifier(reader),
        made_for_architecture=_verifier_architecture(reader),
    )


def _verifier(reader: ConfigReader) -> str | None:
    name = reader.section("speculators_config").section("verifier").get("name_or_path")
    return name if isinstance(name, str) and name else None


def _verifier_architecture(reader: ConfigReader) -> str | None:
    names = reader.section("speculators_config").section("verifier").get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name else None


def _flattened(reader: ConfigReader, **more: Any) -> ConfigReader:
    """The layer's configuration with the head's own keys beside it."""
    layer = reader.section("transformer_layer_config").data
    if not layer:
        raise ModelError(f'{reader.source}: "transformer_layer_config" is missing')
    own = {key: reader.get(key) for key in _SPECULATORS_KEYS if reader.get(key) is not None}
    return ConfigReader({**layer, **own, **more}, reader.source)


def _wrapped(reader: ConfigReader, tensors: Mapping[str, TensorInfo] | None) -> DraftSource:
    """An official head whose configuration stands under ``model`` and whose names may too."""
    inner = reader.section("model").data
    outer = {k: v for k, v in reader.data.items() if k not in _WRAPPER_KEYS and v is not None}
    flat = ConfigReader({**inner, **outer}, reader.source)
    _refuse_norms(flat)
    renamed = _wrapped_names(tensors or ())
    source = _by_tensors(flat, _official(tensors, renamed), "wrapped")
    wrapper = replace(source, renamed=renamed)
    return replace(
        source,
        renamed=renamed | {o: wrapper.stored_name(n) for o, n in source.renamed.items()},
        unused=_stepped_over(source) if source.layout == "eagle1" else frozenset(),
    )


def _refuse_norms(reader: ConfigReader) -> None:
    """Refuse the variants of vLLM's that have norms where EAGLE-1 has none."""
    plain = {"add_para_norm": False, "skip_prenorm": True, "skip_output_norm": True}
    for key, value in plain.items():
        if reader.flag(key, value) is not value:
            raise ModelError(
                f'{reader.source}: "{key}" is {not value}: a wrapped head with norms that EAGLE-1 '
                "does not have is not supported",
                hint=SUPPORTED,
            )


def _wrapped_names(names: Iterable[str]) -> dict[str, str]:
    """Official prefix -> stored prefix of a wrapped head, which may have its names below others."""
    names = tuple(names)
    renamed: dict[str, str] = {}
    for prefix in ("model.model.", "model."):
        if any(name.startswith((f"{prefix}layers.", f"{prefix}midlayer.")) for name in names):
            stacks = ("layers.", "midlayer.", "embed_tokens.", "norm.")
            renamed = {stack: prefix + stack for stack in stacks}
            break
    for bare in ("embed_tokens.", "norm."):
        if f"{bare}weight" in names:
            renamed.pop(bare, None)
    if "model.lm_head.weight" in names:
        renamed["lm_head."] = "model.lm_head."
    return renamed


def _stepped_over(source: DraftSource) -> frozenset[str]:
    """Tensors of a wrapped head that vLLM kept for its own tests, or reads under other settings."""
    kept = {"layers.0.input_layernorm.weight", "norm.weight"}
    if not _is_truncated(source.reader):
        kept.add("token_map")
    return frozenset(kept & set(source.tensors or ()))


def _is_truncated(reader: ConfigReader) -> bool:
    vocab_size = reader.positive_int("vocab_size")
    return reader.positive_int("truncated_vocab_size", vocab_size) < vocab_size


def _by_tensors(
    reader: ConfigReader, tensors: Mapping[str, TensorInfo] | None, origin: str
) -> DraftSource:
    """EAGLE-1 or EAGLE-3, by the tensors of the layer."""
    if tensors is None:
        layout = _layout_of_config(reader)
        return DraftSource(layout=layout, origin=origin, reader=reader, tensors=None)
    midlayers = [name for name in tensors if name.startswith("midlayer.")]
    first_layer = [name for name in tensors if name.startswith("layers.0.")]
    if midlayers and first_layer:
        raise ModelError(
            f'{_directory(reader)}: holds both "{midlayers[0]}" and "{first_layer[0]}": neither an '
            "EAGLE-1 nor an EAGLE-3 head",
            hint=SUPPORTED,
        )
    if midlayers:
        return DraftSource(layout="eagle3", origin=origin, reader=reader, tensors=tensors)
    if "layers.0.hidden_norm.weight" in tensors:
        # An EAGLE-3 layer under the name that speculators and vLLM give it.
        renamed = {"midlayer.": "layers.0."}
        return DraftSource(
            layout="eagle3",
            origin=origin,
            reader=reader,
            tensors=_official(tensors, renamed),
            renamed=renamed,
        )
    if first_layer and "fc.weight" in tensors:
        if "d2t" in tensors or _layout_of_config(reader) == "eagle3":
            raise ModelError(
                f'{reader.source}: describes an EAGLE-3 head, but "{first_layer[0]}" is a tensor '
                "of the EAGLE-1 layout",
                hint="configuration and weights are of different heads: fetch both again",
            )
        return DraftSource(layout="eagle1", origin=origin, reader=reader, tensors=tensors)
    raise _unknown(reader, tensors, None)


def _official(
    tensors: Mapping[str, TensorInfo] | None, renamed: Mapping[str, str]
) -> dict[str, TensorInfo] | None:
    """The tensors under their official names."""
    if tensors is None:
        return None

    def official(name: str) -> str:
        for prefix, stored in renamed.items():
            if name.startswith(stored):
                return prefix + name.removeprefix(stored)
        return name

    return {official(name): info for name, info in tensors.items()}


def _unknown(
    reader: ConfigReader, tensors: Mapping[str, TensorInfo], missing: str | None
) -> ModelError:
    names = ", ".join(f'"{name}"' for name in list(tensors)[:4])
    problem = "not a draft of a known layout" if missing is None else f"without {missing}"
    return ModelError(f"{_directory(reader)}: {problem}; its tensors begin {names}", hint=SUPPORTED)


def _directory(reader: ConfigReader) -> str:
    return reader.source.removesuffix("config.json")


def _layout_of_config(reader: ConfigReader) -> Layout:
    named = "eagle3" in _architectures(reader).lower()
    return "eagle3" if named or any(reader.get(k) is not None for k in _EAGLE3_KEYS) else "eagle1"


def _architectures(reader: ConfigReader) -> str:
    value = reader.get("architectures")
    return " ".join(map(str, value)) if isinstance(value, list) else str(value or "")


def _name_refused(reader: ConfigReader, names: Iterable[str]) -> str | None:
    """What a checkpoint of a known but unsupported kind is called."""
    names = tuple(names)
    words = {word.lower() for word in _words(reader)}
    kind = reader.get("speculators_model_type")

    def says(*wanted: str) -> bool:
        return any(part in word for part in wanted for word in words)

    if any(n.split(".")[-1] == "mask_hidden" for n in names) or says(
        "peagle", "p-eagle", "p_eagle"
    ):
        return 'a P-EAGLE head ("mask_hidden")'
    if says("dflash") or reader.get("dflash_config") is not None:
        return "a DFlash draft"
    if says("medusa") or reader.get("medusa_num_heads") or "0.0.linear.weight" in names:
        return "a Medusa draft"
    if says("mtp", "nextn") or any(".eh_proj." in n or n.startswith("mtp.") for n in names):
        return "an MTP draft"
    if kind is not None and kind not in ("eagle", "eagle3"):
        return f'a speculators draft of another kind ("speculators_model_type": {kind!r})'
    return None


def _words(reader: ConfigReader) -> Iterator[str]:
    yield _architectures(reader)
    for key in ("model_type", "speculators_model_type"):
        yield str(reader.get(key) or "")

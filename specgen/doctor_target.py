"""What `specgen doctor` says of a model's configuration and layers, and nothing that is not so.

Of a native target every field has a meaning of ours. Of one that transformers runs, many fields of
our own description are unknown: said is what its configuration states and its class was seen to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from specgen.doctor_finding import Finding
from specgen.wording import counted

if TYPE_CHECKING:
    from specgen.models.config import ModelConfig
    from specgen.models.target import TargetModel
    from specgen.models.transformers_outline import Outline

__all__ = ["config_facts", "outline_facts", "stored_head", "target_facts"]

# Fields of our description that every class of transformers gives a meaning.
_KNOWN_OF_ALL = frozenset(
    {
        "architecture",
        "backend",
        "backend_reason",
        "bos_token_id",
        "dtype",
        "eos_token_ids",
        "hidden_size",
        "max_position_embeddings",
        "num_heads",
        "num_layers",
        "tie_word_embeddings",
        "vocab_size",
    }
)


def target_facts(config: ModelConfig, directory: str, trust_remote_code: bool) -> Iterator[Finding]:
    """What the configuration of a target says.

    Args:
        config: as it was understood.
        directory: of the checkpoint.
        trust_remote_code: whether code beside it may run.
    """
    if config.backend == "native":
        yield from config_facts("target", config)
        return
    from specgen.models.transformers_config import load_auto_config, stated

    yield from config_facts("target", config, _KNOWN_OF_ALL)
    auto_config = load_auto_config(directory, trust_remote_code)
    ropes = stated(auto_config, "rope_parameters")
    if isinstance(ropes, Mapping):
        by_layer_type = {k: v for k, v in ropes.items() if isinstance(v, Mapping)}
        for kind, rope in (by_layer_type or {"": ropes}).items():
            name = f"rope of {kind}" if kind else "rope"
            yield Finding("target", name, _rope(rope))
    cap = stated(auto_config, "final_logit_softcapping")
    if cap is not None:
        yield Finding("target", "final_logit_softcapping", str(cap))


def _rope(rope: Mapping[str, Any]) -> str:
    """Parameters as the configuration states them; lists are counted."""
    said = {key: value for key, value in rope.items() if value is not None}
    return ", ".join(
        f"{key}={len(value) if isinstance(value, list | tuple) else value}"
        for key, value in said.items()
    )


def outline_facts(outline: Outline | None) -> Iterator[Finding]:
    """What the layers of a target that transformers runs were seen to ask for."""
    if outline is not None:
        yield Finding("target", "num_kv_heads", str(outline.num_kv_heads))
        yield Finding("target", "head_dim", str(outline.head_dim))
        if any(outline.windows):
            yield Finding("target", "layer_windows", _windows(outline.windows))
        caps = sorted(set(outline.softcaps) - {0})
        if caps:
            yield Finding("target", "softcap of scores", ", ".join(map(str, caps)))
    seen = "shapes fit our attention; " if outline is not None else ""
    yield Finding(
        "target",
        "probe",
        f"{seen}its values are compared with its own attention only when it is loaded",
        "note",
        "a run refuses a class that differs, before the first row",
    )


def stored_head(config: ModelConfig, skeleton: TargetModel, directory: str) -> Iterator[Finding]:
    """A lm_head that is stored though it is said to be the embedding: headers cannot compare it."""
    from specgen.models.checkpoint import Checkpoint

    if not config.tie_word_embeddings:
        return
    if config.backend == "native":
        is_stored = "lm_head.weight" in Checkpoint.open(directory).tensors
        outcome = "one that differs ends the run"
    else:
        is_stored = skeleton.lm_head_weight is not skeleton.embed_weight
        outcome = "one that differs is used as a head of its own"
    if is_stored:
        text = 'stored, although "tie_word_embeddings" is true: compared with the embedding when '
        yield Finding("target", "lm_head", f"{text}the weights are read, {outcome}", "note")


def config_facts(
    section: str, config: Any, names: frozenset[str] | None = None
) -> Iterator[Finding]:
    """The fields of a frozen config that hold something.

    Args:
        section: of the findings.
        config: a dataclass.
        names: of the fields to say; None says all.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if value in (None, (), [], {}, "", frozenset()) or field.name in ("notes", "warnings"):
            continue
        if names is None or field.name in names:
            yield Finding(section, field.name, _worded(field.name, value))


def _worded(name: str, value: Any) -> str:
    """The value of a field, for people: what is long is counted, rules of a family are left out."""
    if name == "experts":
        scaled = ", probabilities scaled to sum to 1" if value.normed else ""
        return (
            f"{value.num_experts} of inner size {value.intermediate_size}, {value.num_chosen} a "
            f"token{scaled}, in {counted(len(value.layers), 'layer')}"
        )
    if name == "layer_windows":
        return _windows(value)
    if is_dataclass(value):
        # Its first two fields say what it is, and the rest what is not as usual.
        pairs = [(field, getattr(value, field.name)) for field in fields(value)]
        return ", ".join(
            f"{field.name}={len(own) if isinstance(own, tuple) else own}"
            for i, (field, own) in enumerate(pairs)
            if i < 2 or own != field.default
        )
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    return str(value)


def _windows(windows: Sequence[int]) -> str:
    windowed = [window for window in windows if window]
    sizes = ", ".join(str(size) for size in sorted(set(windowed)))
    return f"{sizes} in {len(windowed)} of {counted(len(windows), 'layer')}"

"""Configurations of targets that no native family covers and transformers runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from specgen.errors import ModelError
from specgen.models.config import ModelConfig, parse_dtype, refuse_quantization
from specgen.models.config_reader import ConfigReader, UnknownNameError
from specgen.models.rope_config import RopeConfig, parse_rope

__all__ = ["causal_class", "load_auto_config", "quiet", "read_transformers_config", "stated"]

_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")
_ATTENTION_LAYERS = ("full_attention", "sliding_attention")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what transformers draws and logs out of our display: faults become errors."""
    from transformers.utils import logging as transformers_logging

    enabled = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if enabled:
            transformers_logging.enable_progress_bar()


def load_auto_config(path: str | Path, trust_remote_code: bool) -> Any:
    """The configuration object of transformers.

    Raises:
        ModelError: transformers does not know the model, or not without code of its own.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        with quiet():
            return AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except Exception as error:
        # Anything at all may come out of a configuration class, or of code beside the checkpoint.
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        model_type = ConfigReader.from_directory(path).get("model_type")
        if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
            hint = "correct its config.json"
        elif trust_remote_code:
            hint = "look at its code, and at what that needs to be installed"
        else:
            hint = "--trust-remote-code lets a checkpoint bring its own code, if you trust it"
        raise ModelError(
            f"{path}: neither a native target nor one that transformers can read: {reason}", hint
        ) from error


def causal_class(config: Any, path: str | Path, trust_remote_code: bool) -> Any:
    """The class with a lm_head that runs a configuration object, beside the checkpoint if trusted.

    Raises:
        ModelError: there is none, or its code cannot be read.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    reference = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if reference is not None and trust_remote_code:
        try:
            return get_class_from_dynamic_module(reference, str(path))
        except Exception as error:  # anything at all: it is code
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ModelError(f"{path}: its code cannot be loaded: {reason}") from error
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise ModelError(f"{path}: {config.model_type!r} is not a causal decoder of transformers")
    return model_class


def read_transformers_config(
    reader: ConfigReader, path: str | Path, *, trust_remote_code: bool, supported: str
) -> ModelConfig:
    """Describe a target that is to run through transformers.

    Args:
        reader: its ``config.json``.
        path: its directory.
        trust_remote_code: whether code beside the checkpoint may run.
        supported: names of the native architectures, for errors.

    Raises:
        ModelError: no causal decoder of transformers, or one that needs what we do not have.
    """
    architectures = reader.get("architectures")
    names = architectures if isinstance(architectures, list) else [architectures]
    if architectures is None and reader.get("model_type") is None:
        raise ModelError(
            f'{reader.source}: neither "architectures" nor "model_type" says what model it is',
            hint=f"native targets: {supported}",
        )
    if reader.get("model_type") is None:
        raise ModelError(
            f'{reader.source}: "architectures" names {names}, which is not supported as a target, '
            'and there is no "model_type" that transformers could go by',
            hint=f"native targets: {supported}",
        )
    refuse_quantization(reader)
    config = load_auto_config(path, trust_remote_code)
    architecture = _causal_class(reader, config, names, supported)
    _refuse_unsupported(reader, config)
    _refuse_unknown_names(reader, config)
    max_positions = _positive(reader, config, "max_position_embeddings")
    hidden_size = _positive(reader, config, "hidden_size")
    num_heads = _positive(reader, config, "num_attention_heads")
    try:
        rope = parse_rope(reader, max_positions)
    except ModelError:
        rope = RopeConfig()  # the model has its own; this one only serves drafts
    # From the object: old checkpoints leave out what is their class's default.
    tokens = ConfigReader(
        {key: _attribute(config, key) for key in ("bos_token_id", "eos_token_id")}, reader.source
    )
    bos_ids = tokens.ids("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        backend="transformers",
        hidden_size=hidden_size,
        intermediate_size=_largest(config, "intermediate_size") or 4 * hidden_size,
        num_heads=num_heads,
        num_kv_heads=_largest(config, "num_key_value_heads") or num_heads,
        head_dim=_largest(config, "head_dim") or hidden_size // num_heads,
        rms_norm_eps=_attribute(config, "rms_norm_eps") or 1e-6,
        vocab_size=_positive(reader, config, "vocab_size"),
        num_layers=_positive(reader, config, "num_hidden_layers"),
        max_position_embeddings=max_positions,
        rope=rope,
        tie_word_embeddings=bool(_attribute(config, "tie_word_embeddings")),
        dtype=parse_dtype(reader),
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=tokens.ids("eos_token_id"),
    )


def stated(config: Any, key: str) -> Any:
    """The value of a key that the class of a configuration object declares; None of any other.

    A checkpoint may hold keys of other classes, which say nothing of what this one computes.
    """
    declared = {field.name for field in fields(config)} if is_dataclass(config) else ()
    return _attribute(config, key) if key in declared else None


def _attribute(config: Any, key: str) -> Any:
    """What a configuration object says, None where it does not: some raise for what is a layer's.

    Older names are mapped by the object, so that its dictionary is no substitute.
    """
    try:
        return getattr(config, key, None)
    except Exception:  # each class has errors of its own
        return None


def _largest(config: Any, key: str) -> int | None:
    """A size, or the largest of a family that lists one a layer; None where there is none.

    The probe measures what the layers really ask for; this bounds it.
    """
    value = _attribute(config, key)
    sizes = value if isinstance(value, list | tuple) else [value]
    good = [n for n in sizes if isinstance(n, int) and not isinstance(n, bool) and n > 0]
    return max(good, default=None)


def _positive(reader: ConfigReader, config: Any, key: str) -> int:
    value = _attribute(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise reader.error(key, value, "a whole number of at least 1")
    return value


def _causal_class(reader: ConfigReader, config: Any, names: list[Any], supported: str) -> str:
    """Name of the class that transformers runs the checkpoint with."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    auto_map = getattr(config, "auto_map", None) or {}
    if "AutoModelForCausalLM" in auto_map:
        return str(names[0] or auto_map["AutoModelForCausalLM"].rpartition(".")[2])
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    hint = f"native targets: {supported}; others must be causal decoders of transformers"
    if model_class is None:
        named = "" if names == [None] else f" ({names})"
        raise ModelError(
            f"{reader.source}: model_type {config.model_type!r}{named} is not a causal decoder: "
            "not supported as a target",
            hint=hint,
        )
    if names != [None] and model_class.__name__ not in names:
        raise ModelError(
            f'{reader.source}: "architectures" names {names}, which is not supported as a target: '
            f"the causal decoder of {config.model_type!r} is {model_class.__name__}",
            hint=hint,
        )
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelError(
            f"{reader.source}: {model_class.__name__} does not run through transformers' attention "
            "interface: not supported as a target",
            hint=hint,
        )
    return str(model_class.__name__)


def _refuse_unsupported(reader: ConfigReader, config: Any) -> None:
    """Name what the configuration alone shows to be out of reach."""

    def refuse(what: str) -> None:
        raise ModelError(
            f"{reader.source}: {what} not supported for targets run through transformers",
            hint="use a checkpoint of another family",
        )

    if _attribute(config, "is_encoder_decoder"):
        refuse("encoder-decoder models are")
    if config.get_text_config() is not config:
        refuse("multimodal checkpoints are")
    if _attribute(config, "is_causal") is False:
        raise reader.error("is_causal", False, "true", "use a checkpoint of a causal decoder")
    if _attribute(config, "num_kv_shared_layers"):
        refuse('layers that share keys and values ("num_kv_shared_layers") are')
    if _attribute(config, "kv_lora_rank"):
        refuse('multi-head latent attention ("kv_lora_rank") is')
    if config.model_type == "gpt_oss":
        refuse("attention sinks are")
    layer_types = _attribute(config, "layer_types") or ()
    others = sorted(set(layer_types) - set(_ATTENTION_LAYERS))
    if others:
        refuse(f'layers of type {", ".join(others)} ("layer_types") are')


def _refuse_unknown_names(reader: ConfigReader, config: Any) -> None:
    """Name an activation or a rope that no class of transformers could look up."""
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if not type(config).__module__.startswith("transformers."):
        return  # code beside the checkpoint may know names of its own

    def check(key: str, value: Any, known: list[str]) -> None:
        if isinstance(value, str) and value not in known:
            raise UnknownNameError(
                f'{reader.source}: "{key}" must be one of {", ".join(known)}, got {value!r}',
                hint="correct it if it is misspelt, or use a checkpoint of another family",
            )

    for key in _ACTIVATION_KEYS:
        check(key, stated(config, key), sorted(ACT2FN))
    ropes = stated(config, "rope_parameters")
    key = "rope_scaling" if reader.get("rope_parameters") is None else "rope_parameters"
    if isinstance(ropes, Mapping):
        known = ["default", *ROPE_INIT_FUNCTIONS]
        nested = {name: rope for name, rope in ropes.items() if isinstance(rope, Mapping)}
        for name, rope in (nested or {"": ropes}).items():
            where = f"{key}.{name}" if name else key
            check(f"{where}.rope_type", rope.get("rope_type"), known)

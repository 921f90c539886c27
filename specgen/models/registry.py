"""Which target families exist, and which of them a checkpoint's configuration names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specgen.errors import ModelError
from specgen.models.config import ModelConfig, parse_model_config
from specgen.models.config_reader import ConfigReader, NotNativeError, UnknownNameError
from specgen.models.family import Family
from specgen.models.llama import LLAMA
from specgen.models.mistral import MISTRAL
from specgen.models.mixtral import MIXTRAL
from specgen.models.qwen2 import QWEN2
from specgen.models.qwen3 import QWEN3
from specgen.models.qwen3_moe import QWEN3_MOE

__all__ = ["FAMILIES", "find_family", "match_family", "read_model_config"]

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, MISTRAL, MIXTRAL)


def match_family(reader: ConfigReader) -> Family | None:
    """The native family that ``architectures`` names, or ``model_type`` where that is absent."""
    architectures = reader.get("architectures")
    if architectures is None:
        model_type = reader.get("model_type")
        return next((family for family in FAMILIES if family.model_type == model_type), None)
    names = architectures if isinstance(architectures, list) else [architectures]
    return next((family for family in FAMILIES if family.architecture in names), None)


def find_family(reader: ConfigReader) -> Family:
    """As :func:`match_family`, for callers that need a native family.

    Raises:
        ModelError: there is none; the text lists the supported ones.
    """
    family = match_family(reader)
    if family is not None:
        return family
    architectures, hint = reader.get("architectures"), f"native targets: {_native_names()}"
    if architectures is not None:
        raise ModelError(
            f'{reader.source}: "architectures" names {architectures}, which is not a native target',
            hint=hint,
        )
    model_type = reader.get("model_type")
    raise ModelError(
        f'{reader.source}: no "architectures" and "model_type" is {model_type!r}: '
        "not a native target",
        hint=hint,
    )


def read_model_config(path: str | Path, *, trust_remote_code: bool = False) -> ModelConfig:
    """Read and check ``path/config.json`` of a target.

    A model of no native family, or with options that ours do not have, is described for
    transformers to run (``backend``).

    Args:
        path: directory of the checkpoint.
        trust_remote_code: whether code beside the checkpoint may run.

    Raises:
        ModelError: the file is missing or unreadable, or names something unsupported.
    """
    reader = ConfigReader.from_directory(path)
    family = match_family(reader)
    reason: NotNativeError | None = None
    if family is not None:
        try:
            return parse_model_config(reader, family)
        except NotNativeError as error:
            reason = error
    from specgen.models.transformers_config import read_transformers_config

    try:
        config = read_transformers_config(
            reader, path, trust_remote_code=trust_remote_code, supported=_native_names()
        )
    except UnknownNameError:
        raise
    except ModelError as error:
        raise (error if reason is None else reason) from error
    if reason is None:
        return replace(config, backend_reason=f"{config.architecture} has no native form here")
    return replace(config, backend_reason=reason.message)


def _native_names() -> str:
    return ", ".join(family.architecture for family in FAMILIES)

"""Which target families exist, and which of them a checkpoint's configuration names."""

from __future__ import annotations

from pathlib import Path

from specgen.errors import ModelError
from specgen.models.config import ConfigReader, ModelConfig, parse_model_config
from specgen.models.family import Family
from specgen.models.llama import LLAMA
from specgen.models.mistral import MISTRAL
from specgen.models.mixtral import MIXTRAL
from specgen.models.qwen2 import QWEN2
from specgen.models.qwen3 import QWEN3
from specgen.models.qwen3_moe import QWEN3_MOE

__all__ = ["FAMILIES", "find_family", "read_model_config"]

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, MISTRAL, MIXTRAL)


def find_family(reader: ConfigReader) -> Family:
    """The family that ``architectures`` names, or ``model_type`` where that key is absent.

    Raises:
        ModelError: the architecture is unknown; the text lists the supported ones.
    """
    supported = ", ".join(family.architecture for family in FAMILIES)
    architectures = reader.get("architectures")
    if architectures is not None:
        names = architectures if isinstance(architectures, list) else [architectures]
        for family in FAMILIES:
            if family.architecture in names:
                return family
        raise ModelError(
            f'{reader.source}: "architectures" names {names}, which is not supported as a target',
            hint=f"supported targets: {supported}",
        )
    model_type = reader.get("model_type")
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    raise ModelError(
        f'{reader.source}: no "architectures" and "model_type" is {model_type!r}: '
        "not a supported target",
        hint=f"supported targets: {supported}",
    )


def read_model_config(path: str | Path) -> ModelConfig:
    """Read and check ``path/config.json`` of a target.

    Args:
        path: directory of the checkpoint.

    Raises:
        ModelError: the file is missing or unreadable, or names something unsupported.
    """
    reader = ConfigReader.from_directory(path)
    return parse_model_config(reader, find_family(reader))

"""Typed access to a checkpoint's ``config.json``.

A key whose value is JSON null counts as absent everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen.errors import ModelError

__all__ = ["ConfigReader", "NotNativeError", "UnknownNameError"]


class NotNativeError(ModelError):
    """A configuration that is well-formed, but asks for what our own decoder does not have."""


class UnknownNameError(ModelError):
    """A name in a configuration that neither our own decoder nor transformers knows."""


@dataclass(frozen=True)
class ConfigReader:
    """Typed access to a parsed ``config.json``; errors name the file, the key and the value."""

    data: Mapping[str, Any]
    source: str
    """What the file is called in messages."""

    @classmethod
    def from_directory(cls, path: str | Path) -> ConfigReader:
        """Parse ``path/config.json``.

        Raises:
            ModelError: no such directory or file, or not a JSON object.
        """
        directory = Path(path)
        file = directory / "config.json"
        if not directory.is_dir():
            raise ModelError(
                f"{directory}: no such model directory",
                hint="give a directory that holds config.json and the weights",
            )
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelError(
                f"{file.absolute()}: missing",
                hint="a model directory holds config.json and the weights",
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(
                f"{file}: cannot be read as JSON: {error}", hint="correct it, or fetch it again"
            ) from error
        if not isinstance(data, dict):
            raise ModelError(f"{file}: must hold a JSON object, got {type(data).__name__}")
        return cls(data, str(file))

    def get(self, key: str) -> Any:
        """The raw value, None where the key is absent."""
        return self.data.get(key)

    def section(self, key: str) -> ConfigReader:
        """The object under ``key`` (an empty one where absent)."""
        value = self.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(key, value, "an object")
        return ConfigReader(value, f'{self.source}: "{key}"')

    def positive_int(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; without a default the key is required."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise ModelError(f'{self.source}: "{key}" is missing')
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, value, "a whole number of at least 1")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; without a default the key is required."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise ModelError(f'{self.source}: "{key}" is missing')
            return default
        good = not isinstance(value, bool) and isinstance(value, int | float)
        if not good or not math.isfinite(value) or value <= 0:
            raise self.error(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """A whole number or a list of them, as a tuple (empty where absent)."""
        value = self.get(key)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in values):
            raise self.error(key, value, "a whole number or a list of whole numbers")
        return tuple(values)

    def not_native(self, key: str, value: Any, expected: str) -> NotNativeError:
        """The error for a value that others may support."""
        return NotNativeError(f'{self.source}: "{key}" must be {expected}, got {value!r}')

    def error(self, key: str, value: Any, expected: str, hint: str | None = None) -> ModelError:
        """The error for a value that is not as expected."""
        return ModelError(f'{self.source}: "{key}" must be {expected}, got {value!r}', hint=hint)

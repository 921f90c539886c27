"""Where weights come from: a checkpoint, or random numbers for measurements."""

from __future__ import annotations

__all__ = ["LOAD_FORMATS", "is_dummy"]

LOAD_FORMATS = ("auto", "dummy", "dummy-uniform")
"""The checkpoint's; normal with variance 1/fan-in; uniform within 0.001, as vLLM fills its own."""


def is_dummy(load_format: str) -> bool:
    """Whether no weights are read, so that a configuration is all that a model needs."""
    return load_format != "auto"

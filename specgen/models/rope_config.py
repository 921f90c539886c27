"""What a configuration says of its rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from specgen.models.config_reader import ConfigReader, NotNativeError

__all__ = ["RopeConfig", "RopeType", "parse_rope"]

RopeType = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]
_TYPES: tuple[str, ...] = get_args(RopeType)
_OLD_NAMES = {"su": "longrope"}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Base and scaling of a rotary embedding.

    Types: ``linear`` (positions divided by the factor), ``dynamic`` (NTK-aware base, grown with the
    length), ``yarn`` (Peng et al., arXiv 2309.00071), ``longrope`` (Ding et al., arXiv 2402.13753)
    and ``llama3`` (Llama 3.1).
    """

    rope_type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    """Length of the training before the scaling; for ``dynamic`` the model's own length."""
    attention_factor: float = 1.0
    """Cosines and sines are multiplied by it."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    """Divisors of each frequency while the length stays within the original one."""
    long_factors: tuple[float, ...] = ()

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies follow from the longest length that is to be run."""
        return self.rope_type in ("dynamic", "longrope")

    def reach(self, max_position_embeddings: int) -> int:
        """Positions the scaling is meant to carry a model of that many positions to."""
        if self.rope_type in ("linear", "dynamic"):
            return int(max_position_embeddings * self.factor)
        if self.rope_type == "yarn":
            scaled = int(self.original_max_position_embeddings * self.factor)
            return max(max_position_embeddings, scaled)
        return max_position_embeddings


def parse_rope(
    reader: ConfigReader,
    max_position_embeddings: int,
    theta: float | None = None,
    *,
    default_theta: float = 10000.0,
    head_dim: int | None = None,
) -> RopeConfig:
    """The rope of a configuration: ``rope_parameters`` first, then ``rope_theta``/``rope_scaling``.

    Args:
        reader: the configuration.
        max_position_embeddings: stands in for the original length where that is absent.
        theta: overrides the base.
        default_theta: the base where the configuration has none.
        head_dim: what the lists of ``longrope`` are checked against.

    Raises:
        NotNativeError: a rope that is not supported.
        ModelError: a malformed one.
    """
    key = "rope_parameters" if reader.get("rope_parameters") is not None else "rope_scaling"
    rope = reader.section(key)
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(rope_type, str):
        raise rope.error("rope_type", rope_type, f"one of {', '.join(_TYPES)}")
    rope_type = _OLD_NAMES.get(rope_type, rope_type)
    if rope_type not in _TYPES:
        raise NotNativeError(
            f"{rope.source}: rope type {rope_type!r} is not supported",
            hint=f"supported rope types: {', '.join(_TYPES)}",
        )
    if any(isinstance(value, dict) for value in rope.data.values()):
        raise NotNativeError(f"{rope.source}: ropes that differ between layers are not supported")
    for owner in (rope, reader):
        rotary_part = owner.positive_float("partial_rotary_factor", 1.0)
        if rotary_part != 1.0:
            raise owner.not_native("partial_rotary_factor", rotary_part, "1 (or absent)")
    base = theta or rope.positive_float(
        "rope_theta", reader.positive_float("rope_theta", default_theta)
    )
    if base <= 1.0:
        raise rope.error("rope_theta", base, "above 1")
    if rope_type == "default":
        return RopeConfig(theta=base)
    if rope_type == "linear":
        return RopeConfig(rope_type="linear", theta=base, factor=rope.positive_float("factor"))
    if rope_type == "dynamic":
        return RopeConfig(
            rope_type="dynamic",
            theta=base,
            factor=rope.positive_float("factor"),
            original_max_position_embeddings=max_position_embeddings,
        )
    own = reader.positive_int("original_max_position_embeddings", max_position_embeddings)
    original = rope.positive_int("original_max_position_embeddings", own)
    if reader.get("original_max_position_embeddings") is not None:
        original = own  # the key at the top wins, as in transformers
    if original < 2:
        raise rope.error("original_max_position_embeddings", original, "at least 2")
    options: dict[str, Any] = {"theta": base, "original_max_position_embeddings": original}
    if rope_type == "llama3":
        low, high = rope.positive_float("low_freq_factor"), rope.positive_float("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", high, f'above "low_freq_factor" ({low})')
        return RopeConfig(
            rope_type="llama3",
            factor=rope.positive_float("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            **options,
        )
    factor = rope.positive_float("factor", max_position_embeddings / original)
    if rope_type == "yarn":
        return RopeConfig(
            rope_type="yarn",
            factor=factor,
            attention_factor=_yarn_attention(rope, factor),
            beta_fast=rope.positive_float("beta_fast", 32.0),
            beta_slow=rope.positive_float("beta_slow", 1.0),
            truncate=rope.flag("truncate", True),
            **options,
        )
    grown = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    return RopeConfig(
        rope_type="longrope",
        factor=factor,
        attention_factor=rope.positive_float("attention_factor", grown),
        short_factors=_factors(rope, "short_factor", head_dim),
        long_factors=_factors(rope, "long_factor", head_dim),
        **options,
    )


def _yarn_attention(rope: ConfigReader, factor: float) -> float:
    """The factor on cosines and sines, from the paper's temperature where none is given."""

    def grown(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    default = grown(1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        default = grown(rope.positive_float("mscale")) / grown(
            rope.positive_float("mscale_all_dim")
        )
    return rope.positive_float("attention_factor", default)


def _factors(rope: ConfigReader, key: str, head_dim: int | None) -> tuple[float, ...]:
    values = rope.get(key)
    count = None if head_dim is None else head_dim // 2
    numbers = isinstance(values, list) and all(
        isinstance(v, int | float) and not isinstance(v, bool) and v > 0 for v in values
    )
    if not numbers or (count is not None and len(values) != count):
        expected = "numbers" if count is None else f"{count} numbers"
        raise rope.error(key, values, f"a list of {expected} above 0")
    return tuple(map(float, values))

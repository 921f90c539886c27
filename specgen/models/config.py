"""Facts of a checkpoint's ``config.json``, checked and frozen.

A key whose value is JSON null counts as absent everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specgen.errors import ModelError
from specgen.models.family import Family

__all__ = [
    "BlockConfig",
    "ConfigReader",
    "DraftConfig",
    "ModelConfig",
    "RopeConfig",
    "parse_block_sizes",
    "parse_model_config",
    "parse_rope",
    "refuse_quantization",
]

ROPE_TYPES = ("default", "linear", "llama3")
DTYPE_NAMES = ("float32", "bfloat16", "float16")


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
                f"{file}: missing", hint="a model directory holds config.json and the weights"
            ) from None
        except (OSError, ValueError) as error:
            raise ModelError(f"{file}: cannot be read as JSON: {error}") from error
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

    def error(self, key: str, value: Any, expected: str, hint: str | None = None) -> ModelError:
        """The error for a value that is not as expected."""
        return ModelError(f'{self.source}: "{key}" must be {expected}, got {value!r}', hint=hint)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base and, for scaled types, the scaling (Su et al. 2021; Llama 3.1)."""

    rope_type: Literal["default", "linear", "llama3"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Sizes and options of one transformer block; a target's and a draft's alike."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, kw_only=True)
class ModelConfig(BlockConfig):
    """A target: its blocks, vocabulary, rope and what its configuration says of tokens."""

    architecture: str
    vocab_size: int
    num_layers: int
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    dtype: str | None
    """Name of the checkpoint's dtype, where the configuration gives it."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DraftConfig(BlockConfig):
    """A recognised draft head, described against the target it is for.

    ``fc_norms`` are the names of the norms in front of ``fc`` as stored: none, one over the whole
    concatenation, or one a chunk. ``stored`` holds the optional tensors that the checkpoint has.
    """

    layout: Literal["eagle1", "eagle3"]
    features: Literal["aux", "final"]
    aux_layers: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    max_position_embeddings: int
    rope: RopeConfig
    origin: str = "official"
    """The layout it is stored in: official, speculators or wrapped."""
    position_limit: int | None = None
    """Positions that the head's rope was made for, where it does not extrapolate."""
    sliding_window: int = 0
    """Keys that a token sees at most, its own included; 0: all."""
    has_fc: bool = True
    fc_bias: bool = False
    fc_norms: tuple[str, ...] = ()
    norm_before_residual: bool = False
    norm_output: bool = False
    stored: frozenset[str] = frozenset()
    notes: tuple[str, ...] = field(default=())
    """What was recognised or assumed, one sentence each, to be shown to the user."""

    @property
    def num_layers(self) -> int:
        """Layers that need a cache: always one."""
        return 1


def parse_rope(
    reader: ConfigReader, max_position_embeddings: int, theta: float | None = None
) -> RopeConfig:
    """The rope of a configuration: ``rope_parameters`` first, then ``rope_theta``/``rope_scaling``.

    Args:
        reader: the configuration.
        max_position_embeddings: stands in for a llama3 rope's original length where that is absent.
        theta: overrides the base.

    Raises:
        ModelError: a rope type other than default, linear and llama3, or a malformed one.
    """
    key = "rope_parameters" if reader.get("rope_parameters") is not None else "rope_scaling"
    rope = reader.section(key)
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise ModelError(
            f"{rope.source}: rope type {rope_type!r} is not supported",
            hint=f"supported rope types: {', '.join(ROPE_TYPES)}",
        )
    if any(isinstance(value, dict) for value in rope.data.values()):
        raise ModelError(f"{rope.source}: ropes that differ between layers are not supported")
    for owner in (rope, reader):
        rotary_part = owner.positive_float("partial_rotary_factor", 1.0)
        if rotary_part != 1.0:
            raise owner.error("partial_rotary_factor", rotary_part, "1 (or absent)")
    base = theta or rope.positive_float("rope_theta", reader.positive_float("rope_theta", 10000.0))
    if rope_type == "default":
        return RopeConfig(theta=base)
    factor = rope.positive_float("factor")
    if rope_type == "linear":
        return RopeConfig(rope_type="linear", theta=base, factor=factor)
    low, high = rope.positive_float("low_freq_factor"), rope.positive_float("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", high, f'above "low_freq_factor" ({low})')
    return RopeConfig(
        rope_type="llama3",
        theta=base,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=rope.positive_int(
            "original_max_position_embeddings", max_position_embeddings
        ),
    )


def refuse_quantization(reader: ConfigReader) -> None:
    """Raise ModelError where the configuration says that the weights are quantized."""
    quantization = reader.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelError(
            f'{reader.source}: "quantization_config" ({method or quantization!r}) is not supported',
            hint="use the unquantized checkpoint (float32, bfloat16 or float16)",
        )


def parse_block_sizes(
    reader: ConfigReader,
    *,
    default_head_dim: int | None = None,
    kv_heads_required: bool = False,
) -> dict[str, Any]:
    """The size fields of :class:`BlockConfig`, checked against one another."""
    activation = reader.get("hidden_act") or "silu"
    if activation != "silu":
        raise reader.error("hidden_act", activation, '"silu"')
    hidden_size = reader.positive_int("hidden_size")
    num_heads = reader.positive_int("num_attention_heads")
    kv_absent = (
        None if kv_heads_required and "num_key_value_heads" not in reader.data else num_heads
    )
    num_kv_heads = reader.positive_int("num_key_value_heads", kv_absent)
    if num_heads % num_kv_heads:
        raise reader.error(
            "num_key_value_heads", num_kv_heads, f'a divisor of "num_attention_heads" ({num_heads})'
        )
    head_dim = reader.get("head_dim")
    if head_dim is None and default_head_dim is None and hidden_size % num_heads:
        raise reader.error(
            "hidden_size", hidden_size, f'a multiple of "num_attention_heads" ({num_heads})'
        )
    head_dim = reader.positive_int("head_dim", default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise reader.error("head_dim", head_dim, "even")
    return {
        "hidden_size": hidden_size,
        "intermediate_size": reader.positive_int("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": reader.positive_float("rms_norm_eps", 1e-6),
    }


def parse_model_config(reader: ConfigReader, family: Family) -> ModelConfig:
    """A target's configuration under the rules of its family.

    Raises:
        ModelError: a key is missing, malformed or asks for something unsupported.
    """
    refuse_quantization(reader)
    sizes = parse_block_sizes(
        reader,
        default_head_dim=family.default_head_dim,
        kv_heads_required=not family.default_num_kv_heads_is_heads,
    )
    max_positions = reader.positive_int(
        "max_position_embeddings", family.default_max_position_embeddings
    )
    if family.has_sliding_window:
        _refuse_sliding_window(reader, family, max_positions)

    def bias(rule: bool | str) -> bool:
        return reader.flag(rule) if isinstance(rule, str) else rule

    bos_ids = reader.ids("bos_token_id")
    return ModelConfig(
        **sizes,
        architecture=family.architecture,
        qkv_bias=bias(family.qkv_bias),
        o_bias=bias(family.o_bias),
        mlp_bias=bias(family.mlp_bias),
        qk_norm=family.qk_norm,
        vocab_size=reader.positive_int("vocab_size"),
        num_layers=reader.positive_int("num_hidden_layers"),
        max_position_embeddings=max_positions,
        rope=parse_rope(reader, max_positions),
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        dtype=_parse_dtype(reader),
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=reader.ids("eos_token_id"),
    )


def _parse_dtype(reader: ConfigReader) -> str | None:
    key = "dtype" if reader.get("dtype") is not None else "torch_dtype"
    name = reader.get(key)
    if name is None:
        return None
    name = str(name).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise reader.error(key, name, f"one of {', '.join(DTYPE_NAMES)}")
    return name


def _refuse_sliding_window(reader: ConfigReader, family: Family, max_positions: int) -> None:
    """A window as long as the context changes nothing; a shorter one is refused."""
    switch = family.sliding_window_switch
    if switch is not None and not reader.flag(switch):
        return
    absent = "sliding_window" not in reader.data
    window = family.default_sliding_window if absent else reader.get("sliding_window")
    layer_types = reader.get("layer_types")
    if window is None or (layer_types is not None and "sliding_attention" not in layer_types):
        return
    if isinstance(window, int) and window >= max_positions:
        return
    raise ModelError(
        f'{reader.source}: "sliding_window" is {window}{" (by default)" if absent else ""}, below '
        f'"max_position_embeddings" ({max_positions}): sliding-window attention is not supported',
        hint='use a checkpoint whose "sliding_window" is null',
    )

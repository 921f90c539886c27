"""Facts of a checkpoint's ``config.json``, checked and frozen.

A key whose value is JSON null counts as absent everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from specgen.errors import ModelError
from specgen.models.config_reader import ConfigReader
from specgen.models.family import ExpertRules, Family
from specgen.models.rope_config import RopeConfig, parse_rope

__all__ = [
    "BlockConfig",
    "ConfigReader",
    "DraftConfig",
    "ExpertsConfig",
    "ModelConfig",
    "RopeConfig",
    "parse_block_sizes",
    "parse_dtype",
    "parse_model_config",
    "parse_rope",
    "refuse_quantization",
]

DTYPE_NAMES = ("float32", "bfloat16", "float16")


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
class ExpertsConfig:
    """The routed MLPs of a mixture of experts."""

    num_experts: int
    num_chosen: int
    """Experts a token goes to."""
    intermediate_size: int
    normed: bool
    """Whether the chosen experts' probabilities are scaled to sum to 1."""
    layers: frozenset[int]
    """Layers that have experts; the others have a plain MLP."""
    rules: ExpertRules


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
    layer_windows: tuple[int, ...] = ()
    """Keys that a token of each layer sees at most, its own included; 0: all. Empty: 0 for all."""
    experts: ExpertsConfig | None = None
    notes: tuple[str, ...] = ()
    """What of the configuration has no effect, one sentence each."""
    backend: Literal["native", "transformers"] = "native"
    """Whose code runs the model."""
    backend_reason: str = ""
    """Why it is not ours."""

    @property
    def longest_context(self) -> int:
        """Positions that the model can be run to: more than its own where its rope extends them."""
        return self.rope.reach(self.max_position_embeddings)

    @property
    def activation_width(self) -> int:
        """A bound on the numbers that a layer's temporaries hold for each token."""
        width = 2 * self.intermediate_size + self.qkv_size + 8 * self.hidden_size
        if self.experts is not None:
            inner, chosen = self.experts.intermediate_size, self.experts.num_chosen
            width += chosen * (3 * inner + 2 * self.hidden_size)
        return width

    def window_of(self, layer: int) -> int:
        """Keys that a token of the layer sees at most, 0: all."""
        return self.layer_windows[layer] if self.layer_windows else 0


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
    warnings: tuple[str, ...] = ()
    """What speaks against the head, one sentence each."""

    @property
    def num_layers(self) -> int:
        """Layers that need a cache: always one."""
        return 1


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
    default_rms_norm_eps: float = 1e-6,
    kv_heads_required: bool = False,
) -> dict[str, Any]:
    """The size fields of :class:`BlockConfig`, checked against one another."""
    activation = reader.get("hidden_act") or "silu"
    if activation != "silu":
        raise reader.not_native("hidden_act", activation, '"silu"')
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
        "rms_norm_eps": reader.positive_float("rms_norm_eps", default_rms_norm_eps),
    }


def parse_model_config(reader: ConfigReader, family: Family) -> ModelConfig:
    """A target's configuration under the rules of its family.

    Raises:
        ModelError: a key is missing, malformed or asks for something unsupported.
    """
    refuse_quantization(reader)
    if not reader.flag("is_causal", True):  # transformers' masks heed it for every family
        raise reader.not_native("is_causal", False, "true (or absent)")
    sizes = parse_block_sizes(
        reader,
        default_head_dim=family.default_head_dim,
        default_rms_norm_eps=family.default_rms_norm_eps,
        kv_heads_required=not family.default_num_kv_heads_is_heads,
    )
    max_positions = reader.positive_int(
        "max_position_embeddings", family.default_max_position_embeddings
    )
    num_layers = reader.positive_int("num_hidden_layers")

    def bias(rule: bool | str) -> bool:
        return reader.flag(rule) if isinstance(rule, str) else rule

    def tokens(key: str, default: int | None) -> tuple[int, ...]:
        if key in reader.data or default is None:
            return reader.ids(key)
        return (default,)

    bos_ids = tokens("bos_token_id", family.default_bos_token_id)
    return ModelConfig(
        **sizes,
        architecture=family.architecture,
        qkv_bias=bias(family.qkv_bias),
        o_bias=bias(family.o_bias),
        mlp_bias=bias(family.mlp_bias),
        qk_norm=family.qk_norm,
        vocab_size=reader.positive_int("vocab_size"),
        num_layers=num_layers,
        max_position_embeddings=max_positions,
        rope=parse_rope(
            reader,
            max_positions,
            default_theta=family.default_rope_theta,
            head_dim=sizes["head_dim"],
        ),
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        dtype=parse_dtype(reader),
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=tokens("eos_token_id", family.default_eos_token_id),
        layer_windows=_parse_windows(reader, family, num_layers),
        experts=None if family.experts is None else _parse_experts(reader, family.experts),
        notes=_ignored_windows(reader, family),
    )


def parse_dtype(reader: ConfigReader) -> str | None:
    """Name of the checkpoint's dtype; None where the configuration is silent."""
    key = "dtype" if reader.get("dtype") is not None else "torch_dtype"
    name = reader.get(key)
    if name is None:
        return None
    name = str(name).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise reader.error(key, name, f"one of {', '.join(DTYPE_NAMES)}")
    return name


def _parse_windows(reader: ConfigReader, family: Family, num_layers: int) -> tuple[int, ...]:
    """The window of each layer; empty where no layer has one."""
    if not family.has_sliding_window:
        return ()
    switch = family.sliding_window_switch
    if switch is not None and not reader.flag(switch):
        return ()
    window = family.default_sliding_window
    if "sliding_window" in reader.data:
        window = reader.get("sliding_window") and reader.positive_int("sliding_window")
    if not window:
        return ()
    layer_types = reader.get("layer_types")
    if layer_types is None:
        first = family.default_max_window_layers or 0
        if first and reader.get("max_window_layers") == 0:
            first = 0
        elif first:
            first = reader.positive_int("max_window_layers", first)
        windows = tuple(window if i >= first else 0 for i in range(num_layers))
        return windows if any(windows) else ()
    known = ("full_attention", "sliding_attention")
    good = isinstance(layer_types, list) and len(layer_types) == num_layers
    if not good or any(kind not in known for kind in layer_types):
        raise reader.error("layer_types", layer_types, f"{num_layers} of {', '.join(known)}")
    if family.default_max_window_layers is None and known[0] in layer_types:
        raise reader.not_native(
            "layer_types", layer_types, f'"{known[1]}" throughout for {family.architecture}'
        )
    windows = tuple(window if kind == known[1] else 0 for kind in layer_types)
    return windows if any(windows) else ()


def _ignored_windows(reader: ConfigReader, family: Family) -> tuple[str, ...]:
    """A remark on keys of windows that a family without any does not look at."""
    if family.has_sliding_window:
        return ()
    keys = [key for key in ("sliding_window", "layer_types") if _says_window(reader.get(key))]
    return tuple(
        f'"{key}" of config.json has no effect: every layer of {family.architecture} attends to '
        "all keys, as in its forward in transformers"
        for key in keys
    )


def _says_window(value: Any) -> bool:
    return "sliding_attention" in value if isinstance(value, list) else bool(value)


def _parse_experts(reader: ConfigReader, rules: ExpertRules) -> ExpertsConfig:
    num_layers = reader.positive_int("num_hidden_layers")
    keys = [key for key in rules.count_keys if reader.get(key) is not None]
    count_key = keys[0] if keys else rules.count_keys[0]
    num_experts = reader.positive_int(count_key, rules.default_count)
    num_chosen = reader.positive_int("num_experts_per_tok", rules.default_num_chosen)
    if num_chosen > num_experts:
        raise reader.error(
            "num_experts_per_tok", num_chosen, f'at most "{count_key}" ({num_experts})'
        )
    layers = frozenset(range(num_layers))
    if rules.has_dense_layers:
        step = reader.positive_int("decoder_sparse_step", 1)
        dense = reader.ids("mlp_only_layers")
        layers = frozenset(i for i in layers if (i + 1) % step == 0 and i not in dense)
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=reader.positive_int(rules.size_key),
        normed=reader.flag(rules.normed) if isinstance(rules.normed, str) else rules.normed,
        layers=layers,
        rules=rules,
    )

"""Random checkpoints in the real layouts, small enough to run in milliseconds.

Targets are written by transformers itself; heads are written tensor by tensor under the names that
published ones use. ``agreeable=True`` gives a head that predicts a target made with
``bigram=True`` far better than chance, so that drafts are accepted and rejected in turn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

__all__ = [
    "edit_config",
    "load_state",
    "make_eagle1",
    "make_eagle3",
    "make_llama",
    "make_target",
    "save_shards",
    "save_state",
    "spread_weights",
    "write_tokenizer",
]

VOCAB_SIZE = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CLASS_PREFIXES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    # Not native: these run through transformers.
    "cohere": "Cohere",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "gpt_neox": "GPTNeoX",
    "olmo2": "Olmo2",
    "phi3": "Phi3",
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "cohere": {"head_dim": ..., "rms_norm_eps": ...},
    "gpt_neox": {"head_dim": ..., "rms_norm_eps": ..., "num_key_value_heads": ...},
    "olmo2": {"head_dim": ...},
    "phi3": {"head_dim": ..., "pad_token_id": 3},
}


def make_target(
    path: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    with_tokenizer: bool = False,
    bigram: bool = False,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a random target with ``save_pretrained``; returns its directory.

    Args:
        path: directory to make.
        family: a key of ``CLASS_PREFIXES``.
        seed: of the weights.
        with_tokenizer: also write a tokenizer of the same vocabulary, with a chat template.
        bigram: blocks of little influence, so that a token depends mostly on the one before (for
            untied embeddings).
        max_shard_size: as ``save_pretrained`` takes it.
        overrides: configuration keys; ``...`` removes one.
    """
    import transformers

    prefix = CLASS_PREFIXES[family]
    keys = {**SIZES, **DEFAULTS.get(family, {}), **overrides}
    keys = {key: value for key, value in keys.items() if value is not ...}
    config_class = "Gemma3TextConfig" if family == "gemma3" else f"{prefix}Config"
    config = getattr(transformers, config_class)(**keys)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
        spread_weights(model, 0.15 if bigram else 1.0)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if with_tokenizer:
        write_tokenizer(path, config.vocab_size)
    return Path(path)


def make_llama(path: Path, **overrides: Any) -> Path:
    """:func:`make_target` of the Llama family."""
    return make_target(path, "llama", **overrides)


def spread_weights(model: Any, influence: float = 1.0) -> None:
    """Weights of variance 1/fan-in: logits that differ between contexts, unlike the default's.

    Norm weights and biases are made random too, so that none can be left out unnoticed.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0.0, 0.3)
            elif weight.dim() == 1:
                weight.uniform_(0.7, 1.3)
            elif "embed_tokens" in name:
                # As a tied head, a large embedding would have every token predict itself.
                tied = model.config.tie_word_embeddings
                weight.normal_(0.0, weight.shape[1] ** -0.5 if tied else 1.0)
            else:
                weight.normal_(0.0, weight.shape[-1] ** -0.5)  # experts have a dimension in front
                if "o_proj" in name or "down_proj" in name:
                    weight.mul_(influence)


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """A byte-level tokenizer of exactly ``vocab_size`` ids, 0..3 special, with a chat template.

    Letters, digits and common punctuation have ids of their own; other bytes are the unknown token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<pad>"]
    texts = " abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'()-\n"
    alphabet = {char: text for text in texts for char in _byte_level(text)}
    pieces = [*special, *alphabet]
    pieces += [f"<extra_{i}>" for i in range(vocab_size - len(pieces))]
    vocab = {piece: i for i, piece in enumerate(pieces[:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )
    fast.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    fast.save_pretrained(path)


def _byte_level(text: str) -> str:
    from tokenizers import pre_tokenizers

    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in split.pre_tokenize_str(text))


def make_eagle1(
    path: Path,
    target: Path,
    *,
    seed: int = 1,
    fc_bias: bool = True,
    declared_bias: bool | None = None,
    qkv_bias: bool = False,
    store_embedding: str | None = None,
    store_lm_head: bool = False,
    agreeable: bool = False,
    as_bin: bool = False,
    **overrides: Any,
) -> Path:
    """Write an official EAGLE-1 head for the target in the directory ``target``.

    Args:
        path: directory to make.
        target: directory of the target.
        seed: of the weights.
        fc_bias: whether ``fc.bias`` is stored.
        declared_bias: ``"bias"`` of the configuration, None leaves it out.
        qkv_bias: store biases of q, k and v, and say so.
        store_embedding: None, ``"same"`` (the target's) or ``"own"``.
        store_lm_head: store a head of its own.
        agreeable: predict a bigram target.
        as_bin: write ``pytorch_model.bin`` instead of ``model.safetensors``.
        overrides: configuration keys; None removes one.
    """
    target_config, target_state = _read(target)
    generator = torch.Generator().manual_seed(seed)
    config = _head_config(target_config, overrides)
    size, vocab_size = config["hidden_size"], target_config["vocab_size"]
    influence = 0.05 if agreeable else 1.0
    layer = _layer(config, size, qkv_bias, influence, generator)
    state = {f"layers.0.{name}": tensor for name, tensor in layer.items()}
    state["fc.weight"] = _matrix(size, 2 * size, generator)
    if agreeable:
        state["fc.weight"] = torch.cat((torch.eye(size), 0.05 * torch.eye(size)), dim=1)
    if fc_bias:
        state["fc.bias"] = _vector(size, generator, 0.0, 0.02 if agreeable else 0.3)
    if declared_bias is not None:
        config["bias"] = declared_bias
    if qkv_bias:
        config["qkv_bias"] = True
    _store_embedding(state, store_embedding, target_state, vocab_size, size, generator)
    if store_lm_head:
        state["lm_head.weight"] = _matrix(vocab_size, size, generator)
    return _write(path, config, state, as_bin)


def make_eagle3(
    path: Path,
    target: Path,
    *,
    seed: int = 1,
    draft_vocab_size: int | None = 48,
    store_embedding: str | None = None,
    store_lm_head: bool = True,
    store_t2d: bool = True,
    fc_norms: str | None = None,
    num_aux: int = 3,
    fc_bias: bool = False,
    qk_norm: bool = False,
    agreeable: bool = False,
    as_bin: bool = False,
    **overrides: Any,
) -> Path:
    """Write an official EAGLE-3 head for the target in the directory ``target``.

    Args:
        path: directory to make.
        target: directory of the target.
        seed: of the weights.
        draft_vocab_size: Vd; None is the target's vocabulary without a map.
        store_embedding: None, ``"same"`` (the target's) or ``"own"``.
        store_lm_head: False leaves it to the target's.
        store_t2d: whether the flags are stored beside the offsets.
        fc_norms: None, ``"whole"`` (norm_before_fc), ``"chunks"`` (fc_norm) or ``"older"``
            (fc_norm under its older names); the configuration says so too.
        num_aux: width of ``fc`` in target states; 0 stores no ``fc``.
        fc_bias: whether ``fc.bias`` is stored.
        qk_norm: store the norms of query and key heads that Qwen3-type layers have.
        agreeable: predict a bigram target (made with untied embeddings); sets
            ``norm_before_residual`` and as many key heads as the hidden size needs.
        as_bin: write ``pytorch_model.bin`` instead of ``model.safetensors``.
        overrides: configuration keys; None removes one.
    """
    target_config, target_state = _read(target)
    generator = torch.Generator().manual_seed(seed)
    vocab_size, target_size = target_config["vocab_size"], target_config["hidden_size"]
    if agreeable:
        heads = target_size // 16
        overrides = {
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": 16,
            "norm_before_residual": True,
            **overrides,
        }
    config = _head_config(target_config, overrides)
    config["architectures"] = ["LlamaForCausalLMEagle3"]
    size, rows = config["hidden_size"], draft_vocab_size or vocab_size
    state = {
        f"midlayer.{name}": tensor
        for name, tensor in _layer(config, 2 * size, False, 1.0, generator).items()
    }
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm"):
        state[f"{name}.weight"] = _vector(size, generator, 1.0, 0.1)
    if num_aux:
        state["fc.weight"] = _matrix(size, num_aux * target_size, generator)
    if fc_bias:
        state["fc.bias"] = _vector(size, generator, 0.0, 0.3)
    if qk_norm:
        for name in ("q_norm", "k_norm"):
            weight = _vector(config["head_dim"], generator, 1.0, 0.2)
            state[f"midlayer.self_attn.{name}.weight"] = weight
    ids = torch.arange(vocab_size)
    if draft_vocab_size is not None:
        # The special tokens are among the drafted ones, as in any map made from counts.
        drawn = torch.randperm(vocab_size - 4, generator=generator)[: draft_vocab_size - 4] + 4
        ids = torch.cat((torch.arange(4), drawn)).sort().values
        config["draft_vocab_size"] = draft_vocab_size
        state["d2t"] = ids - torch.arange(draft_vocab_size)
        if store_t2d:
            state["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    if store_lm_head:
        state["lm_head.weight"] = _matrix(rows, size, generator)
    if fc_norms == "whole":
        config["norm_before_fc"] = True
        state["input_norm.weight"] = _vector(num_aux * target_size, generator, 1.0, 0.2)
    elif fc_norms is not None:
        config["fc_norm"] = True
        older = ["aux_norm_low", "aux_norm_mid", "aux_norm_high"]
        names = older if fc_norms == "older" else [f"fc_norm.{i}" for i in range(num_aux)]
        for name in names:
            state[f"{name}.weight"] = _vector(target_size, generator, 1.0, 0.2)
    _store_embedding(state, store_embedding, target_state, vocab_size, size, generator)
    if agreeable:
        _agree(state, target_state, ids, size)
    return _write(path, config, state, as_bin)


def _agree(
    state: dict[str, torch.Tensor], target: dict[str, torch.Tensor], ids: torch.Tensor, size: int
) -> None:
    """Let attention look at its own position only and pass the token's embedding to the lm_head."""
    sharp = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(7)))[0]
    nothing = torch.zeros(size, size)
    for name, weight in (("q", 2.0 * sharp), ("k", 2.0 * sharp), ("v", torch.eye(size))):
        state[f"midlayer.self_attn.{name}_proj.weight"] = torch.cat((weight, nothing), dim=1)
    state["midlayer.self_attn.o_proj.weight"] = torch.eye(size)
    state["midlayer.hidden_norm.weight"].fill_(0.05)
    state["midlayer.input_layernorm.weight"].fill_(1.0)
    state["midlayer.mlp.down_proj.weight"].mul_(0.05)
    state["norm.weight"] = target["model.norm.weight"].clone()
    state["lm_head.weight"] = target["lm_head.weight"][ids].clone()


def _head_config(target: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    keys = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_parameters",
        "rope_theta",
    )
    config = {key: target[key] for key in keys if key in target}
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
    }
    config |= overrides
    return {key: value for key, value in config.items() if value is not None}


def _layer(
    config: dict[str, Any],
    input_size: int,
    qkv_bias: bool,
    influence: float,
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    size, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    rows = {
        "q": config["num_attention_heads"] * head_dim,
        "k": config["num_key_value_heads"] * head_dim,
        "v": config["num_key_value_heads"] * head_dim,
    }
    layer = {f"self_attn.{n}_proj.weight": _matrix(rows[n], input_size, generator) for n in rows}
    if qkv_bias:
        layer |= {f"self_attn.{n}_proj.bias": _vector(rows[n], generator, 0.0, 0.3) for n in rows}
    layer["self_attn.o_proj.weight"] = influence * _matrix(size, rows["q"], generator)
    layer["mlp.gate_proj.weight"] = _matrix(inner, size, generator)
    layer["mlp.up_proj.weight"] = _matrix(inner, size, generator)
    layer["mlp.down_proj.weight"] = influence * _matrix(size, inner, generator)
    layer["post_attention_layernorm.weight"] = _vector(size, generator, 1.0, 0.1)
    return layer


def _store_embedding(
    state: dict[str, torch.Tensor],
    which: str | None,
    target: dict[str, torch.Tensor],
    vocab_size: int,
    size: int,
    generator: torch.Generator,
) -> None:
    if which == "same":
        state["embed_tokens.weight"] = target["model.embed_tokens.weight"].clone()
    elif which == "own":
        state["embed_tokens.weight"] = torch.randn(vocab_size, size, generator=generator)


def _matrix(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator) * columns**-0.5


def _vector(size: int, generator: torch.Generator, mean: float, std: float) -> torch.Tensor:
    return torch.randn(size, generator=generator) * std + mean


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((directory / "config.json").read_text()), load_state(directory)


def load_state(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint directory."""
    state: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        state |= load_file(file)
    for file in sorted(directory.glob("*.bin")):
        state |= torch.load(file, weights_only=True)
    return state


def save_state(directory: Path, state: dict[str, torch.Tensor], as_bin: bool = False) -> None:
    """Replace the weights of a directory by one file."""
    _remove_weights(directory)
    if as_bin:
        torch.save(state, directory / "pytorch_model.bin")
    else:
        contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
        save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})


def _remove_weights(directory: Path) -> None:
    for pattern in ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json"):
        for file in directory.glob(pattern):
            file.unlink()


def save_shards(
    directory: Path,
    state: dict[str, torch.Tensor],
    *,
    as_bin: bool = False,
    num_shards: int = 3,
    **options: Any,
) -> list[Path]:
    """Replace the weights of a directory by shards of about the same size, and their index.

    Args:
        directory: of the checkpoint.
        state: its tensors, which are dealt out in an order that is not that of their names.
        as_bin: write pickles.
        num_shards: files to write.
        options: of ``torch.save``.
    """
    _remove_weights(directory)
    stem, suffix = ("pytorch_model", "bin") if as_bin else ("model", "safetensors")
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(num_shards)]
    sizes = [0] * num_shards
    for name, tensor in sorted(state.items(), key=lambda pair: -pair[1].nbytes):
        smallest = sizes.index(min(sizes))
        parts[smallest][name] = tensor.contiguous()
        sizes[smallest] += tensor.nbytes
    files = [
        directory / f"{stem}-{i:05}-of-{num_shards:05}.{suffix}" for i in range(1, num_shards + 1)
    ]
    for file, part in zip(files, parts, strict=True):
        if as_bin:
            torch.save(part, file, **options)
        else:
            save_file(part, file, metadata={"format": "pt"})
    weight_map = {n: f.name for f, part in zip(files, parts, strict=True) for n in part}
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return files


def edit_config(directory: Path, **changes: Any) -> None:
    """Set keys of ``config.json``; ``...`` removes one."""
    file = directory / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def _write(
    path: Path, config: dict[str, Any], state: dict[str, torch.Tensor], as_bin: bool
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    save_state(path, state, as_bin)
    return path

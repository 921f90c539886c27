"""From flags to facts: one new frozen config out of checkpoint, hardware and what was asked."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from specgen.config import EngineConfig, ResolvedConfig, parse_num_speculative_tokens
from specgen.errors import EnvironmentProblem, ModelError, UsageError
from specgen.hub import is_hub_id, locate
from specgen.load_format import is_dummy
from specgen.models.config import ModelConfig
from specgen.models.config_reader import ConfigReader
from specgen.models.registry import read_model_config
from specgen.sampling_params import SamplingParams
from specgen.synthetic import MAX_SPECULATIVE_TOKENS, synthetic_rates

_PAIR = Path(__file__).parent / "models" / "default"
BUILTIN_TARGET = _PAIR / "target"
BUILTIN_DRAFT = _PAIR / "draft"

# Where it is not chosen step by step: on a CPU every token of a step costs as much as another.
DEFAULT_NUM_SPECULATIVE_TOKENS = 1
DEFAULT_LIMIT_OF_AUTO = 5
_SAMPLING_HINT = "correct the file, or give --generation-config none: its sampling is left out then"
# The flag is no way out here: end-of-sequence ids count whatever it says.
_FILE_HINT = "correct the file, or remove it: config.json has end-of-sequence ids too"
_DEFAULT_SEQS = {"cpu": 16, "cuda": 256}
_DEFAULT_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}


def resolve(config: EngineConfig, *, with_weights: bool = True) -> ResolvedConfig:
    """Make every choice that ``config`` left open.

    Args:
        config: what was asked for.
        with_weights: fetch the weights of what comes from the hub, and insist on them.

    Raises:
        ModelError: a model, draft or tokenizer cannot be found or understood.
        EnvironmentProblem: the machine lacks what was asked for.
        UsageError: flags contradict each other or the checkpoint.
    """
    check_revisions(config)
    device = _device(config)
    with_weights = with_weights and not is_dummy(config.load_format)
    model_dir = str(BUILTIN_TARGET)
    if config.model is not None:
        model_dir = _locate(config.model, config, config.revision, with_weights)
    draft_dir = _draft_dir(config, with_weights)
    model = read_model_config(model_dir, trust_remote_code=config.trust_remote_code)
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len > model.longest_context:
        raise UsageError(
            f"--max-model-len {max_model_len} is beyond the model's "
            f"{model.longest_context} positions",
            f"give at most {model.longest_context}",
        )
    auto, k = _draft_length(config, device)
    if draft_dir is None or k == 0:
        auto, k = False, 0
    if config.synthetic_acceptance is not None and k == 0:
        if draft_dir is None:
            raise UsageError(
                "--synthetic-acceptance needs drafts to judge", "give a draft, or leave it out"
            )
        raise UsageError(
            "--synthetic-acceptance judges drafts, and --num-speculative-tokens 0 makes none",
            "give 1 or more, or leave --synthetic-acceptance out",
        )
    return ResolvedConfig(
        model_dir=model_dir,
        draft_dir=draft_dir if k else None,
        tokenizer_dir=find_tokenizer(config, model_dir),
        skip_tokenizer_init=config.skip_tokenizer_init,
        device=device,
        dtype=_dtype(config.dtype, device, model.dtype),
        load_format=config.load_format,
        kernel_backend=config.kernel_backend,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs or _DEFAULT_SEQS[device],
        max_num_batched_tokens=config.max_num_batched_tokens or _DEFAULT_BATCHED_TOKENS[device],
        gpu_memory_utilization=config.gpu_memory_utilization,
        num_kv_blocks=config.num_kv_blocks,
        block_size=config.block_size,
        num_speculative_tokens=k,
        auto_draft_length=auto,
        draft_sample=config.draft_sample,
        rejection_sample=config.rejection_sample,
        synthetic_rates=None
        if config.synthetic_acceptance is None
        else synthetic_rates(config.synthetic_acceptance, k),
        draft_aux_layers=config.draft_aux_layers,
        draft_rope_theta=config.draft_rope_theta,
        draft_norm_output=config.draft_norm_output,
        draft_norm_before_residual=config.draft_norm_before_residual,
        seed=config.seed,
        overlong=config.overlong,
        prefix_caching=config.prefix_caching,
        # A model that transformers runs may wait for the host anywhere: nothing to capture.
        cuda_graphs=config.cuda_graphs and device == "cuda" and model.backend == "native",
        eos_token_ids=_eos_token_ids(model_dir, model, config.load_format),
        vocab_size=model.vocab_size,
    )


def _draft_length(config: EngineConfig, device: str) -> tuple[bool, int]:
    """Whether k is chosen step by step, by default on a GPU, and k or its limit."""
    auto, k = parse_num_speculative_tokens(config.num_speculative_tokens)
    if auto is None:
        auto = device == "cuda"
    asked = config.synthetic_acceptance
    if k is None and isinstance(asked, tuple):
        k = len(asked)
        if k > MAX_SPECULATIVE_TOKENS:
            raise UsageError(
                f"--synthetic-acceptance gives {k} rates, one a draft",
                f"give at most {MAX_SPECULATIVE_TOKENS}",
            )
        if k == 1:
            rate = asked[0]
            raise UsageError(
                f"--synthetic-acceptance {rate:g} is the rate of one draft",
                "give a mean length of at least 1, or --num-speculative-tokens 1 with it",
            )
    if k is None:
        k = DEFAULT_LIMIT_OF_AUTO if auto else DEFAULT_NUM_SPECULATIVE_TOKENS
        if asked is not None and not isinstance(asked, tuple):  # a mean length, of at most k + 1
            k = max(k, math.ceil(min(asked, 1.0 + DEFAULT_LIMIT_OF_AUTO)) - 1)
    return auto, k


def generation_defaults(model_dir: str | Path) -> dict[str, Any]:
    """Sampling defaults of a checkpoint's ``generation_config.json``, by our own names.

    Only what transformers itself would act on counts: without ``do_sample`` a checkpoint asks for
    greedy decoding only if it says so in words (``do_sample: false``).

    Raises:
        ModelError: the file is no JSON object, ``do_sample`` is neither true nor false, or another
            value is out of range.
    """
    file = Path(model_dir) / "generation_config.json"
    data = _read_json(file)
    out: dict[str, Any] = {}
    try:
        greedy = not ConfigReader(data, str(file)).flag("do_sample", True)
    except ModelError as error:
        raise ModelError(error.message, _SAMPLING_HINT) from error
    if greedy:
        out["temperature"] = 0.0
    for key in ("temperature", "top_p", "top_k"):
        if data.get(key) is not None:
            out.setdefault(key, data[key])
    if data.get("max_new_tokens") is not None:
        out["max_tokens"] = data["max_new_tokens"]
    try:
        SamplingParams.from_mapping(out)
    except ValueError as error:
        said = str(error).replace('"max_tokens"', '"max_new_tokens"')
        raise ModelError(f"{file}: {said}", _SAMPLING_HINT) from error
    return out


# What else a checkpoint can ask of sampling, and the values with which it asks for nothing.
_NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "diversity_penalty": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "min_p": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "repetition_penalty": (1,),
    "sequence_bias": ({}, []),
    "stop_strings": ([], ""),
    "suppress_tokens": ([],),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": ({},),
}


def ignored_generation_keys(model_dir: str | Path, max_model_len: int) -> dict[str, Any]:
    """What ``generation_config.json`` asks for that is not applied, by its own names.

    Args:
        model_dir: the checkpoint's directory.
        max_model_len: what prompt and completion may have together anyway; a ``max_length`` from
            there on asks for nothing, nor does one beside ``max_new_tokens``, as in transformers.
    """
    data = _read_json(Path(model_dir) / "generation_config.json")
    ignored = {
        key: data[key]
        for key, neutral in _NOT_APPLIED.items()
        if data.get(key) is not None and data[key] not in neutral
    }
    longest = data.get("max_length")
    if longest is not None and data.get("max_new_tokens") is None:
        is_number = isinstance(longest, int | float) and not isinstance(longest, bool)
        if not is_number or longest < max_model_len:
            ignored["max_length"] = longest
    return ignored


def _locate(name: str, config: EngineConfig, revision: str | None, with_weights: bool) -> str:
    with_code = config.trust_remote_code
    return locate(name, revision, with_code=with_code, with_weights=with_weights)


def find_tokenizer(config: EngineConfig, model_dir: str) -> str:
    """Directory of the tokenizer; one of another repository is not of the model's revision.

    Raises:
        ModelError: it cannot be found.
    """
    if config.tokenizer is None:
        return model_dir
    alone = config.tokenizer == config.model or not is_hub_id(config.model or "")
    revision = config.revision if alone else None
    return _locate(config.tokenizer, config, revision, with_weights=False)


def check_revisions(config: EngineConfig) -> None:
    """Refuse a revision of nothing that comes from the hub.

    Raises:
        UsageError: naming the flag.
    """
    for flag, revision, model_flag, names in (
        ("--revision", config.revision, "--model", (config.model, config.tokenizer)),
        ("--draft-revision", config.draft_revision, "--draft-model", (config.draft_model,)),
    ):
        if revision is not None and not any(name and is_hub_id(name) for name in names):
            raise UsageError(
                f"{flag} {revision}: nothing that it could belong to comes from the hub",
                f"leave it out, or give a hub id in {model_flag}",
            )


def _draft_dir(config: EngineConfig, with_weights: bool) -> str | None:
    if config.no_draft:
        return None
    if config.draft_model is not None:
        return locate(config.draft_model, config.draft_revision, with_weights=with_weights)
    # A given target has no built-in draft; the built-in one comes with its own.
    return str(BUILTIN_DRAFT) if config.model is None else None


def _device(config: EngineConfig) -> str:
    import torch

    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise EnvironmentProblem(
            "--device cuda: torch sees no CUDA device here",
            "leave --device at auto, or run `specgen doctor` to see what the machine offers",
        )
    return ("cuda" if has_cuda else "cpu") if config.device == "auto" else config.device


def _dtype(asked: str, device: str, stored: str | None) -> str:
    """``auto``: the checkpoint's own dtype on a GPU, float32 (exact, and fast there) on a CPU."""
    if asked != "auto":
        return asked
    if device == "cpu":
        return "float32"
    return stored or "bfloat16"


def _eos_token_ids(model_dir: str, model: ModelConfig, load_format: str) -> tuple[int, ...]:
    """All end-of-sequence ids: the generation config's where it has any, else the config's."""
    file, own = _own_eos_token_ids(model_dir)
    ids = tuple(sorted(set(own or model.eos_token_ids)))
    # Dummy weights are for shapes, which may have been changed without the ids.
    if ids and ids[0] >= model.vocab_size and not is_dummy(load_format):
        raise ModelError(
            _beyond(file if own else file.with_name("config.json"), ids, model.vocab_size),
            "correct it, or remove it: rows then end at their limits",
        )
    return ids


def eos_remark(config: ResolvedConfig) -> str | None:
    """What is to be said of end-of-sequence ids that the model cannot give; None without any."""
    beyond = tuple(i for i in config.eos_token_ids if i >= config.vocab_size)
    if not beyond:
        return None
    file, own = _own_eos_token_ids(config.model_dir)
    return _beyond(file if own else file.with_name("config.json"), beyond, config.vocab_size)


def _beyond(file: Path, ids: tuple[int, ...], vocab_size: int) -> str:
    listed = ", ".join(map(str, ids))
    return (
        f'{file}: "eos_token_id" {listed}: no row can end so, the model has ids 0 to '
        f"{vocab_size - 1}"
    )


def _own_eos_token_ids(model_dir: str) -> tuple[Path, tuple[int, ...]]:
    """The generation config's file, and the ids in it."""
    file = Path(model_dir) / "generation_config.json"
    try:
        return file, ConfigReader(_read_json(file), str(file)).ids("eos_token_id")
    except ModelError as error:
        raise ModelError(error.message, _FILE_HINT) from error


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}", _FILE_HINT) from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold a JSON object, got {type(data).__name__}", _FILE_HINT)
    return data

"""What a target and a draft are, whether they fit each other, and the memory they need.

Configurations, tokenizer and tensor headers are read; no tensor is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from specgen.config import EngineConfig, ResolvedConfig, refuse_idle_draft_settings
from specgen.doctor_finding import Finding
from specgen.doctor_target import config_facts, outline_facts, stored_head, target_facts
from specgen.errors import EnvironmentProblem, ModelError, RequestError, SpecgenError
from specgen.load_format import is_dummy

if TYPE_CHECKING:
    from specgen.models.config import DraftConfig, ModelConfig
    from specgen.models.target import TargetModel
    from specgen.pipeline.tokenization import Tokenizer

__all__ = ["examine_pair"]

_Found = TypeVar("_Found")
_LENGTHS = (2048, 8192, 32768)


class _ProblemError(Exception):
    """Ends the examination; what it is about has been found."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.value)
        self.finding = finding


def examine_pair(config: EngineConfig, lengths: Sequence[int] | None = None) -> Iterator[Finding]:
    """Look at the models of ``config``.

    Args:
        config: as for an engine; models may be hub ids, of which only headers are fetched.
        lengths: prompt plus completion, in tokens, of rows whose memory is to be said; None takes
            usual ones.
    """
    try:
        with TemporaryDirectory(prefix="specgen-doctor-") as scratch:
            yield from _examine(config, lengths, Path(scratch))
    except _ProblemError as problem:
        yield problem.finding


def _examine(
    config: EngineConfig, lengths: Sequence[int] | None, scratch: Path
) -> Iterator[Finding]:
    from specgen.models.registry import read_model_config
    from specgen.resolve import (
        BUILTIN_DRAFT,
        BUILTIN_TARGET,
        check_revisions,
        find_tokenizer,
        resolve,
    )

    model, draft = config.model, config.draft_model
    if model is None and not config.no_draft:
        pair = (BUILTIN_TARGET, BUILTIN_DRAFT)
        if draft is None and not all((path / "config.json").is_file() for path in pair):
            hint = "reinstall specgen, or give --model"
            yield Finding("target", "built-in pair", "missing", "problem", hint)
            return
        yield Finding("target", "built-in pair", "present")
    model = model or str(BUILTIN_TARGET)
    draft = draft or (str(BUILTIN_DRAFT) if config.model is None else None)
    _try("machine", "settings", lambda: check_revisions(config))
    _try("machine", "settings", lambda: refuse_idle_draft_settings(config))

    needs_weights = not is_dummy(config.load_format)
    directory = _find(
        "target",
        model,
        config.revision,
        scratch / "target",
        with_code=config.trust_remote_code,
        with_weights=needs_weights,
    )
    yield Finding("target", "directory", model)
    if not needs_weights:
        random = f"random (--load-format {config.load_format}), and so is the text"
        yield Finding("target", "weights", random, "note")
    target = _try(
        "target",
        model,
        lambda: read_model_config(directory, trust_remote_code=config.trust_remote_code),
    )
    yield from target_facts(target, directory, config.trust_remote_code)
    tokenizer = _try("target", "tokenizer", lambda: find_tokenizer(config, directory))
    on_disk = replace(
        config,
        model=directory,
        tokenizer=None if config.skip_tokenizer_init else tokenizer,
        draft_model=None,
        revision=None,
        draft_revision=None,
        num_speculative_tokens=0,
        draft_sample="greedy",
        rejection_sample="standard",
        synthetic_acceptance=None,
    )
    if draft is not None and not config.no_draft:
        draft_directory = _find(
            "draft",
            draft,
            config.draft_revision,
            scratch / "draft",
            with_weights=needs_weights,
        )
        on_disk = replace(
            on_disk,
            draft_model=draft_directory,
            num_speculative_tokens=config.num_speculative_tokens,
            draft_sample=config.draft_sample,
            rejection_sample=config.rejection_sample,
            synthetic_acceptance=config.synthetic_acceptance,
        )
    try:
        resolved = resolve(on_disk)
    except SpecgenError as error:
        advice = error.hint
        if advice is not None and "specgen doctor" in advice:  # which is what the user is reading
            advice = "install the driver and a CUDA build of torch, or give --device cpu"
        finding = Finding("machine", "settings", error.message, "problem", advice)
        raise _ProblemError(finding) from error
    yield from _tokenizer(resolved)
    yield from _generation(resolved, config.generation_config)
    head = None
    if resolved.draft_dir is not None:
        head, findings = _draft(str(draft), resolved, target)
        yield from findings
    skeletons = _skeletons(resolved, head)
    for note in skeletons["target"].notes:
        yield Finding("target", "remark", note, "note")
    if needs_weights:
        yield from stored_head(target, skeletons["target"], resolved.model_dir)
    if target.backend == "transformers":
        outline = _try("target", "attention", skeletons["target"].outline)
        yield from outline_facts(outline)
    if head is not None:
        yield Finding("draft", "fits the target", "yes")
    counts = {name: _count(skeleton) for name, skeleton in skeletons.items()}
    yield from _memory(resolved, skeletons["target"], head, counts, lengths)


def _find(
    section: str,
    name: str,
    revision: str | None,
    scratch: Path,
    *,
    with_code: bool = False,
    with_weights: bool,
) -> str:
    from specgen.hub import fetch_headers, locate

    if not with_weights:
        return _try(
            section, name, lambda: locate(name, revision, with_code=with_code, with_weights=False)
        )
    scratch.mkdir()
    return _try(section, name, lambda: fetch_headers(name, scratch, revision, with_code=with_code))


def _try(section: str, name: str, look: Callable[[], _Found]) -> _Found:
    try:
        return look()
    except SpecgenError as error:
        raise _ProblemError(Finding(section, name, error.message, "problem", error.hint)) from error


def _tokenizer(config: ResolvedConfig) -> Iterator[Finding]:
    from specgen.pipeline.loading import check_vocabulary
    from specgen.pipeline.tokenization import Tokenizer

    def load() -> Tokenizer:
        tokenizer = Tokenizer(
            config.tokenizer_dir,
            chat_template=config.chat_template,
            trust_remote_code=config.trust_remote_code,
        )
        check_vocabulary(tokenizer, config)
        return tokenizer

    if config.skip_tokenizer_init:
        yield Finding("target", "tokenizer", "not loaded: prompts must be token ids")
        return
    try:
        tokenizer = load()
    except SpecgenError as error:
        yield Finding("target", "tokenizer", error.message, "problem", error.hint)
        return
    bos = "adds a BOS" if tokenizer.adds_bos else "adds no BOS"
    yield Finding("target", "tokenizer", f"{len(tokenizer)} tokens, {bos}")
    if tokenizer.has_chat_template:
        yield _template(tokenizer)
    else:
        hint = 'rows with "messages" need --chat-template'
        yield Finding("target", "chat template", "none", "note", hint)


def _template(tokenizer: Tokenizer) -> Finding:
    """Whether the chat template renders one message of a user: a note, as prompts need none."""
    from specgen.pipeline.request import PromptRow
    from specgen.sampling_params import SamplingParams

    messages = ({"role": "user", "content": "a"},)
    try:
        tokenizer.encode(PromptRow(0, "", 1, "", SamplingParams(), messages=messages))
    except RequestError as error:
        text = f"present, but renders no message of a user: {' '.join(error.message.split())}"
        hint = 'rows with "messages" may need another one in --chat-template'
        return Finding("target", "chat template", text, "note", hint)
    return Finding("target", "chat template", "present")


def _generation(config: ResolvedConfig, applied: str) -> Iterator[Finding]:
    """What the model's own defaults come to; `applied` is ``none`` where a run leaves them out."""
    from specgen.resolve import eos_remark, generation_defaults, ignored_generation_keys

    def listed(values: dict[str, Any]) -> str:
        return ", ".join(f"{key}={value}" for key, value in values.items())

    ends = ", ".join(map(str, config.eos_token_ids)) or "none"
    remark = eos_remark(config)
    if remark is None:
        yield Finding("target", "end of sequence", ends)
    else:
        yield Finding("target", "end of sequence", f"{ends}; {remark}", "note", "correct it")
    if applied == "none":
        yield Finding("target", "sampling defaults", "left out: --generation-config none")
        return
    try:
        defaults = generation_defaults(config.model_dir)
    except ModelError as error:
        yield Finding("target", "sampling defaults", error.message, "problem", error.hint)
        return
    if defaults:
        yield Finding("target", "sampling defaults", listed(defaults))
    ignored = ignored_generation_keys(config.model_dir, config.max_model_len)
    if ignored:
        hint = "these keys of generation_config.json are not applied"
        yield Finding("target", "not applied", listed(ignored), "note", hint)


def _draft(
    name: str, config: ResolvedConfig, target: ModelConfig
) -> tuple[DraftConfig, list[Finding]]:
    from specgen.models.weights import inspect_draft
    from specgen.pipeline.loading import draft_overrides

    assert config.draft_dir is not None
    directory = config.draft_dir
    head = _try(
        "draft",
        name,
        lambda: inspect_draft(
            directory, target, load_format=config.load_format, overrides=draft_overrides(config)
        ),
    )
    findings = [Finding("draft", "directory", name)]
    findings += [Finding("draft", "recognised", head.notes[0])]
    findings += [Finding("draft", "remark", note, "note") for note in head.notes[1:]]
    findings += [Finding("draft", "warning", text, "note") for text in head.warnings]
    findings += config_facts("draft", replace(head, stored=frozenset()))
    for tensor in ("embed_tokens", "lm_head"):
        owner = "its own" if tensor in head.stored else "shared with the target"
        findings.append(Finding("draft", tensor, owner))
    maps = sorted({"d2t", "t2d", "token_map"} & head.stored)
    findings.append(Finding("draft", "vocabulary map", ", ".join(maps) or "none: the target's"))
    if head.position_limit is None:
        reach = f"none: goes on past its {head.max_position_embeddings} positions of training"
        findings.append(Finding("draft", "position limit", reach))
    return head, findings


def _memory(
    config: ResolvedConfig,
    skeleton: TargetModel,
    head: DraftConfig | None,
    num_parameters: dict[str, int],
    lengths: Sequence[int] | None,
) -> Iterator[Finding]:
    import torch

    from specgen.models.host_memory import available_memory
    from specgen.pipeline.kv_cache import cache_bytes
    from specgen.pipeline.loading import activation_bytes, step_bytes
    from specgen.pipeline.memory_fit import RowSizes, check_num_seqs

    target = skeleton.config
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    for name, count in num_parameters.items():
        size = _size(count * dtype.itemsize)
        yield Finding("memory", f"{name} weights", f"{size}: {count:,} in {config.dtype}")
    weights = sum(num_parameters.values()) * dtype.itemsize
    sizes = RowSizes.of(config, skeleton, head)
    room = cache_bytes(device, config.gpu_memory_utilization)
    step_rows = config.max_num_seqs
    if device.type == "cpu":  # which takes what a step needs; a row that runs has a block at least
        step_rows = min(step_rows, max(room // sizes.block_bytes, 1))
    working = activation_bytes(replace(config, max_num_seqs=step_rows), target)
    yield Finding(
        "memory",
        "working memory",
        f"{_size(working)} for steps of {config.max_num_batched_tokens} prompt tokens "
        f"or {step_rows} rows",
    )
    kept = (config.max_num_seqs + 1) * sizes.state_bytes
    parts = ["block tables"]
    if sizes.draft_logits_shape:
        parts.append("drafts' logits")
    if sizes.kept_pairs_shape:
        parts.append("features that wait for the draft")
    yield Finding("memory", "device rows", f"{_size(kept)} of {', '.join(parts)}")
    per_token = sizes.block_bytes // config.block_size
    yield Finding("memory", "cache of a token", f"{per_token / 1024:.1f} KiB")
    if device.type == "cuda":
        room -= weights
    try:
        check_num_seqs(
            config.max_num_seqs,
            available=room,
            bytes_per_row=sizes.state_bytes,
            step_bytes=lambda n: step_bytes(replace(config, max_num_seqs=n), target),
            cache_bytes=sizes.max_blocks * sizes.block_bytes,
        )
    except EnvironmentProblem as error:
        yield Finding("memory", "rows at a time", error.message, "problem", error.hint)
    if device.type == "cuda":
        room -= kept + step_bytes(config, target)
    limit = config.max_model_len
    for length in sorted({n for n in (*(lengths or _LENGTHS), limit) if n <= limit}):
        row = sizes.num_blocks(length) * sizes.block_bytes
        rows = max(room, 0) // row
        asked = min(rows, config.max_num_seqs)
        text = f"{_size(row)} a row; {asked} of {config.max_num_seqs} rows fit at a time"
        if rows:
            yield Finding("memory", f"rows of {length} tokens", text)
            continue
        where = "on this GPU" if device.type == "cuda" else "in the cache of a CPU run"
        hint = "lower --max-model-len, use a smaller dtype, or another machine"
        yield Finding("memory", f"rows of {length} tokens", f"{text} {where}", "problem", hint)
    too_long = sorted(n for n in lengths or () if n > limit)
    if too_long:
        text = f"{', '.join(map(str, too_long))}: beyond the {limit} tokens of a row"
        yield Finding("memory", "lengths", text, "note")
    available = available_memory()
    if device.type == "cpu" and weights > available:
        text = f"{_size(weights)} of weights, {_size(available)} of memory available"
        yield Finding("memory", "machine", text, "problem", "use a machine with more memory")


def _skeletons(config: ResolvedConfig, head: DraftConfig | None) -> dict[str, Any]:
    """Target and draft without values; every tensor is checked by name and shape on the way."""
    from specgen.kernels import select_kernels
    from specgen.models.weights import load_draft, load_target
    from specgen.pipeline.loading import draft_overrides

    kernels = select_kernels("cpu")
    options: dict[str, Any] = {"device": "meta", "dtype": config.dtype, "kernels": kernels}
    options["load_format"] = config.load_format
    aux_layers = () if head is None else head.aux_layers
    skeleton = _try(
        "target",
        "weights",
        lambda: load_target(
            config.model_dir,
            aux_layers=aux_layers,
            max_model_len=config.max_model_len,
            trust_remote_code=config.trust_remote_code,
            **options,
        ),
    )
    skeletons: dict[str, Any] = {"target": skeleton}
    if config.draft_dir is not None:
        directory = config.draft_dir
        skeletons["draft"] = _try(
            "draft",
            "weights",
            lambda: load_draft(directory, skeleton, overrides=draft_overrides(config), **options),
        )
    return skeletons


def _count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"

"""The fingerprint of a run: all of its settings that can change a line of the output."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, fields
from typing import Any

from specgen import __version__
from specgen.config import ResolvedConfig
from specgen.request_io.fingerprint import directory_identity
from specgen.request_io.reader import ReadOptions
from specgen.sampling_params import SamplingParams

__all__ = ["run_fingerprint"]

# Where and how fast a row is computed. Everything else counts, fields added later included.
_FREE = frozenset(
    {
        "device", "dtype", "kernel_backend", "trust_remote_code", "max_num_seqs",
        "max_num_batched_tokens", "gpu_memory_utilization", "num_kv_blocks", "block_size",
        "prefix_caching", "cuda_graphs", "eos_token_ids", "vocab_size",
    }
)  # fmt: skip
_DIRECTORIES = {"model_dir": "model", "draft_dir": "draft_model", "tokenizer_dir": "tokenizer"}


def run_fingerprint(
    config: ResolvedConfig, sampling: SamplingParams, read: ReadOptions, **others: Any
) -> dict[str, Any]:
    """Everything that can change the text, with models identified by their files.

    Args:
        config: of the engine.
        sampling: of rows that give no sampling of their own.
        read: how lines become rows; its limit is free, so that a run can be extended.
        others: settings that these do not hold, such as the form of the output.

    Raises:
        ModelError: a file of a model cannot be read.
    """
    found: dict[str, Any] = {"specgen": __version__}
    for name, value in asdict(config).items():
        if name in _DIRECTORIES:
            found[_DIRECTORIES[name]] = value and {
                "digest": directory_identity(value),
                "path": value,
            }
        elif name == "chat_template":
            found[name] = value and _digest(value)
        elif name not in _FREE:
            found[name] = value
    for name, value in sampling.to_dict().items():
        if name not in ("seed", "num_speculative_tokens"):  # of single rows only
            found[name] = value
    for field in fields(read):
        if field.name not in ("sampling", "limit", "seen"):
            value = getattr(read, field.name)
            found[field.name] = value if isinstance(value, str | None) else str(value)
    return found | others


def _digest(template: str) -> str:
    """Of the template's text, whether it was given itself or in a file."""
    from specgen.pipeline.tokenization import read_template

    return hashlib.blake2b(read_template(template).encode(), digest_size=8).hexdigest()

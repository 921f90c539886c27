"""Settings that can change an output's lines: rows made under different ones must not be mixed.

A fingerprint is a flat mapping of names to JSON values, compared name by name, so that a refusal
can show what differs. Batch sizes, memory, device and displays are left out on purpose: a job may
go on with other ones.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specgen.errors import ModelError

__all__ = ["Fingerprint", "differences", "directory_identity"]

Fingerprint = Mapping[str, Any]

_TEXT_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".py", ".tiktoken")
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
_PROBES = 64
_PROBE_BYTES = 4096


def differences(
    old: Fingerprint, new: Fingerprint, names: tuple[str, str] = ("then", "now")
) -> list[str]:
    """One line for each setting that differs, such as `temperature: 0.7 then, 0.8 now`."""
    lines = []
    for name in dict.fromkeys((*old, *new)):
        then, now = old.get(name), new.get(name)
        if _digest(then) != _digest(now):
            lines.append(f"{name}: {_show(then)} {names[0]}, {_show(now)} {names[1]}")
    return lines


def _digest(value: Any) -> Any:
    """What counts of a value: a directory may have moved."""
    return value["digest"] if isinstance(value, dict) and "digest" in value else value


def _show(value: Any) -> str:
    if isinstance(value, dict) and "digest" in value:
        return f"{value.get('path')} ({value['digest']})"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:119] + "…"


def directory_identity(directory: str) -> str:
    """16 hex digits that identify a checkpoint or tokenizer by its files, wherever they lie.

    Configurations, vocabularies and templates are hashed whole. Weights are hashed at 64 places
    spread over each file, and by their size: enough to tell a model from its fine-tuned sister in
    milliseconds, where reading them whole would take minutes.

    Raises:
        ModelError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=8)
    try:
        for name in sorted(os.listdir(directory)):
            path = Path(directory, name)
            if name.endswith(_TEXT_SUFFIXES):
                parts: Iterator[bytes] = iter((path.read_bytes(),))
            elif name.endswith(_WEIGHT_SUFFIXES):
                parts = _probes(path)
            else:
                continue
            digest.update(f"{name}\0{path.stat().st_size}\0".encode())
            for part in parts:
                digest.update(part)
    except OSError as error:
        raise ModelError(f"{error.filename or directory}: {error.strerror}") from error
    return digest.hexdigest()


def _probes(path: Path) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        last = max(size - _PROBE_BYTES, 0)
        for probe in range(_PROBES):
            yield os.pread(file.fileno(), _PROBE_BYTES, last * probe // (_PROBES - 1))

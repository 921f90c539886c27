"""Checkpoints by path or hub id: found on disk, in the hub's cache, or fetched.

Only what specgen reads is fetched: configurations, tokenizer files and one format of weights,
safetensors where a repository has them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from specgen.bench.presets import PRESETS
from specgen.errors import ModelError

__all__ = ["fetch_headers", "is_hub_id", "locate"]

_TEXTS = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_CODE = ["*.py"]
_SAFETENSORS = ["model*.safetensors"]
_PICKLES = ["pytorch_model*.bin"]
# Copies of the weights in other formats stand in folders of their own.
_FOLDERS = ["*/*"]


def is_hub_id(name: str) -> bool:
    """Whether ``name`` can only be a repository of the hub: no directory, and ``owner/name``."""
    if Path(name).is_dir():
        return False
    return not name.startswith((".", "/", "~")) and name.count("/") == 1


def locate(
    name: str,
    revision: str | None = None,
    *,
    with_code: bool = False,
    with_weights: bool = True,
) -> str:
    """Local directory of a checkpoint given by path or hub id; fetched where it is not cached.

    Args:
        name: a directory, or ``owner/name``.
        revision: branch, tag or commit of a hub id.
        with_code: fetch the Python files too, for those who trust them.
        with_weights: fetch the weights too, and insist on them.

    Raises:
        ModelError: it is neither a directory nor something the hub (or its cache) has.
    """
    if Path(name).is_dir():
        return name
    if not is_hub_id(name):
        hint = "give a directory with config.json, or a hub id"
        if name in PRESETS:
            hint += " (shapes without weights under this name are for specgen bench alone)"
        raise ModelError(f"{name}: no such model directory", hint)
    texts = [*_TEXTS, *_CODE] if with_code else _TEXTS
    if not with_weights:
        return _snapshot(name, revision, texts, is_enough=_has_texts)
    directory = _snapshot(name, revision, [*texts, *_SAFETENSORS])
    if not any(Path(directory).glob(_SAFETENSORS[0])):
        directory = _snapshot(name, revision, [*texts, *_PICKLES])
    if not _has_weights(Path(directory)):
        raise _without_weights(name, revision)
    return directory


def fetch_headers(
    name: str, into: Path, revision: str | None = None, *, with_code: bool = False
) -> str:
    """A directory that shows a checkpoint's configuration and the shapes of its tensors.

    What is on disk or in the cache is shown itself. Of the rest the small files are fetched, and of
    weight files their headers and vocabulary maps, see :mod:`specgen.sparse_copy`.

    Args:
        name: a directory, or ``owner/name``.
        into: an existing directory to build in.
        revision: branch, tag or commit of a hub id.
        with_code: as for :func:`locate`.

    Raises:
        ModelError: as :func:`locate`; or a weight file has no header that can be read alone.
    """
    if not is_hub_id(name):
        return locate(name)
    patterns = [*_TEXTS, *_CODE] if with_code else _TEXTS
    try:
        cached = _snapshot(name, revision, [*patterns, *_SAFETENSORS, *_PICKLES], cached_only=True)
    except ModelError:
        cached = None
    if cached is not None and _has_weights(Path(cached)):
        return cached
    texts = Path(_snapshot(name, revision, patterns))
    for file in texts.iterdir():
        (into / file.name).symlink_to(file.resolve())
    try:
        _fetch_headers(name, into, revision)
    except ModelError:
        raise
    except Exception as error:  # the client's errors have no base of their own
        raise _explain(name, revision, error) from error
    return str(into)


def _fetch_headers(name: str, into: Path, revision: str | None) -> None:
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    from specgen.sparse_copy import copy_headers

    info = HfApi().model_info(name, revision=revision, files_metadata=True)
    sizes = {s.rfilename: s.size or 0 for s in info.siblings or () if "/" not in s.rfilename}
    for pattern in (*_SAFETENSORS, *_PICKLES):
        files = [file for file in sizes if fnmatch(file, pattern)]
        if files:
            break
    else:
        raise _without_weights(name, revision)
    for file in files:
        url = hf_hub_url(name, file, revision=info.sha or revision)

        def fetch(first: int, last: int, url: str = url) -> bytes:
            headers = {**build_hf_headers(), "range": f"bytes={first}-{last}"}
            response = get_session().get(url, headers=headers, follow_redirects=True)
            hf_raise_for_status(response)
            content: bytes = response.content
            return content

        copy_headers(into / file, sizes[file], fetch)


def _has_weights(directory: Path) -> bool:
    patterns = (*_SAFETENSORS, *_PICKLES)
    return (directory / "config.json").is_file() and any(
        next(directory.glob(pattern), None) for pattern in patterns
    )


def _has_texts(directory: Path) -> bool:
    return next(directory.glob("*.json"), None) is not None


def _snapshot(
    name: str,
    revision: str | None,
    patterns: list[str],
    *,
    cached_only: bool = False,
    is_enough: Callable[[Path], bool] = _has_weights,
) -> str:
    from huggingface_hub import errors, snapshot_download

    def ask(cached_only: bool) -> str:
        try:
            path = snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=_FOLDERS,
                local_files_only=cached_only,
            )
        except Exception as error:  # the client's errors have no base of their own
            # A snapshot may lack what nobody needs. What is needed, loading finds missing by name.
            partial = getattr(error, "snapshot_path", None)
            if partial is None or not is_enough(Path(partial)):
                raise
            path = partial
        return str(path)

    try:
        return ask(cached_only)
    except Exception as error:
        # The client asks the hub which files a full commit has, and does not look into its cache
        # when there is no answer. A hub that answers (not such a one, not for you) is believed.
        answered = isinstance(error, errors.HfHubHTTPError)
        if not cached_only and not answered:
            with suppress(Exception):
                path = ask(True)
                if is_enough(Path(path)):
                    return path
        raise _explain(name, revision, error) from error


def _without_weights(name: str, revision: str | None) -> ModelError:
    """What is to be said of a repository of which there are texts, and no more."""
    from huggingface_hub import constants, errors

    if constants.HF_HUB_OFFLINE:
        return _explain(name, revision, errors.OfflineModeIsEnabled())
    return ModelError(
        f"{name}: no config.json with a weight file, neither on the hub nor in its cache "
        f"({constants.HF_HUB_CACHE})",
        f"looked for {_SAFETENSORS[0]} and {_PICKLES[0]}; if the hub cannot be reached, fetch it "
        f"where it can: {_download(name, revision)}",
    )


def _download(name: str, revision: str | None) -> str:
    """The command that fetches a repository."""
    return f"hf download {name}" + ("" if revision is None else f" --revision {revision}")


def _explain(name: str, revision: str | None, error: Exception) -> ModelError:
    """What a failure of the hub means for the user."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return ModelError(
            f"{name}: is gated, and you are not among those who may read it",
            f"accept its terms on {constants.ENDPOINT}/{name}, then log in (hf auth login) or set "
            "HF_TOKEN",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(
            f"{name}: has no revision {revision!r}", "give a branch, a tag or a commit"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelError(
            f"{name}: no such model directory, and no such repository on the hub, or a private one",
            "check the name; log in (hf auth login) for a private one",
        )
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        offline = constants.HF_HUB_OFFLINE
        reason = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        what = name if revision is None else f"{name} at revision {revision}"
        return ModelError(
            f"{what}: no such model directory, not complete in the hub's cache "
            f"({constants.HF_HUB_CACHE}), and {reason}",
            f"fetch it where there is a network: {_download(name, revision)}",
        )
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ModelError(
        f"{name}: no such model directory, and not available from the hub: {reason}",
        "check the name and the network, or give a directory",
    )

"""The Hugging Face hub: revisions of a model, the folders of its files here, errors in words."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from joma._data.folders import cache_folder

TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
)
DownloadProgress = Callable[[str, int, int], None]  # file, bytes so far, bytes in all

# Full, over quota, or not writable: the remedy is another folder, not another try.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
# Names of the base classes of network errors in httpx, requests and Python.
_NETWORK_ERRORS = {"TransportError", "ConnectionError", "TimeoutError", "Timeout"}
_REMEDY = (
    "give the path of a local folder of checkpoints instead, or download them once with a "
    "connection"
)
# Repositories of GGUF hold the same model in many precisions, of which the user names one.
_FILE_OF_REPO = re.compile(r"([\w.-]+/[\w.-]+)/([\w.-]+\.gguf)")


def with_file(source: str) -> tuple[str, str | None]:
    """Return the id of a model, and the file that "owner/name/file.gguf" names."""
    match = _FILE_OF_REPO.fullmatch(source)
    if match is None:
        return source, None
    return match[1], match[2]


def library() -> Any:
    """Return `huggingface_hub`, or raise an error that says how to get it."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise ValueError(
            f"models of the hub need huggingface_hub: pip install 'joma[hf]'; or {_REMEDY}"
        ) from error
    return huggingface_hub


def cache_of(repo: str) -> Path:
    """Return the folder of a model in the hub's cache, whether it exists or not."""
    cache = Path(library().constants.HF_HUB_CACHE)
    return cache / f"models--{repo.replace('/', '--')}"


def downloads(repo: str, revision: str) -> Path:
    """Return the folder in joma's cache for downloads of a revision that are not kept."""
    return cache_folder() / "downloads" / f"{repo}@{revision}".replace("/", "--")


def branches(repo: str) -> list[str]:
    """Return the branches of a model on the hub; without a connection, those in the cache."""
    hf = library()
    cached = _cached_references(repo)
    if hf.constants.HF_HUB_OFFLINE and cached:
        return cached
    try:
        references = hf.HfApi().list_repo_refs(repo)
    except Exception as error:
        if cached and _is_unreachable(error):
            return cached
        raise ValueError(explain(repo, error)) from error
    return [branch.name for branch in references.branches]


def _cached_references(repo: str) -> list[str]:
    folder = cache_of(repo) / "refs"
    if not folder.is_dir():
        return []
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def commits(repo: str) -> dict[str, str]:
    """Return the commits of a model's tags and branches; nothing if the hub cannot be asked."""
    hf = library()
    if hf.constants.HF_HUB_OFFLINE:
        return {}
    try:
        references = hf.HfApi().list_repo_refs(repo)
    except Exception:  # reading its files will report why
        return {}
    every_reference = [*references.tags, *references.branches]
    return {reference.name: reference.target_commit for reference in every_reference}


def check(repo: str) -> None:
    """Refuse a model that is neither in the cache nor on the hub."""
    if (cache_of(repo) / "snapshots").is_dir():
        return
    try:
        library().HfApi().model_info(repo, timeout=10)  # seconds
    except Exception as error:
        raise ValueError(explain(repo, error)) from error


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    # huggingface_hub wraps errors of the network in several of its own.
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_answer(error: Exception) -> bool:
    """True if the hub answered, with an error."""
    http_error = library().errors.HfHubHTTPError
    return any(isinstance(cause, http_error) for cause in _with_causes(error))


def _is_unreachable(error: Exception) -> bool:
    """True if there was no connection."""
    if _is_answer(error):
        return False
    for cause in _with_causes(error):
        for base in type(cause).__mro__:
            if base.__name__ in _NETWORK_ERRORS:
                return True
    return False


def _disk_error(error: Exception) -> OSError | None:
    for cause in _with_causes(error):
        if isinstance(cause, OSError) and cause.errno in _DISK_ERRORS:
            return cause
    return None


def explain(repo: str, error: Exception) -> str:
    """Return why the hub gave no answer, and what to do."""
    hf = library()
    if isinstance(error, hf.errors.GatedRepoError):
        return (
            f"{repo} is gated: accept its terms on huggingface.co and log in with `hf auth login`; "
            f"or {_REMEDY}"
        )
    if isinstance(error, (hf.errors.RepositoryNotFoundError, hf.errors.HFValidationError)):
        return (
            f"there is no folder {repo!r} here and no model of this name on the hub (or it is "
            f"private); or {_REMEDY}"
        )
    if hf.constants.HF_HUB_OFFLINE:
        return (
            f"{repo} is not a folder here nor in the hub's cache, and HF_HUB_OFFLINE forbids to "
            f"ask the hub: {_REMEDY}"
        )
    is_unreachable = _is_unreachable(error)
    disk_error = _disk_error(error)
    if disk_error is not None and not is_unreachable:
        return (
            f"{repo} cannot be written to the disk ({disk_error}): make room, or name other "
            "folders by JOMA_CACHE and HF_HOME"
        )
    first_line = next(iter(str(error).splitlines()), "")[:120]
    reason = f"{type(error).__name__}: {first_line}"
    if _is_answer(error):
        return f"the hub answers for {repo} with an error ({reason}); try again later, or {_REMEDY}"
    if is_unreachable or isinstance(error, hf.errors.LocalEntryNotFoundError):
        return (
            f"{repo} is not a folder here, and the hub cannot be reached ({reason}). No network? "
            f"Then {_REMEDY}"
        )
    return f"{repo} cannot be downloaded ({reason}); try again, or {_REMEDY}"

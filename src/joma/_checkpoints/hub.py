"""The Hugging Face hub: what revisions a model has there, where its files are kept here, and its errors in words."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from joma._data.folders import cache_folder

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
)  # fmt: skip
DownloadProgress = Callable[[str, int, int], None]  # file, bytes so far, bytes in all
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
_NETWORK = {
    "TransportError",
    "ConnectionError",
    "TimeoutError",
    "Timeout",
}  # of httpx, requests and Python
LOCAL = "give the path of a local folder of checkpoints instead, or download them once with a connection"


_FILE = re.compile(r"([\w.-]+/[\w.-]+)/([\w.-]+\.gguf)")


def with_file(source: str) -> tuple[str, str | None]:
    """The id of a model, and the one of its files that is meant: "owner/name/file.gguf"."""
    match = _FILE.fullmatch(source)
    return (match[1], match[2]) if match else (source, None)


def library() -> Any:
    """`huggingface_hub`, or how to get it."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise ValueError(
            f"models of the hub need huggingface_hub: pip install 'joma[hf]'; or {LOCAL}"
        ) from error
    return huggingface_hub


def cache_of(repo: str) -> Path:
    """The folder of a model in the hub's cache, whether it is there or not."""
    hf = library()
    return Path(hf.constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def downloads(repo: str, revision: str) -> Path:
    """The folder in joma's cache for downloads of a revision that are not kept."""
    return cache_folder() / "downloads" / f"{repo}@{revision}".replace("/", "--")


def branches(repo: str) -> list[str]:
    """The revisions of a model as the hub lists them; without a connection those in the cache."""
    hf = library()
    folder = cache_of(repo) / "refs"
    cached = (
        sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        if folder.is_dir()
        else []
    )
    if hf.constants.HF_HUB_OFFLINE and cached:
        return cached
    try:
        refs = hf.HfApi().list_repo_refs(repo)
    except Exception as error:
        if cached and _unreachable(error):
            return cached
        raise ValueError(explain(repo, error)) from error
    return [branch.name for branch in refs.branches]


def commits(repo: str) -> dict[str, str]:
    """Branches and tags of a model, and the commits that they are at; empty if the hub cannot be asked."""
    hf = library()
    if hf.constants.HF_HUB_OFFLINE:
        return {}
    try:
        refs = hf.HfApi().list_repo_refs(repo)
    except Exception:  # what is read of it will say why
        return {}
    return {ref.name: ref.target_commit for ref in [*refs.tags, *refs.branches]}


def check(repo: str) -> None:
    """Refuse a model that is neither in the cache nor on the hub."""
    hf = library()
    if (cache_of(repo) / "snapshots").is_dir():
        return
    try:
        hf.HfApi().model_info(repo, timeout=10)
    except Exception as error:
        raise ValueError(explain(repo, error)) from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _unreachable(error: Exception) -> bool:
    """Whether there was no connection. An answer with an error means that there was one."""
    answered = any(isinstance(e, library().errors.HfHubHTTPError) for e in _chain(error))
    return not answered and any(
        base.__name__ in _NETWORK for e in _chain(error) for base in type(e).__mro__
    )


def explain(repo: str, error: Exception) -> str:
    """Why the hub gave no answer, and what to do."""
    errors = library().errors
    if isinstance(error, errors.GatedRepoError):
        return f"{repo} is gated: accept its terms on huggingface.co and log in with `hf auth login`; or {LOCAL}"
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return f"there is no folder {repo!r} here and no model of this name on the hub (or it is private); or {LOCAL}"
    if library().constants.HF_HUB_OFFLINE:
        return f"{repo} is not a folder here nor in the hub's cache, and HF_HUB_OFFLINE forbids to ask the hub: {LOCAL}"
    unreachable = _unreachable(error)
    disk = [e for e in _chain(error) if isinstance(e, OSError) and e.errno in _DISK]
    if disk and not unreachable:
        return (
            f"{repo} cannot be written to the disk ({disk[0]}): make room, or name other folders by JOMA_CACHE and "
            "HF_HOME"
        )
    said = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    if any(isinstance(e, errors.HfHubHTTPError) for e in _chain(error)):
        return f"the hub answers for {repo} with an error ({said}); try again later, or {LOCAL}"
    if unreachable or isinstance(error, errors.LocalEntryNotFoundError):
        return f"{repo} is not a folder here, and the hub cannot be reached ({said}). No network? Then {LOCAL}"
    return f"{repo} cannot be downloaded ({said}); try again, or {LOCAL}"

"""Revisions of a model on the Hugging Face hub: what is in the local cache first, the rest downloaded file by file.

What is to be kept is downloaded into the hub's cache. What is not goes into joma's cache, one folder per revision, and
such a folder is all that is ever deleted: in the hub's cache, models may share files.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from joma._data.cache import cache_folder
from joma._run.lock import take
from joma._scan.reading import BadCheckpoint
from joma._scan.tensors import Tensors

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
)  # fmt: skip
DownloadProgress = Callable[[str, int, int], None]  # file, bytes so far, bytes in all
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
_NETWORK = {"TransportError", "ConnectionError", "TimeoutError", "Timeout"}  # of httpx, requests and Python
LOCAL = "give the path of a local folder of checkpoints instead, or download them once with a connection"


def library() -> Any:
    """`huggingface_hub`, or how to get it."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise ValueError(f"models of the hub need huggingface_hub: pip install 'joma[hf]'; or {LOCAL}") from error
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
    cached = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else []
    if hf.constants.HF_HUB_OFFLINE and cached:
        return cached
    try:
        refs = hf.HfApi().list_repo_refs(repo)
    except Exception as error:
        if cached and _unreachable(error):
            return cached
        raise ValueError(explain(repo, error)) from error
    return [branch.name for branch in refs.branches]


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
    return not answered and any(base.__name__ in _NETWORK for e in _chain(error) for base in type(e).__mro__)


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


class Revision:
    """The files of one revision.

    Files are taken from the hub's cache, or from what a scan that was killed has left, and downloaded otherwise.

    Arguments:
        repo: the model's id.
        revision: a branch, tag or commit.
        report: called with the progress of each download.
        keep: download into the hub's cache; otherwise into a folder of joma's cache, which `forget` deletes.
    """

    def __init__(self, repo: str, revision: str, report: DownloadProgress | None = None, keep: bool = False) -> None:
        self.repo, self.revision, self.keep, self._report = repo, revision, keep, report
        self.temporary = downloads(repo, revision)
        self._lock: int | None = None

    def tensors(self) -> Tensors:
        """Its tensors; shards are downloaded when one of their tensors is read."""
        return Tensors(self.fetch, f"{self.repo} at {self.revision}")

    def fetch(self, name: str) -> Path | None:
        """A file by its name, None if the revision does not have it."""
        hf = library()
        commit = self._commit()
        for place in (None, self.temporary):  # the hub's cache, then joma's
            known = hf.try_to_load_from_cache(self.repo, name, cache_dir=place, revision=commit or self.revision)
            if known is not None:
                if place is not None:
                    self._hold()
                return (
                    Path(known) if isinstance(known, str) else None
                )  # the cache also records that the hub has no such file
        if hf.constants.HF_HUB_OFFLINE:
            if commit is None:
                raise BadCheckpoint(
                    f"the revision {self.revision} is not in the hub's cache, and HF_HUB_OFFLINE is set"
                )
            return None
        try:
            if not self.keep:
                self._hold()
            return Path(
                hf.hf_hub_download(
                    self.repo, name, revision=commit or self.revision, cache_dir=None if self.keep else self.temporary,
                    tqdm_class=self._bar(name),
                )
            )  # fmt: skip
        except hf.errors.RevisionNotFoundError:
            raise BadCheckpoint(f"{self.repo} has no revision {self.revision}") from None
        except hf.errors.LocalEntryNotFoundError as error:
            raise BadCheckpoint(f"{name} of revision {self.revision}: {explain(self.repo, error)}") from error
        except hf.errors.EntryNotFoundError:
            return None
        except Exception as error:  # the network has many ways to fail
            raise BadCheckpoint(f"{name} of revision {self.revision}: {explain(self.repo, error)}") from error

    def _commit(self) -> str | None:
        """The commit that the first of its files came from: a branch may move meanwhile."""
        for folder in (cache_of(self.repo), self.temporary / cache_of(self.repo).name):
            if (ref := folder / "refs" / self.revision).is_file():
                return ref.read_text().strip()
            if (folder / "snapshots" / self.revision).is_dir():
                return self.revision
        return None

    def folder(self) -> Path:
        """A folder with its config and tokenizer; weights are read through `tensors`."""
        files = {name: self.fetch(name) for name in ("config.json", *TOKENIZER)}
        present = {name: path for name, path in files.items() if path is not None}
        places = {path.parents[len(Path(name).parts) - 1] for name, path in present.items()}
        if len(places) == 1:
            return places.pop()
        self._hold()
        together = self.temporary / "model"  # some were in the hub's cache: links to all
        shutil.rmtree(together, ignore_errors=True)
        for name, path in present.items():
            (together / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                (together / name).symlink_to(path.resolve())
            except OSError:  # a system without links
                shutil.copyfile(path, together / name)
        return together

    def close(self) -> None:
        """Let other scans delete the folder of this revision."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def forget(self) -> None:
        """Delete the folder of this revision, unless another scan is reading it: then that one will."""
        self.close()
        if not self.temporary.is_dir():
            return
        lock = _locked(self.temporary, shared=False)
        if lock is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)
            _lock_file(self.temporary).unlink(missing_ok=True)
            os.close(lock)

    def _hold(self) -> None:
        """Keep other scans from deleting the folder; remove what a killed download left half-written."""
        if self._lock is not None:
            return
        alone = _locked(self.temporary, shared=False)
        if alone is not None:
            for half in self.temporary.rglob("*.incomplete") if self.temporary.is_dir() else ():
                half.unlink(missing_ok=True)
            os.close(alone)
        self._lock = _locked(self.temporary, shared=True)

    def _bar(self, name: str) -> Any:
        """A progress bar that draws nothing and calls ``report``."""
        from huggingface_hub.utils.tqdm import tqdm

        report = self._report

        class Quiet(tqdm):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]
                self._done, self._all = int(kwargs.get("initial") or 0), int(kwargs.get("total") or 0)

            def update(self, n: float | None = 1) -> None:
                self._done += int(n or 0)
                if report is not None:
                    report(name, self._done, self._all)

        return Quiet


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _locked(folder: Path, *, shared: bool) -> int | None:
    """The lock of a folder: shared by its readers, or of one who would delete from it, None if it has readers."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return take(_lock_file(folder), shared=shared, wait=shared)

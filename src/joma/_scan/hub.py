"""Revisions of a model on the Hugging Face hub: what is in the local cache first, the rest downloaded file by file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from joma._scan.files import BadCheckpoint
from joma._scan.tensors import SUFFIXES, Tensors

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
)  # fmt: skip
Report = Callable[[str, int, int], None]  # file, bytes so far, bytes in all
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
        if cached and not isinstance(error, (hf.errors.RepositoryNotFoundError, hf.errors.HFValidationError)):
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


def explain(repo: str, error: Exception) -> str:
    """Why the hub gave no answer, and what to do."""
    errors = library().errors
    if isinstance(error, errors.GatedRepoError):
        return f"{repo} is gated: accept its terms on huggingface.co and log in with `hf auth login`; or {LOCAL}"
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return f"there is no folder {repo!r} here and no model of this name on the hub (or it is private); or {LOCAL}"
    if library().constants.HF_HUB_OFFLINE:
        return f"{repo} is not a folder here nor in the hub's cache, and HF_HUB_OFFLINE forbids to ask the hub: {LOCAL}"
    return (
        f"{repo} is not a folder here, and the hub cannot be reached ({type(error).__name__}: "
        f"{str(error).splitlines()[0][:120] if str(error) else ''}). No network? Then {LOCAL}"
    )


class Revision:
    """The files of one revision; what it downloads can be deleted again.

    Arguments:
        repo: the model's id.
        revision: a branch, tag or commit.
        report: told of the progress of downloads.
    """

    def __init__(self, repo: str, revision: str, report: Report | None = None) -> None:
        self.repo, self.revision, self._report = repo, revision, report
        self.downloaded: dict[Path, int] = {}  # file in the snapshot -> its size; what was not in the cache before

    def tensors(self) -> Tensors:
        """Its tensors; shards are downloaded when one of their tensors is read."""
        return Tensors(self.fetch, f"{self.repo} at {self.revision}")

    def fetch(self, name: str) -> Path | None:
        """A file by its name, None if the revision does not have it."""
        hf = library()
        known = hf.try_to_load_from_cache(self.repo, name, revision=self.revision)
        if isinstance(known, str):
            return Path(known)
        if hf.constants.HF_HUB_OFFLINE:
            folder = cache_of(self.repo)
            if not (folder / "refs" / self.revision).exists() and not (folder / "snapshots" / self.revision).exists():
                raise BadCheckpoint(
                    f"the revision {self.revision} is not in the hub's cache, and HF_HUB_OFFLINE is set"
                )
            return None
        before = self._blobs()
        try:
            path = Path(hf.hf_hub_download(self.repo, name, revision=self.revision, tqdm_class=self._bar(name)))
        except hf.errors.RevisionNotFoundError:
            raise BadCheckpoint(f"{self.repo} has no revision {self.revision}") from None
        except hf.errors.LocalEntryNotFoundError as error:
            raise BadCheckpoint(f"{name} of revision {self.revision}: {explain(self.repo, error)}") from error
        except hf.errors.EntryNotFoundError:
            return None
        except Exception as error:  # the network has many ways to fail
            raise BadCheckpoint(f"{name} of revision {self.revision}: {explain(self.repo, error)}") from error
        if path.resolve() not in before:
            self.downloaded[path] = path.stat().st_size
        return path

    def folder(self) -> Path:
        """The snapshot's folder with everything that transformers loads a model and its tokenizer from."""
        config = self.fetch("config.json")
        if config is None:
            raise BadCheckpoint(f"{self.repo} at {self.revision} has no config.json")
        tensors = self.tensors()  # checks what the index names
        for shard in tensors.shards(tensors.names):
            if self.fetch(shard) is None:
                raise BadCheckpoint(f"the shard {shard} that the index names is not there")
        for name in TOKENIZER:
            self.fetch(name)
        return config.parent

    def forget(self) -> int:
        """Delete the weights that this object downloaded; returns their bytes. Config, index and tokenizer stay."""
        freed = 0
        for path, size in self.downloaded.items():
            if path.name.endswith(SUFFIXES):
                blob = path.resolve()
                path.unlink(missing_ok=True)
                blob.unlink(missing_ok=True)
                freed += size
        self.downloaded.clear()
        return freed

    def _blobs(self) -> set[Path]:
        folder = cache_of(self.repo) / "blobs"
        return {blob.resolve() for blob in folder.iterdir()} if folder.is_dir() else set()

    def _bar(self, name: str) -> Any:
        """A progress bar that draws nothing and tells ours."""
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

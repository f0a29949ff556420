"""The files of one revision on the hub: from the local cache, by ranges, or downloaded.

Files that are kept are downloaded into the hub's cache. The others go into joma's cache, one folder
per revision, and such a folder is all that is ever deleted: in the hub's cache, models may share
files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from joma._checkpoints.folder import DCP_CHUNK, DCP_TABLE, INDEX, NAMES, SINGLE, weight_names
from joma._checkpoints.formats.dcp import DcpFolder
from joma._checkpoints.hub import TOKENIZER, DownloadProgress, cache_of, downloads, explain, library
from joma._checkpoints.ranges import (
    CachedFile,
    HubFile,
    HubLocation,
    TransferMeter,
    locate,
    window_size,
)
from joma._checkpoints.reading import BadCheckpoint, LocalFile, Reader
from joma._checkpoints.tensors import NoWeights, Tensors, weight_map
from joma._runs.files import file_hash
from joma._runs.lock import take

Answer = TypeVar("Answer")


# An estimate must not cost what it estimates.
class NotWhole(BadCheckpoint):
    """A whole file would have to be downloaded for an estimate, which downloads none."""


class Revision:
    """The files of one revision.

    A file is taken from the hub's cache, or from what a killed scan has left, and otherwise
    downloaded.

    Arguments:
        repo: the model's id.
        revision: a branch, tag or commit.
        report: called with the progress of each download.
        keep: download into the hub's cache; otherwise into a folder of joma's cache, which `forget`
            deletes.
        limit: bytes that may be transferred.
        dry: for an estimate. Never download a file of weights, and count in ``meter.expected`` what
            a machine without any of the files would transfer.
        file: the file of weights to read, of a model that has several.
    """

    def __init__(
        self,
        repo: str,
        revision: str,
        report: DownloadProgress | None = None,
        keep: bool = False,
        limit: int | None = None,
        dry: bool = False,
        file: str | None = None,
    ) -> None:
        self.repo = repo
        self.revision = revision
        self.keep = keep
        self.temporary = downloads(repo, revision)
        self.meter = TransferMeter(limit, report)
        self._report = report
        self._is_dry = dry
        self._weight_file = file
        self._lock: int | None = None
        self._pinned_commit: str | None = None
        self._small_files: dict[str, int] = {}  # of an estimate: name -> bytes

    def tensors(self, *, ranges: bool = False) -> Tensors:
        """Return its tensors; with ``ranges``, only the bytes that are needed are transferred."""
        title = f"{self.repo} at {self.revision}"
        open_reader = None
        if ranges:
            open_reader = self.reader
        if self._weight_file is not None:
            weight_files = {self._weight_file: 0}
        else:
            try:
                return Tensors(self.fetch, title, open_reader=open_reader)
            except NoWeights:
                weight_files = self._unusual_weights()
                if not weight_files:
                    raise
        file = next(iter(weight_files))
        if file.endswith(DCP_CHUNK):
            chunk_bytes = sum(weight_files.values())
            chunks = DcpFolder(title, open_reader or self._open_downloaded, chunk_bytes)
            return Tensors(self.fetch, title, single=chunks)

        # The file is read as if it had the first of the usual names.
        actual_names = {SINGLE[0]: file}

        def fetch(name: str) -> Path | None:
            return self.fetch(actual_names.get(name, name))

        def open_range(name: str) -> Reader | None:
            return self.reader(actual_names.get(name, name))

        if ranges:
            return Tensors(fetch, title, open_reader=open_range)
        return Tensors(fetch, title)

    def _unusual_weights(self) -> dict[str, int]:
        """Return files of weights without a usual name and their bytes: chunks, or the only one."""
        sizes = self._file_sizes()
        # A table of chunks decides; without one, a single file of any name will do.
        if DCP_TABLE in sizes:
            chunks = [name for name in sorted(sizes) if name.endswith(DCP_CHUNK)]
            return {name: sizes[name] for name in chunks}
        names = weight_names(sizes)
        if len(names) > 1:
            some = ", ".join(names[:6])
            if len(names) > 6:
                some += ", …"
            raise BadCheckpoint(
                f"{self.repo} at {self.revision} has several files of weights ({some}): name one "
                f"that is GGUF, as {self.repo}/{names[0]}"
            )
        return {name: sizes[name] for name in names}

    def _file_sizes(self) -> dict[str, int]:
        """Return the bytes of all files; without a connection, of those in the hub's cache."""
        if not library().constants.HF_HUB_OFFLINE:
            return {name: size for name, (size, _) in self.hashes().items()}
        folder = cache_of(self.repo) / "snapshots" / (self.commit() or self.revision)
        sizes = {}
        if folder.is_dir():
            for file in folder.iterdir():
                if file.is_file():
                    sizes[file.name] = file.stat().st_size
        return sizes

    def _open_downloaded(self, name: str) -> Reader | None:
        path = self.fetch(name)
        if path is None:
            return None
        return LocalFile(path, name)

    def reader(self, name: str) -> Reader | None:
        """Return a reader of a file of weights, by ranges if it is not here; None if there is none."""

        def resolve() -> HubLocation:
            commit = self._pinned_commit or self.commit()
            url = library().hf_hub_url(self.repo, name, revision=commit or self.revision)
            location, self._pinned_commit = locate(url, commit)
            return location

        def download() -> Path:
            if self._is_dry:
                raise NotWhole(f"{name} of revision {self.revision} has to be downloaded whole")
            path = self.fetch(name)
            if path is None:
                raise BadCheckpoint(f"{name} of revision {self.revision} is not there any more")
            return path

        cached = self._cached(name)
        if library().constants.HF_HUB_OFFLINE:
            # It is not asked for. `fetch` raises if not even the revision is in the cache.
            return self._open_downloaded(name)
        if isinstance(cached, Path):
            if self._is_dry:
                return CachedFile(name, cached, download, self.meter)
            return LocalFile(cached, name)
        if cached is not None:
            return None
        return self._ask_hub(name, lambda: HubFile(name, resolve, download, self.meter))

    def weights(self) -> dict[str, int]:
        """Return the bytes that each file of weights would take from the hub.

        They are 0 without a connection, since none can come.
        """
        names: tuple[str, ...] = NAMES
        if self._weight_file is not None:
            names = (self._weight_file,)
        for name in names:
            files = [name]
            if name in INDEX:
                index = self.fetch(name)
                if index is None:
                    continue
                files = _shards(index, name)
            # The first decides whether the revision has weights of this name.
            first_reader = self.reader(files[0])
            if first_reader is None:
                continue
            readers = {files[0]: first_reader}
            for file in files[1:]:
                reader = self.reader(file)
                if reader is not None:
                    readers[file] = reader
            sizes = dict.fromkeys(files, 0)
            for file, reader in readers.items():
                if isinstance(reader, HubFile):
                    sizes[file] = reader.size
            return sizes
        if self._weight_file is None:
            unusual = self._unusual_weights()
            if unusual and library().constants.HF_HUB_OFFLINE:
                return dict.fromkeys(unusual, 0)
            if unusual:
                return unusual
        raise BadCheckpoint(
            f"no weights in {self.repo} at {self.revision}: looked for {', '.join(NAMES)}"
        )

    def all_bytes(self, *, by_ranges: bool) -> int:
        """Return an estimate for all files of weights, and the small files that were fetched.

        With ``by_ranges``, each file is first opened by a range, whose bytes may come again with
        the tensors.
        """
        sizes = self.weights().values()
        total = sum(self._small_files.values()) + sum(sizes)
        if by_ranges:
            total += sum(min(size, window_size(size)) for size in sizes)
        return total

    def hashes(self) -> dict[str, tuple[int, str]]:
        """Return size and hash of all files, as the hub lists them.

        Without a connection, these are the files of weights in its cache.
        """
        if library().constants.HF_HUB_OFFLINE:
            return self._cached_hashes()
        return self._ask_hub("the list of files", self._listed_hashes) or {}

    def _listed_hashes(self) -> dict[str, tuple[int, str]]:
        hf = library()
        api = hf.HfApi()
        if self._pinned_commit is None:
            commit = self.commit() or api.repo_info(self.repo, revision=self.revision).sha
            self._pinned_commit = commit
        hashes = {}
        for item in api.list_repo_tree(self.repo, revision=self._pinned_commit):
            if isinstance(item, hf.hf_api.RepoFile):
                digest = item.blob_id  # of a small file
                if item.lfs is not None:
                    digest = item.lfs.sha256
                hashes[item.path] = (item.size, digest)
        return hashes

    def _cached_hashes(self) -> dict[str, tuple[int, str]]:
        paths: dict[str, Path] = {}
        for name in NAMES:
            path = self._cached(name)
            if isinstance(path, Path):
                paths[name] = path
        for name in set(INDEX) & set(paths):
            for shard in _shards(paths[name], name):
                path = self._cached(shard)
                if isinstance(path, Path):
                    paths[shard] = path
        return {name: (path.stat().st_size, file_hash(path)) for name, path in paths.items()}

    def fetch(self, name: str) -> Path | None:
        """Return a file by its name, None if the revision does not have it."""
        path = self._fetch(name)
        is_new = self._is_dry and name not in self._small_files
        if path is not None and is_new and not library().constants.HF_HUB_OFFLINE:
            self._small_files[name] = path.stat().st_size
            self.meter.expected += self._small_files[name]
        return path

    def _fetch(self, name: str) -> Path | None:
        cached = self._cached(name)
        if cached is False:
            return None
        if isinstance(cached, Path):
            return cached
        commit = self._pinned_commit or self.commit()
        if not library().constants.HF_HUB_OFFLINE:
            return self._ask_hub(name, lambda: self._download(name, commit))
        if commit is None:
            raise BadCheckpoint(
                f"the revision {self.revision} is not in the hub's cache, and HF_HUB_OFFLINE is set"
            )
        return None

    def _download(self, name: str, commit: str | None) -> Path:
        hf = library()
        if not self.keep:
            self._hold()
        options: dict[str, Any] = {"revision": commit or self.revision}
        if not self.keep:
            options["cache_dir"] = self.temporary
        # Asks for the size only, so that a file over the limit is refused before it comes.
        if self.meter.limit is not None:
            info = hf.hf_hub_download(self.repo, name, **options, dry_run=True)
            self.meter.allow(name, info.file_size)
        bar = self._progress_bar(name)
        path = Path(hf.hf_hub_download(self.repo, name, **options, tqdm_class=bar))
        size = path.stat().st_size
        self.meter.spent += size
        if not self._is_dry:  # `fetch` counts it for an estimate, wherever the file was
            self.meter.expected += size
        return path

    def _cached(self, name: str) -> Path | bool | None:
        """Return a file of the hub's cache or joma's.

        False means that the hub is known not to have it, None that nothing is known.
        """
        for cache in (None, self.temporary):  # None is the hub's cache
            revision = self._pinned_commit or self.commit() or self.revision
            cached = library().try_to_load_from_cache(
                self.repo, name, cache_dir=cache, revision=revision
            )
            if cached is not None:
                if cache is not None:
                    self._hold()
                if isinstance(cached, str):
                    return Path(cached)
                return False
        return None

    def _ask_hub(self, name: str, ask: Callable[[], Answer]) -> Answer | None:
        """Return the hub's answer, None if it has no such file; put its errors into words."""
        errors = library().errors
        try:
            return ask()
        except BadCheckpoint:
            raise
        except errors.RevisionNotFoundError:
            raise BadCheckpoint(f"{self.repo} has no revision {self.revision}") from None
        # An `EntryNotFoundError`, too, though it means that there is no connection.
        except errors.LocalEntryNotFoundError as error:
            raise BadCheckpoint(self._explain(name, error)) from error
        except errors.EntryNotFoundError:
            return None
        except Exception as error:  # the network has many ways to fail
            raise BadCheckpoint(self._explain(name, error)) from error

    def _explain(self, name: str, error: Exception) -> str:
        return f"{name} of revision {self.revision}: {explain(self.repo, error)}"

    def commit(self) -> str | None:
        """Return the commit that the first of its files came from, None if no file is here.

        All files have to come from one commit, and a branch may move meanwhile.
        """
        cache = cache_of(self.repo)
        for folder in (cache, self.temporary / cache.name):
            reference = folder / "refs" / self.revision
            if reference.is_file():
                return reference.read_text().strip()
            if (folder / "snapshots" / self.revision).is_dir():
                return self.revision
        return None

    def folder(self) -> Path:
        """Return a folder with its config and tokenizer. Weights are read through `tensors`."""
        present = {}
        for name in ("config.json", *TOKENIZER):
            path = self.fetch(name)
            if path is not None:
                present[name] = path
        folders = {path.parents[len(Path(name).parts) - 1] for name, path in present.items()}
        if len(folders) == 1:
            return folders.pop()
        # Some were in the hub's cache and some in joma's: link to all of them from one folder.
        self._hold()
        together = self.temporary / "model"
        shutil.rmtree(together, ignore_errors=True)
        for name, path in present.items():
            (together / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                (together / name).symlink_to(path.resolve())
            except OSError:  # a system without links
                shutil.copyfile(path, together / name)
        return together

    def another(self) -> Revision:
        """Return a second estimate of the same files, which counts for itself."""
        return Revision(self.repo, self.revision, dry=True, file=self._weight_file)

    def close(self) -> None:
        """Let other scans delete the folder of this revision."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def forget(self) -> None:
        """Delete the folder of this revision, unless another scan is reading it and will do so."""
        self.close()
        if not self.temporary.is_dir() and not _lock_file(self.temporary).exists():
            return
        lock = _take_lock(self.temporary, shared=False)
        if lock is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)
            _lock_file(self.temporary).unlink(missing_ok=True)
            os.close(lock)

    def _hold(self) -> None:
        """Keep other scans from deleting the folder; remove what a killed download left in it."""
        if self._lock is not None:
            return
        # Alone in the folder means that no download is under way: what is incomplete is left over.
        exclusive = _take_lock(self.temporary, shared=False)
        if exclusive is not None:
            if self.temporary.is_dir():
                for incomplete in self.temporary.rglob("*.incomplete"):
                    incomplete.unlink(missing_ok=True)
            os.close(exclusive)
        self._lock = _take_lock(self.temporary, shared=True)

    def _progress_bar(self, name: str) -> Any:
        """Return a class of progress bars that draw nothing and call ``report``."""
        from huggingface_hub.utils.tqdm import tqdm

        report = self._report

        class SilentBar(tqdm):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]
                self._received = int(kwargs.get("initial") or 0)
                self._expected = int(kwargs.get("total") or 0)

            def update(self, n: float | None = 1) -> None:
                self._received += int(n or 0)
                if report is not None:
                    report(name, self._received, self._expected)

        return SilentBar


def _shards(index: Path, name: str) -> list[str]:
    return sorted(set(weight_map(index, name).values()))


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _take_lock(folder: Path, *, shared: bool) -> int | None:
    """Take the lock of a folder.

    Its readers share it. A scan that would delete from the folder needs it alone, and gets None
    while there are readers.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    return take(_lock_file(folder), shared=shared, wait=shared)

"""The files of one revision on the hub: from the local cache, by ranges, or downloaded file by file.

What is to be kept is downloaded into the hub's cache. What is not goes into joma's cache, one folder per revision, and
such a folder is all that is ever deleted: in the hub's cache, models may share files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from joma._checkpoints.dcp import Dcp
from joma._checkpoints.formats import CHUNK, INDEX, METADATA, NAMES, SINGLE, weight_names
from joma._checkpoints.hub import TOKENIZER, DownloadProgress, cache_of, downloads, explain, library
from joma._checkpoints.ranges import CachedFile, HubFile, Meter, Place, resolved, window_size
from joma._checkpoints.reading import BadCheckpoint, LocalFile, Reader
from joma._checkpoints.tensors import NoWeights, Tensors, shards_of
from joma._runs.folder import file_hash
from joma._runs.lock import take

T = TypeVar("T")


class NotWhole(BadCheckpoint):
    """A whole file would have to be downloaded, which was not to be."""


class Revision:
    """The files of one revision.

    Files are taken from the hub's cache, or from what a scan that was killed has left, and downloaded otherwise.

    Arguments:
        repo: the model's id.
        revision: a branch, tag or commit.
        report: called with the progress of each download.
        keep: download into the hub's cache; otherwise into a folder of joma's cache, which `forget` deletes.
        limit: bytes that may be transferred.
        dry: for an estimate. Never download a file of weights, and count in ``meter.expected`` what a machine without
            any of the files would transfer.
        file: the file of weights that is meant, of a model that has several.
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
        self.repo, self.revision, self.keep, self._report, self._dry = (
            repo,
            revision,
            keep,
            report,
            dry,
        )
        self._meant = file
        self.temporary = downloads(repo, revision)
        self.meter = Meter(limit, report)
        self._lock: int | None = None
        self._pinned: str | None = None
        self._small_files: dict[str, int] = {}  # of an estimate: name -> bytes

    def tensors(self, *, ranges: bool = False) -> Tensors:
        """Its tensors; of a shard, what is needed is read when a tensor in it is, or all of it is downloaded."""
        where = f"{self.repo} at {self.revision}"
        reader = self.reader if ranges else None
        if self._meant is None:
            try:
                return Tensors(self.fetch, where, reader=reader)
            except NoWeights:
                others = self._others()
                if not others:
                    raise
        else:
            others = {self._meant: 0}
        lone = next(iter(others))
        if lone.endswith(CHUNK):
            return Tensors(
                self.fetch,
                where,
                source=Dcp(where, reader or self._downloaded, sum(others.values())),
            )

        def instead(name: str) -> str:
            return lone if name == SINGLE[0] else name

        parts = None if reader is None else lambda name: self.reader(instead(name))
        return Tensors(lambda name: self.fetch(instead(name)), where, reader=parts)

    def _others(self) -> dict[str, int]:
        """Files of weights that have no usual name, and their bytes: chunks with a table, or the only one there is."""
        files = self._files()
        if METADATA in files:
            return {name: size for name, size in sorted(files.items()) if name.endswith(CHUNK)}
        names = weight_names(files)
        if len(names) > 1:
            raise BadCheckpoint(
                f"{self.repo} at {self.revision} has several files of weights ({', '.join(names[:6])}"
                f"{', …' if len(names) > 6 else ''}): name one that is GGUF, as {self.repo}/{names[0]}"
            )
        return {name: files[name] for name in names}

    def _files(self) -> dict[str, int]:
        """The names of all files, and their bytes; without a connection of those in the hub's cache."""
        if not library().constants.HF_HUB_OFFLINE:
            return {name: size for name, (size, _) in self.hashes().items()}
        folder = cache_of(self.repo) / "snapshots" / (self.commit() or self.revision)
        return (
            {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
            if folder.is_dir()
            else {}
        )

    def _downloaded(self, name: str) -> Reader | None:
        path = self.fetch(name)
        return None if path is None else LocalFile(path, name)

    def reader(self, name: str) -> Reader | None:
        """A file of weights, None if the revision does not have it: a local one if it is there, else by ranges."""
        hf = library()

        def resolve() -> Place:
            commit = self._pinned or self.commit()
            url = hf.hf_hub_url(self.repo, name, revision=commit or self.revision)
            place, self._pinned = resolved(url, commit)
            return place

        def whole() -> Path:
            if self._dry:
                raise NotWhole(f"{name} of revision {self.revision} has to be downloaded whole")
            if (path := self.fetch(name)) is None:
                raise BadCheckpoint(f"{name} of revision {self.revision} is not there any more")
            return path

        known = self._known(name)
        if hf.constants.HF_HUB_OFFLINE:
            path = self.fetch(name) if known is None else known
            return LocalFile(path, name) if isinstance(path, Path) else None
        if isinstance(known, Path):
            return (
                CachedFile(name, known, whole, self.meter) if self._dry else LocalFile(known, name)
            )
        if known is not None:
            return None
        return self._asked(name, lambda: HubFile(name, resolve, whole, self.meter))

    def weights(self) -> dict[str, int]:
        """Return the bytes of each file of weights; of an estimate without a connection 0, since none can come."""
        for name in NAMES if self._meant is None else (self._meant,):
            shards = [name]
            if name in INDEX:
                path = self.fetch(name)
                shards = shards_of(path, name) if path is not None else []
            readers = {shard: self.reader(shard) for shard in shards[:1]}
            if None in readers.values() or not readers:
                continue
            readers |= {shard: self.reader(shard) for shard in shards[1:]}
            return {
                shard: file.size if isinstance(file, HubFile) else 0
                for shard, file in readers.items()
            }
        if self._meant is None and (others := self._others()):
            return dict.fromkeys(others, 0) if library().constants.HF_HUB_OFFLINE else others
        raise BadCheckpoint(
            f"no weights in {self.repo} at {self.revision}: looked for {', '.join(NAMES)}"
        )

    def all_bytes(self, *, by_ranges: bool) -> int:
        """Return an estimate for all files of weights, and the small files that were fetched before.

        ``by_ranges``: each file is first opened by a range, which may turn out to be a part of what is read later.
        """
        weights = self.weights()
        opening = sum(min(size, window_size(size)) for size in weights.values()) if by_ranges else 0
        return sum(self._small_files.values()) + opening + sum(weights.values())

    def hashes(self) -> dict[str, tuple[int, str]]:
        """Sizes and hashes of all files, by what the hub lists, or of those in its cache without a connection."""
        hf = library()
        if hf.constants.HF_HUB_OFFLINE:
            known = {name: path for name in NAMES if isinstance(path := self._known(name), Path)}
            for name in set(INDEX) & set(known):
                shards = shards_of(known[name], name)
                known |= {
                    shard: path for shard in shards if isinstance(path := self._known(shard), Path)
                }
            return {name: (path.stat().st_size, file_hash(path)) for name, path in known.items()}

        def ask() -> dict[str, tuple[int, str]]:
            self._pinned = (
                self._pinned
                or self.commit()
                or hf.HfApi().repo_info(self.repo, revision=self.revision).sha
            )
            tree = hf.HfApi().list_repo_tree(self.repo, revision=self._pinned)
            files = [item for item in tree if isinstance(item, hf.hf_api.RepoFile)]
            return {
                f.path: (f.size, f.lfs.sha256 if f.lfs is not None else f.blob_id) for f in files
            }

        return self._asked("the list of files", ask) or {}

    def fetch(self, name: str) -> Path | None:
        """A file by its name, None if the revision does not have it."""
        path = self._fetched(name)
        if (
            self._dry
            and path is not None
            and name not in self._small_files
            and not library().constants.HF_HUB_OFFLINE
        ):
            self._small_files[name] = path.stat().st_size
            self.meter.expected += self._small_files[name]
        return path

    def _fetched(self, name: str) -> Path | None:
        hf = library()
        known, commit = self._known(name), self._pinned or self.commit()
        if known is not None:
            return known if isinstance(known, Path) else None
        if hf.constants.HF_HUB_OFFLINE:
            if commit is None:
                raise BadCheckpoint(
                    f"the revision {self.revision} is not in the hub's cache, and HF_HUB_OFFLINE is set"
                )
            return None

        def download() -> Path:
            if not self.keep:
                self._hold()
            where = {
                "revision": commit or self.revision,
                "cache_dir": None if self.keep else self.temporary,
            }
            if self.meter.limit is not None:
                about = hf.hf_hub_download(self.repo, name, **where, dry_run=True)
                self.meter.allow(name, about.file_size)
            path = Path(hf.hf_hub_download(self.repo, name, **where, tqdm_class=self._bar(name)))
            size = path.stat().st_size
            self.meter.spent += size
            if not self._dry:  # an estimate counts it whether it was here or not
                self.meter.expected += size
            return path

        return self._asked(name, download)

    def _known(self, name: str) -> Path | bool | None:
        """A file in the hub's cache or joma's; False if it is known there that the hub has none, None if nothing is."""
        for place in (None, self.temporary):  # the hub's cache, then joma's
            revision = self._pinned or self.commit() or self.revision
            known = library().try_to_load_from_cache(
                self.repo, name, cache_dir=place, revision=revision
            )
            if known is not None:
                if place is not None:
                    self._hold()
                return Path(known) if isinstance(known, str) else False
        return None

    def _asked(self, name: str, ask: Callable[[], T]) -> T | None:
        """What the hub gives, None if it has no such file; its errors in words."""
        errors = library().errors
        try:
            return ask()
        except BadCheckpoint:
            raise
        except errors.RevisionNotFoundError:
            raise BadCheckpoint(f"{self.repo} has no revision {self.revision}") from None
        except errors.LocalEntryNotFoundError as error:
            raise BadCheckpoint(
                f"{name} of revision {self.revision}: {explain(self.repo, error)}"
            ) from error
        except errors.EntryNotFoundError:
            return None
        except Exception as error:  # the network has many ways to fail
            raise BadCheckpoint(
                f"{name} of revision {self.revision}: {explain(self.repo, error)}"
            ) from error

    def commit(self) -> str | None:
        """The commit that the first of its files came from, None if none is here: a branch may move meanwhile."""
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

    def another(self) -> Revision:
        """Return a second estimate of the same files, which counts for itself."""
        return Revision(self.repo, self.revision, dry=True, file=self._meant)

    def close(self) -> None:
        """Let other scans delete the folder of this revision."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def forget(self) -> None:
        """Delete the folder of this revision, unless another scan is reading it: then that one will."""
        self.close()
        if not self.temporary.is_dir() and not _lock_file(self.temporary).exists():
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
                self._done, self._all = (
                    int(kwargs.get("initial") or 0),
                    int(kwargs.get("total") or 0),
                )

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

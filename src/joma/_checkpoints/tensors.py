"""The tensors of a checkpoint, whatever it is saved as: one file, shards with an index, chunks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from joma._checkpoints.folder import (
    ADAPTER,
    ADAPTER_SETTINGS,
    DCP_TABLE,
    INDEX,
    NAMES,
    SINGLE,
    check_inside,
    has_weights,
    lone_file,
    refusal,
)
from joma._checkpoints.formats import open_file
from joma._checkpoints.formats.dcp import DcpFolder
from joma._checkpoints.formats.gguf import GgufFile
from joma._checkpoints.formats.gguf_header import GgufTokenizer
from joma._checkpoints.formats.view import TensorFormat, TensorView
from joma._checkpoints.reading import BadCheckpoint, LocalFile, Reader, read_json

# Low precision is turned into float32 block by block, so that memory holds the float32 only.
_BLOCK_BYTES = 4 << 20
Fetch = Callable[[str], Path | None]  # a file of the checkpoint by its name, None if there is none


class NoWeights(BadCheckpoint):
    """No file has one of the names that weights usually have."""


class Tensors:
    """The tensors of one checkpoint by name. A file is opened when a tensor in it is asked for.

    Arguments:
        fetch: returns small files, and files of weights if there is no ``open_reader``.
        title: of the checkpoint, for messages.
        config: what `config.json` would say, where there is none.
        open_reader: returns a reader of a file of weights.
        single: holds all tensors, instead of files that are looked for.

    Attributes:
        config: the content of `config.json`, or None.
        not_finite: the tensors in which NaN or infinities were read.
        adapter: the content of `adapter_config.json`, for a file of low-rank updates.
        updates: what an adapter adds, as tensors, for a model with one.
        incomplete: why these are not the weights of a model, for an adapter without its base.
        no_model: why no model can be built with them, though their matrices can be measured.
        tokenizer: the one inside the file of weights, None if there is none.
    """

    def __init__(
        self,
        fetch: Fetch,
        title: str,
        config: dict[str, Any] | None = None,
        open_reader: Callable[[str], Reader | None] | None = None,
        single: TensorFormat | None = None,
    ) -> None:
        self._fetch = fetch
        self._open_reader = open_reader or self._open_local
        self._formats: dict[str, TensorFormat] = {}  # by file
        self._digests: dict[str, str] = {}  # what was read -> its SHA-256
        self.not_finite: list[str] = []
        self.config = config
        config_path = fetch("config.json")
        if config_path is not None:
            self.config = read_json(config_path)
        self.adapter: dict[str, Any] | None = None
        self.updates: Tensors | None = None
        self.incomplete = ""
        self.no_model = ""
        self.tokenizer: GgufTokenizer | None = None
        self._file_of: dict[str, str]  # tensor -> file
        if single is None:
            self._file_of = self._find_weights(title)
        else:
            self._formats[""] = single
            self._file_of = dict.fromkeys(single.names(), "")

    @classmethod
    def open(cls, path: Path) -> Tensors:
        """Open a folder with weights in it, or a single file."""
        if path.is_file():
            return cls._open_single(path)
        has_usual_name = any((path / name).is_file() for name in NAMES)
        if not has_usual_name and (path / DCP_TABLE).is_file():
            return cls(lambda name: _existing(path / name), str(path), single=DcpFolder.local(path))
        # A file with a name of its own is read as if it had the first of the usual names.
        lone = None
        if not has_weights(path):
            lone = lone_file(path)
            if lone is None:
                reason = refusal(path)
                if reason is not None:
                    raise BadCheckpoint(reason)

        def fetch(name: str) -> Path | None:
            if lone is not None and name == SINGLE[0]:
                return lone
            return _existing(path / name)

        return cls(fetch, str(path), _config_of_training(path))

    @classmethod
    def _open_single(cls, path: Path) -> Tensors:
        # The settings of an adapter belong to its weights; of other files, the neighbours do not.
        files = {SINGLE[0]: path}
        if path.name in ADAPTER:
            files = {name: path.parent / name for name in (path.name, ADAPTER_SETTINGS)}

        def fetch(name: str) -> Path | None:
            if name not in files:
                return None
            return _existing(files[name])

        return cls(fetch, path.name)

    @classmethod
    def of(cls, single: TensorFormat, config: dict[str, Any] | None) -> Tensors:
        """Return the tensors of one format."""
        return cls(lambda name: None, "", config, single=single)

    def _find_weights(self, title: str) -> dict[str, str]:
        """Return the file of each tensor, from the first file whose name weights usually have."""
        for name in NAMES:
            if name in INDEX:
                path = self._fetch(name)
                if path is not None:
                    return weight_map(path, name)
                continue
            reader = self._open_reader(name)
            if reader is None:
                continue
            if name in ADAPTER:
                self.adapter = {}
                settings = self._fetch(ADAPTER_SETTINGS)
                if settings is not None:
                    self.adapter = read_json(settings)
            tensor_names = self._add_file(name, reader).names()
            if not tensor_names:
                raise BadCheckpoint(f"{reader.name} holds no tensors")
            return dict.fromkeys(tensor_names, name)
        raise NoWeights(f"no weights in {title}: looked for {', '.join(NAMES)}")

    def _open_local(self, name: str) -> Reader | None:
        path = self._fetch(name)
        if path is None:
            return None
        if name == SINGLE[0]:
            name = path.name  # a lone file may be called otherwise
        return LocalFile(path, name)

    def _format_of(self, name: str) -> TensorFormat:
        """Return the opened file of a tensor."""
        file = self._file_of[name]
        if file in self._formats:
            return self._formats[file]
        reader = self._open_reader(file)
        if reader is None:
            raise BadCheckpoint(f"the shard {file} that the index names is not there")
        return self._add_file(file, reader)

    def _add_file(self, name: str, reader: Reader) -> TensorFormat:
        opened = open_file(reader)
        if isinstance(opened, GgufFile):  # it holds what is in files of their own otherwise
            self.config = opened.config
            self.no_model = opened.no_model
            self.tokenizer = opened.tokenizer
        # Kept open for the checkpoint: its next tensors are most often in the same file.
        self._formats[name] = opened
        return opened

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._file_of)

    def names_in_file_order(self) -> list[str]:
        """Return the names of all tensors by file, and within a file as they lie in it."""
        for name in self._file_of:
            self.view(name)  # raises if the index names a tensor that its file does not have
        names = []
        for file in sorted(set(self._file_of.values())):
            for name in self._formats[file].names():
                if self._file_of.get(name) == file:
                    names.append(name)
        return names

    def file_of(self, name: str) -> str:
        """Return the file that holds a tensor."""
        return self._file_of[name]

    def view(self, name: str) -> TensorView:
        """Return the whole tensor of this name, without reading it."""
        opened = self._format_of(name)
        try:
            return opened.view(name)
        except KeyError:
            file = self._file_of[name]
            raise BadCheckpoint(f"the index says that {name} is in {file}, but it is not") from None

    def announce(self, views: Iterable[TensorView]) -> None:
        """Prepare to read these views, which lets a remote file fetch neighbours together."""
        by_file: dict[str, list[TensorView]] = {}
        for view in views:
            by_file.setdefault(self._file_of[view.name], []).append(view)
        for file_views in by_file.values():
            self._format_of(file_views[0].name).announce(file_views)

    def read_many(self, views: Iterable[TensorView]) -> Iterator[Tensor]:
        """Yield views in float32 (float64 stays). What is read goes into the digest."""
        views = list(views)
        if len(views) > 1:  # `read` announces a single one
            self.announce(views)
        for view in views:
            yield self.read(view)

    def read(self, view: TensorView | str) -> Tensor:
        """Return a view, or a whole tensor by its name, in float32 (float64 stays)."""
        if isinstance(view, str):
            view = self.view(view)
        opened = self._format_of(view.name)
        digest = hashlib.sha256()
        if view.dtype in (torch.float32, torch.float64):
            result = opened.read(view)
            hash_into(digest, result)
        else:
            opened.announce([view])
            blocks = list(view.blocks(_BLOCK_BYTES))
            parts = opened.read_many(block for _, _, block in blocks)
            result = torch.empty(view.shape)  # float32
            for (dimension, start, _), part in zip(blocks, parts, strict=True):
                hash_into(digest, part)
                result.narrow(dimension, start, part.shape[dimension]).copy_(part)
        # The digest of a checkpoint must not depend on the order in which its views are read.
        key = f"{view.name} {view.shape} {view.stride} {view.offset} {view.dtype}"
        self._digests[key] = digest.hexdigest()
        # Checked here, once, for all gauges: NaN in a matrix is a fact about the checkpoint.
        if result.numel() and view.name not in self.not_finite:
            low, high = result.aminmax()
            if not math.isfinite(low) or not math.isfinite(high):
                self.not_finite.append(view.name)
        return result

    def read_stored(self, views: Iterable[TensorView]) -> Iterator[Tensor]:
        """Yield views of one tensor in the type of its file, without digest."""
        views = list(views)
        if not views:
            return iter(())
        return self._format_of(views[0].name).read_many(views)

    @property
    def digest(self) -> str:
        """SHA-256 over everything that was read, in whichever order."""
        entries = list(self._digests.items())
        if self.updates is not None:
            for key, digest in self.updates._digests.items():
                entries.append((f"update of {key}", digest))
        return hashlib.sha256(json.dumps(sorted(entries)).encode()).hexdigest()

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read so far."""
        return sum(opened.bytes_read for opened in self._formats.values())

    @property
    def notes(self) -> list[str]:
        """Remarks on the files, for the row of the checkpoint."""
        return [opened.note for opened in self._formats.values() if opened.note]


def _existing(path: Path) -> Path | None:
    if path.is_file():
        return path
    return None


def _config_of_training(folder: Path) -> dict[str, Any] | None:
    """Return the number of heads in a checkpoint of ``joma train``; its shapes tell the rest."""
    info = folder.absolute().parent.parent / "run.json"
    if folder.parent.name != "checkpoints" or not info.is_file():
        return None
    config = read_json(info).get("config")
    if not isinstance(config, dict) or not isinstance(config.get("heads"), int):
        return None
    return {"num_attention_heads": config["heads"]}


def weight_map(path: Path, name: str) -> dict[str, str]:
    """Return the shard of each tensor, from an index; refuse shards outside of the checkpoint."""
    shards = read_json(path).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise BadCheckpoint(f"{name} has no weight_map")
    # Of thousands of tensors in a few shards, each shard is checked once. Lists cannot be in a set.
    for shard in shards.values():
        if not isinstance(shard, str):
            check_inside(shard, name)
    for shard in set(shards.values()):
        check_inside(shard, name)
    return shards


def hash_into(digest: Any, tensor: Tensor) -> None:
    """Add the bytes of a tensor to a digest."""
    digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())

"""The tensors of a checkpoint, whatever it is saved as: one file, or shards with an index."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from joma._checkpoints.dcp import Dcp
from joma._checkpoints.entry import Entry, contiguous
from joma._checkpoints.files import TensorFile
from joma._checkpoints.formats import (
    ADAPTER,
    INDEX,
    METADATA,
    NAMES,
    SETTINGS,
    SINGLE,
    check_inside,
    has_weights,
    lone_file,
    refusal,
)  # fmt: skip
from joma._checkpoints.gguf_file import GgufFile
from joma._checkpoints.gguf_model import OwnTokenizer
from joma._checkpoints.guard import MAX_JSON, parsed
from joma._checkpoints.reading import BadCheckpoint, LocalFile, Reader
from joma._checkpoints.sources import Source

_BLOCK = 4 << 20  # bytes
Fetch = Callable[[str], Path | None]  # a file of the checkpoint by its name, None if there is none
View = tuple[str, Entry | None]  # a tensor by its name, or a part of it


class NoWeights(BadCheckpoint):
    """No file has one of the names that weights usually have."""


class Tensors:
    """Tensors of one checkpoint by name; a file is opened when a tensor in it is asked for.

    Arguments:
        fetch: gives small files, and those of weights without ``reader``.
        where: for messages.
        config: what `config.json` would say, where there is none.
        reader: gives files of weights.
        source: gives all tensors, instead of files.

    Attributes:
        names: of all tensors.
        config: the content of `config.json`, or None.
        not_finite: the tensors in which NaN or infinities were read.
        adapter: the content of `adapter_config.json`, of a file of low-rank updates.
        updates: of a model with such an adapter, what that adds, as tensors.
        incomplete: why these are not the weights of a model, of an adapter without its base.
        no_model: why no model can be built with them, though its matrices can be measured.
        tokenizer: the one inside the file of weights, None if there is none.
    """

    def __init__(
        self,
        fetch: Fetch,
        where: str,
        config: dict[str, Any] | None = None,
        reader: Callable[[str], Reader | None] | None = None,
        source: Source | None = None,
    ) -> None:
        self._fetch, self._reader = fetch, reader or self._local
        self._files: dict[str, Source] = {}
        self._digests: dict[str, str] = {}  # what was read -> its SHA-256
        self.not_finite: list[str] = []
        self.config = _json(path) if (path := fetch("config.json")) else config
        self.adapter: dict[str, Any] | None = None
        self.updates: Tensors | None = None
        self.incomplete = self.no_model = ""
        self.tokenizer: OwnTokenizer | None = None
        self._place = self._find(where) if source is None else self._all(source)  # tensor -> file
        self.names = list(self._place)

    @classmethod
    def open(cls, path: Path) -> Tensors:
        """A folder with weights in it, or a single file."""
        if path.is_file() and path.name in ADAPTER:
            return cls(
                lambda name: _file(path.parent / name) if name in (path.name, SETTINGS) else None,
                path.name,
            )
        if path.is_file():
            return cls(lambda name: path if name == SINGLE[0] else None, path.name)
        if not any((path / name).is_file() for name in NAMES) and (path / METADATA).is_file():
            return cls(lambda name: _file(path / name), str(path), source=Dcp.local(path))
        lone = None if has_weights(path) else lone_file(path)
        if lone is None and not has_weights(path) and (why := refusal(path)):
            raise BadCheckpoint(why)

        def fetch(name: str) -> Path | None:
            if lone is not None and name == SINGLE[0]:
                return lone
            return _file(path / name)

        return cls(fetch, str(path), _own_config(path))

    def _find(self, where: str) -> dict[str, str]:
        for name in NAMES:
            if name not in INDEX:
                if (file := self._reader(name)) is not None:
                    if name in ADAPTER:
                        self.adapter = _json(path) if (path := self._fetch(SETTINGS)) else {}
                    if not (entries := self._open(name, file).entries):
                        raise BadCheckpoint(f"{file.name} holds no tensors")
                    return dict.fromkeys(entries, name)
                continue
            if (path := self._fetch(name)) is None:
                continue
            return weight_map(path, name)
        raise NoWeights(f"no weights in {where}: looked for {', '.join(NAMES)}")

    def _all(self, source: Source) -> dict[str, str]:
        self._files[""] = source
        return dict.fromkeys(source.entries, "")

    @classmethod
    def of(cls, source: Source, config: dict[str, Any] | None) -> Tensors:
        """The tensors of one source."""
        return cls(lambda name: None, "", config, source=source)

    def _local(self, name: str) -> Reader | None:
        path = self._fetch(name)
        return None if path is None else LocalFile(path, path.name if name == SINGLE[0] else name)

    def _open(self, name: str, file: Reader | None = None) -> Source:
        if name not in self._files:
            file = file or self._reader(name)
            if file is None:
                raise BadCheckpoint(f"the shard {name} that the index names is not there")
            self._files[name] = self._source(file)
        return self._files[name]

    def _source(self, file: Reader) -> Source:
        if file.suffix != ".gguf":
            return TensorFile(file)
        made = GgufFile(file)
        self.config, self.no_model, self.tokenizer = made.config, made.no_model, made.tokenizer
        return made

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._place

    def entry(self, name: str) -> Entry:
        """Type and shape of a tensor, without reading it."""
        file = self._open(self._place[name])
        if name not in file.entries:
            raise BadCheckpoint(
                f"the index says that {name} is in {self._place[name]}, but it is not"
            )
        return file.entries[name]

    def expect(self, views: Iterable[View]) -> int:
        """These will be read, which lets neighbours be fetched together; the bytes that they have."""
        by_file: dict[str, list[tuple[str, Entry]]] = {}
        for name, view in views:
            by_file.setdefault(self._place[name], []).append((name, view or self.entry(name)))
        for file, inside in by_file.items():
            self._open(file).expect(inside)
        return sum(
            math.prod(view.shape) * view.dtype.itemsize
            for inside in by_file.values()
            for _, view in inside
        )

    def read(self, name: str, view: Entry | None = None) -> Tensor:
        """A tensor in float32 (float64 stays), or a part of it; what is read goes into the digest."""
        place = self.entry(name)
        view = view or place
        digest = hashlib.sha256()
        file = self._open(self._place[name])
        file.expect([(name, view)])
        if view.dtype in (torch.float32, torch.float64) or place.stride != contiguous(place.shape):
            tensor = file.read(name, view)
            hash_into(digest, tensor)
            out = tensor if tensor.dtype == torch.float64 else tensor.float()
        else:
            out = torch.empty(
                view.shape
            )  # low precision: block by block, so that memory holds the float32 only
            for dim, start, block in view.blocks(_BLOCK):
                tensor = file.read(name, block)
                hash_into(digest, tensor)
                out.narrow(dim, start, tensor.shape[dim]).copy_(tensor)
        start = (view.offset - place.offset) // view.dtype.itemsize
        self._digests[f"{name} {view.shape} {view.stride} {start} {view.dtype}"] = (
            digest.hexdigest()
        )
        if out.numel() and name not in self.not_finite:
            low, high = out.aminmax()
            self.not_finite += [name] * (not math.isfinite(low) or not math.isfinite(high))
        return out

    def stored(self, name: str, view: Entry | None = None) -> Tensor:
        """A tensor as it is in the file, or a part of it."""
        self.entry(name)
        return self._open(self._place[name]).read(name, view)

    @property
    def digest(self) -> str:
        """SHA-256 over all that was read, in whichever order."""
        updates = {} if self.updates is None else self.updates._digests
        every = [
            *self._digests.items(),
            *((f"update of {what}", digest) for what, digest in updates.items()),
        ]
        return hashlib.sha256(json.dumps(sorted(every)).encode()).hexdigest()

    @property
    def bytes_read(self) -> int:
        """Of tensors."""
        return sum(file.bytes_read for file in self._files.values())

    @property
    def notes(self) -> list[str]:
        """What is special about the files."""
        return [file.note for file in self._files.values() if file.note]

    def shards(self, names: Iterable[str]) -> list[str]:
        """The files that hold these tensors."""
        return sorted({self._place[name] for name in names})


def _file(path: Path) -> Path | None:
    return path if path.is_file() else None


def _own_config(folder: Path) -> dict[str, Any] | None:
    """Of a checkpoint of ``joma train``, how many heads there are; its names and shapes tell the rest."""
    info = folder.absolute().parent.parent / "run.json"
    if folder.parent.name != "checkpoints" or not info.is_file():
        return None
    config = _json(info).get("config")
    heads = config.get("heads") if isinstance(config, dict) else None
    return {"num_attention_heads": heads} if isinstance(heads, int) else None


def weight_map(path: Path, name: str) -> dict[str, str]:
    """Tensor -> shard, of an index; one that names files outside of the checkpoint is refused."""
    index = _json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise BadCheckpoint(f"{name} has no weight_map")
    for shard in set(index.values()):
        check_inside(shard, name)
    return index


def shards_of(path: Path, name: str) -> list[str]:
    """The shards that an index names."""
    return sorted(set(weight_map(path, name).values()))


def hash_into(digest: Any, tensor: Tensor) -> None:
    """Add a tensor's bytes to a digest."""
    digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def _json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            return parsed(stream.read(MAX_JSON + 1))
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path.name} cannot be read: {error}") from error

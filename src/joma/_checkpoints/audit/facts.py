"""What is known of one checkpoint of a series, at three levels of effort.

`hashes` is what files are called, how large they are and what they hash to: of a model on the hub these are the hub's
own hashes, and no byte of a weight is transferred. `slices` adds the table of tensors and 64 kB from the middle of
each. `full` reads everything.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from joma._checkpoints.checkpoints import Checkpoint
from joma._checkpoints.folder import (
    DCP_CHUNK,
    INDEX,
    NAMES,
    has_weights,
    lone_file,
    weight_names,
)
from joma._checkpoints.formats.view import TensorView
from joma._checkpoints.reading import BadCheckpoint
from joma._checkpoints.revision import NotWhole, Revision
from joma._checkpoints.steps import trained_steps
from joma._checkpoints.tensors import Fetch, Tensors, hash_into, weight_map
from joma._checkpoints.weights import checkpoint_tensors

SLICE = 64 << 10  # bytes of a tensor
_SAMPLE = SLICE // 4  # numbers of a tensor that changes are measured on
_BLOCK = 16 << 20  # bytes that are read at a time
_STATE = "trainer_state.json"


class Level(StrEnum):
    """How much of a checkpoint is read."""

    HASHES = "hashes"
    SLICES = "slices"
    FULL = "full"


@dataclass(frozen=True)
class FileFact:
    """A file of weights."""

    size: int
    digest: str  # SHA-256, or the hub's own hash of a small file


@dataclass(frozen=True)
class TensorFact:
    """A tensor, as far as it was read."""

    file: str
    dtype: str = ""  # of the level `hashes` nothing more than the file is known
    shape: tuple[int, ...] = ()
    digest: str = ""
    not_finite: int = 0  # numbers among those read that are NaN or infinite
    constant: bool = False  # one number only, as in a bias or a norm at the start


@dataclass
class Facts:
    """A checkpoint: its files, its tensors, and by how much they differ from the two checkpoints before."""

    name: str
    step: int
    files: dict[str, FileFact] = field(default_factory=dict)
    tensors: dict[str, TensorFact] = field(default_factory=dict)
    trained: int | None = None  # by the trainer's own state
    problem: str = ""  # why it could not be read
    change: dict[str, float] = field(
        default_factory=dict
    )  # tensor -> relative change since the checkpoint before
    change2: dict[str, float] = field(default_factory=dict)  # since the one before that
    transferred: int = 0


Samples = dict[str, Tensor]  # tensor -> some of its numbers, always at the same places


def gather(checkpoint: Checkpoint, level: Level, limit: int | None = None) -> tuple[Facts, Samples]:
    """All that the level tells of a checkpoint; what cannot be read is a problem, not an error.

    ``limit``: bytes that may be transferred of it.
    """
    facts, samples = Facts(checkpoint.name, checkpoint.step), Samples()
    revision = checkpoint.revision(limit=limit)
    try:
        facts.trained = trained_steps(_state_folder(checkpoint, revision))
        places = _files(facts, checkpoint, revision)
        if level is Level.HASHES:
            facts.tensors = {name: TensorFact(file) for name, file in places.items()}
        else:
            tensors = checkpoint_tensors(checkpoint, revision, ranges=True)
            for name, (fact, sample) in _tensors(tensors, level):
                facts.tensors[name] = fact
                if sample is not None:
                    samples[name] = sample
    except BadCheckpoint as error:
        facts.problem = str(error)
    finally:
        if revision is not None:
            facts.transferred = revision.meter.spent
            revision.forget()
    return facts, samples


def transfer_of(revision: Revision, level: Level) -> int:
    """Bytes that the level will take of a revision on the hub, by its list of files and their headers."""
    if level is Level.HASHES:
        small = (*INDEX, _STATE)
        return sum(size for name, (size, _) in revision.hashes().items() if name in small)
    revision.fetch(_STATE)
    try:
        _expected(revision.tensors(ranges=True), level)
    except NotWhole:
        return revision.all_bytes(by_ranges=True)
    return revision.meter.expected


def _state_folder(checkpoint: Checkpoint, revision: Revision | None) -> Path:
    if revision is None:
        return Path(str(checkpoint.path))
    path = revision.fetch(_STATE)
    return path.parent if path is not None else Path(revision.temporary)


def _files(facts: Facts, checkpoint: Checkpoint, revision: Revision | None) -> dict[str, str]:
    """Fill in the files of weights; where an index tells, tensor -> its file."""
    listed: Mapping[str, Callable[[], FileFact]]
    if revision is not None:
        listed = {name: partial(FileFact, *fact) for name, fact in revision.hashes().items()}
        fetch: Fetch = revision.fetch
    else:
        folder = Path(str(checkpoint.path))
        if not folder.exists():
            raise BadCheckpoint(f"there is no checkpoint {checkpoint.name} at {folder}")
        lone = folder if folder.is_file() else None if has_weights(folder) else lone_file(folder)
        if lone is not None:
            facts.files = {"weights": _hashed(lone)}
            return {}
        here = {file.name: file for file in folder.iterdir() if file.is_file()}
        listed, fetch = {name: partial(_hashed, file) for name, file in here.items()}, here.get
    chunks = [
        name for name in listed if name.endswith(DCP_CHUNK)
    ]  # of torch.distributed.checkpoint
    if chunks and not any(name in listed for name in NAMES):
        facts.files = {name: listed[name]() for name in sorted(chunks)}
        return {}
    for name in NAMES:
        if name not in listed:
            continue
        index = fetch(name) if name in INDEX else None
        places = {} if index is None else weight_map(index, name)
        shards = sorted(set(places.values())) or [name]
        facts.files = {shard: listed[shard]() for shard in shards if shard in listed}
        if missing := [shard for shard in shards if shard not in listed]:
            raise BadCheckpoint(f"the shard {missing[0]} that the index names is not there")
        return places
    alone = [str(checkpoint.file)] if checkpoint.file in listed else weight_names(listed)
    if len(alone) == 1:
        facts.files = {"weights": listed[alone[0]]()}
        return {}
    raise BadCheckpoint(f"no weights: looked for {', '.join(NAMES)}")


def _hashed(file: Path) -> FileFact:
    try:
        with file.open("rb") as stream:
            return FileFact(file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())
    except OSError as error:
        raise BadCheckpoint(f"{file.name} cannot be read: {error.strerror or error}") from error


def _expected(tensors: Tensors, level: Level) -> list[TensorView]:
    """Announce and return what will be read of each tensor: all of it, or its slice."""
    views = [tensors.view(name) for name in tensors.names_in_file_order()]
    if level is Level.SLICES:
        views = [_slice(view) for view in views]
    tensors.announce(views)
    return views


def _tensors(
    tensors: Tensors, level: Level
) -> Iterator[tuple[str, tuple[TensorFact, Tensor | None]]]:
    for view in _expected(tensors, level):
        whole = tensors.view(view.name)
        digest, bad, sample = hashlib.sha256(), 0, []
        every = max(1, math.prod(whole.shape) // _SAMPLE)  # of a whole tensor, evenly over it
        place = 0
        for part in _parts(tensors, view, level):
            hash_into(digest, part)
            flat = part.reshape(-1)
            if flat.dtype.is_floating_point:
                numbers = flat.float() if flat.dtype.itemsize < 4 else flat
                bad += int((~numbers.isfinite()).sum())
                sample.append(
                    (numbers[-place % every :: every] if level is Level.FULL else numbers).float()
                )
            place += flat.numel()
        seen = torch.cat(sample) if sample else None
        fact = TensorFact(
            tensors.file_of(view.name), str(whole.foreign_type or whole.dtype).removeprefix("torch."), whole.shape,
            digest.hexdigest(), bad, seen is not None and bool((seen == seen[:1]).all()),
        )  # fmt: skip
        yield view.name, (fact, seen)


def _slice(view: TensorView) -> TensorView:
    """Return the middle of a tensor, so many bytes of it."""
    count, wanted = math.prod(view.shape), SLICE // view.dtype.itemsize
    if count <= wanted:
        return view
    return view.part((wanted,), (1,), (count - wanted) // 2)


def _parts(tensors: Tensors, view: TensorView, level: Level) -> Iterator[Tensor]:
    """Yield what is read of a tensor, as stored, block by block."""
    if level is Level.SLICES or not view.shape:
        return tensors.read_stored([view])
    return tensors.read_stored(block for _, _, block in view.blocks(_BLOCK))


def relative_change(samples: Samples, before: Samples) -> dict[str, float]:
    """Tensor -> the norm of its change over the mean of both norms, for those in both with equal shapes."""
    changes = {}
    for name, now in samples.items():
        then = before.get(name)
        if then is None or then.shape != now.shape:
            continue
        now, then = now.double(), then.double()
        size = (float(now.norm()) + float(then.norm())) / 2
        change = float((now - then).norm())
        if math.isfinite(size) and math.isfinite(change):
            changes[name] = change / size if size else 0.0
    return changes


def as_json(facts: list[Facts]) -> list[dict[str, Any]]:
    """The facts as plain data."""
    return [
        {
            "checkpoint": f.name, "step": f.step, "trained": f.trained, "problem": f.problem,
            "transferred": f.transferred,
            "files": {name: {"size": file.size, "digest": file.digest} for name, file in f.files.items()},
            "tensors": {
                name: {"file": t.file, "dtype": t.dtype, "shape": list(t.shape), "digest": t.digest,
                       "not_finite": t.not_finite, "change": f.change.get(name)}
                for name, t in f.tensors.items()
            },
        }
        for f in facts
    ]  # fmt: skip

"""The facts of one checkpoint of a series, at three levels of effort.

`hashes` are the names, sizes and hashes of files. For a model on the hub these are the hub's own
hashes, and no weight is transferred. `slices` adds the table of tensors and 64 kB from the middle of
each. `full` reads everything.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
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

# Bytes that level `slices` reads of a tensor: enough to see a difference, a few requests on the hub.
SLICE = 64 << 10
# Numbers of a tensor that changes are measured on; level `full` spreads them evenly over the tensor.
_SAMPLE_NUMBERS = SLICE // 4
# Bytes that level `full` holds in memory at a time.
_BLOCK_BYTES = 16 << 20
_STATE = "trainer_state.json"

Samples = dict[str, Tensor]  # tensor -> some of its numbers, always at the same places


class Level(StrEnum):
    """How much of a checkpoint is read."""

    HASHES = "hashes"
    SLICES = "slices"
    FULL = "full"


@dataclass(frozen=True)
class FileFact:
    """A file of weights; the digest is SHA-256, or the hub's own hash of a small file."""

    size: int
    digest: str


@dataclass(frozen=True)
class TensorFact:
    """A tensor, as far as it was read; level `hashes` knows the file only.

    Attributes:
        not_finite: how many of the numbers that were read are NaN or infinite.
        constant: True if all numbers are the same, as in a bias or a norm at the start.
    """

    file: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    digest: str = ""
    not_finite: int = 0
    constant: bool = False


@dataclass
class Facts:
    """A checkpoint: its files, its tensors, and their changes since the two checkpoints before.

    Attributes:
        trained: the step in the trainer's own state.
        problem: why it could not be read.
        change: tensor -> relative change since the checkpoint before.
        change2: tensor -> relative change since the one before that.
        transferred: bytes from the hub.
    """

    name: str
    step: int
    files: dict[str, FileFact] = field(default_factory=dict)
    tensors: dict[str, TensorFact] = field(default_factory=dict)
    trained: int | None = None
    problem: str = ""
    change: dict[str, float] = field(default_factory=dict)
    change2: dict[str, float] = field(default_factory=dict)
    transferred: int = 0


def gather(checkpoint: Checkpoint, level: Level, limit: int | None = None) -> tuple[Facts, Samples]:
    """Return the facts of a checkpoint and samples of its tensors; errors are in `Facts.problem`.

    Arguments:
        checkpoint: the checkpoint.
        level: how much to read.
        limit: bytes that may be transferred.
    """
    facts = Facts(checkpoint.name, checkpoint.step)
    samples: Samples = {}
    revision = checkpoint.revision(limit=limit)
    try:
        facts.trained = trained_steps(_state_folder(checkpoint, revision))
        file_of = _add_files(facts, checkpoint, revision)
        if level is Level.HASHES:
            facts.tensors = {name: TensorFact(file) for name, file in file_of.items()}
        else:
            tensors = checkpoint_tensors(checkpoint, revision, ranges=True)
            for name, fact, sample in _tensor_facts(tensors, level):
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
    """Return the bytes that a level takes of a revision, by its list of files and their headers."""
    if level is Level.HASHES:
        small_files = (*INDEX, _STATE)
        sizes = [size for name, (size, _) in revision.hashes().items() if name in small_files]
        return sum(sizes)
    revision.fetch(_STATE)
    try:
        _announce(revision.tensors(ranges=True), level)
    except NotWhole:
        return revision.all_bytes(by_ranges=True)
    return revision.meter.expected


def _state_folder(checkpoint: Checkpoint, revision: Revision | None) -> Path:
    if revision is None:
        return Path(str(checkpoint.path))
    path = revision.fetch(_STATE)
    if path is None:
        return Path(revision.temporary)
    return path.parent


def _add_files(facts: Facts, checkpoint: Checkpoint, revision: Revision | None) -> dict[str, str]:
    """Fill in the files of weights; return tensor -> file, if there is an index."""
    listed: Mapping[str, Callable[[], FileFact]]
    fetch: Fetch
    if revision is not None:
        listed = {name: partial(FileFact, *fact) for name, fact in revision.hashes().items()}
        fetch = revision.fetch
    else:
        folder = Path(str(checkpoint.path))
        lone = _lone_weights(checkpoint, folder)
        if lone is not None:
            facts.files = {"weights": _hashed(lone)}
            return {}
        files = {file.name: file for file in folder.iterdir() if file.is_file()}
        listed = {name: partial(_hashed, file) for name, file in files.items()}
        fetch = files.get
    chunks = [name for name in listed if name.endswith(DCP_CHUNK)]
    if chunks and not any(name in listed for name in NAMES):
        facts.files = {name: listed[name]() for name in sorted(chunks)}
        return {}
    for name in NAMES:
        if name in listed:
            return _add_shards(facts, name, listed, fetch)
    candidates = weight_names(listed)
    if checkpoint.file in listed:
        candidates = [str(checkpoint.file)]
    if len(candidates) == 1:
        facts.files = {"weights": listed[candidates[0]]()}
        return {}
    raise BadCheckpoint(f"no weights: looked for {', '.join(NAMES)}")


def _lone_weights(checkpoint: Checkpoint, path: Path) -> Path | None:
    """Return the only file of weights of a local checkpoint, if it is not called as usual."""
    if not path.exists():
        raise BadCheckpoint(f"there is no checkpoint {checkpoint.name} at {path}")
    if path.is_file():
        return path
    if has_weights(path):
        return None
    return lone_file(path)


def _add_shards(
    facts: Facts, name: str, listed: Mapping[str, Callable[[], FileFact]], fetch: Fetch
) -> dict[str, str]:
    """Fill in one file, or the shards that an index names; return tensor -> shard."""
    file_of: dict[str, str] = {}
    index = fetch(name) if name in INDEX else None
    if index is not None:
        file_of = weight_map(index, name)
    shards = sorted(set(file_of.values())) or [name]
    facts.files = {shard: listed[shard]() for shard in shards if shard in listed}
    for shard in shards:
        if shard not in listed:
            raise BadCheckpoint(f"the shard {shard} that the index names is not there")
    return file_of


def _hashed(file: Path) -> FileFact:
    try:
        with file.open("rb") as stream:
            return FileFact(file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())
    except OSError as error:
        raise BadCheckpoint(f"{file.name} cannot be read: {error.strerror or error}") from error


def _announce(tensors: Tensors, level: Level) -> list[TensorView]:
    """Announce and return what will be read of each tensor: all of it, or its slice."""
    views = [tensors.view(name) for name in tensors.names_in_file_order()]
    if level is Level.SLICES:
        views = [_slice(view) for view in views]
    tensors.announce(views)
    return views


def _tensor_facts(
    tensors: Tensors, level: Level
) -> Iterator[tuple[str, TensorFact, Tensor | None]]:
    """Yield name, facts and sample of each tensor."""
    for view in _announce(tensors, level):
        whole_view = tensors.view(view.name)
        digest = hashlib.sha256()
        not_finite = 0
        parts = []
        # Level `full` takes every so many numbers, at the same places however the blocks are cut.
        stride = max(1, math.prod(whole_view.shape) // _SAMPLE_NUMBERS)
        position = 0
        for part in _read_parts(tensors, view, level):
            hash_into(digest, part)
            flat = part.reshape(-1)
            if flat.dtype.is_floating_point:
                numbers = flat.float() if flat.dtype.itemsize < 4 else flat
                not_finite += int((~numbers.isfinite()).sum())
                if level is Level.FULL:
                    numbers = numbers[-position % stride :: stride]
                parts.append(numbers.float())
            position += flat.numel()
        sample = torch.cat(parts) if parts else None
        fact = TensorFact(
            file=tensors.file_of(view.name),
            dtype=str(whole_view.foreign_type or whole_view.dtype).removeprefix("torch."),
            shape=whole_view.shape,
            digest=digest.hexdigest(),
            not_finite=not_finite,
            constant=sample is not None and bool((sample == sample[:1]).all()),
        )
        yield view.name, fact, sample


def _slice(view: TensorView) -> TensorView:
    """Return `SLICE` bytes from the middle of a tensor."""
    count = math.prod(view.shape)
    wanted = SLICE // view.dtype.itemsize
    if count <= wanted:
        return view
    return view.part((wanted,), (1,), (count - wanted) // 2)


def _read_parts(tensors: Tensors, view: TensorView, level: Level) -> Iterator[Tensor]:
    """Yield what is read of a tensor, as stored, block by block."""
    if level is Level.SLICES or not view.shape:
        return tensors.read_stored([view])
    return tensors.read_stored(block for _, _, block in view.blocks(_BLOCK_BYTES))


def relative_change(samples: Samples, before: Samples) -> dict[str, float]:
    """Return tensor -> the norm of its change over the mean of both norms, for equal shapes."""
    changes = {}
    for name, sample in samples.items():
        earlier = before.get(name)
        if earlier is None or earlier.shape != sample.shape:
            continue
        now = sample.double()
        then = earlier.double()
        size = (float(now.norm()) + float(then.norm())) / 2
        change = float((now - then).norm())
        if math.isfinite(size) and math.isfinite(change):
            changes[name] = change / size if size else 0.0
    return changes


def as_json(series: list[Facts]) -> list[dict[str, Any]]:
    """Return the facts as plain data."""
    rows = []
    for facts in series:
        tensors = {}
        for name, tensor in facts.tensors.items():
            tensors[name] = {
                "file": tensor.file,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "digest": tensor.digest,
                "not_finite": tensor.not_finite,
                "change": facts.change.get(name),
            }
        rows.append(
            {
                "checkpoint": facts.name,
                "step": facts.step,
                "trained": facts.trained,
                "problem": facts.problem,
                "transferred": facts.transferred,
                "files": {name: asdict(file) for name, file in facts.files.items()},
                "tensors": tensors,
            }
        )
    return rows

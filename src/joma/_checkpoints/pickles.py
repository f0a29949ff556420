"""Weights that `torch.save` wrote, without executing anything: `torch.load` with ``weights_only``, and where they lie.

A zip of `torch.save` is a small pickle and one record per storage. The pickle is loaded onto the meta device from a zip
in memory that has the same records, all of them empty: the offset that PyTorch tells of a storage is then the name of
its record. So only the zip's directory and its pickle are read, and nothing is derived from how some version
of PyTorch pads its files: a record's own header says where its bytes begin.
"""

from __future__ import annotations

import io
import pickle  # for the name of its error; nothing is unpickled
import re
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from joma._checkpoints.guard import check_zip
from joma._checkpoints.inert import Refused, inert
from joma._checkpoints.reading import BadCheckpoint, Reader, Stream, read_bytes
from joma._checkpoints.standins import StandIn, stand_ins

_SMALL = (
    "data.pkl",
    "version",
    "byteorder",
)  # the records that are read to know what the others hold
_WEIGHTS = (
    "model",
    "state_dict",
    "model_state_dict",
    "module",
)  # what weights are called in a training checkpoint
_MOST, _LONGEST = 200_000, 2000  # tensors and dicts of a file; characters of a name
_LEGACY = 5  # pickles at the head of a file of before PyTorch 1.6
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_HEADER = 30  # bytes of a record's header, before its name


@dataclass(frozen=True)
class Record:
    """A record of a zip: its header, and the bytes that follow the header's name and padding."""

    header: int
    nominal: int  # where the bytes would begin without padding
    size: int

    def data(self, reader: Reader) -> int:
        """Where its bytes begin."""
        head = read_bytes(reader, self.header, _HEADER)
        if head[:4] != b"PK\x03\x04":
            raise BadCheckpoint(
                f"{reader.name} is damaged: there is no record at byte {self.header:,}"
            )
        return (
            self.header
            + _HEADER
            + int.from_bytes(head[26:28], "little")
            + int.from_bytes(head[28:30], "little")
        )


def stored_tensors(reader: Reader) -> tuple[dict[str, tuple[Tensor, Record]] | None, str]:
    """Tensors (on the meta device) and their records, and a note; None of a zip that is to be read whole."""
    try:
        with zipfile.ZipFile(Stream(reader)) as archive:
            items = archive.infolist()
            check_zip(items, reader.size, reader.name)
            if any(item.compress_type != zipfile.ZIP_STORED for item in items):
                return None, ""
            if any(item.filename.endswith("/constants.pkl") for item in items):
                raise BadCheckpoint(
                    f"{reader.name} is a TorchScript program, which is never run: save its state_dict"
                )
            small = {i.filename: archive.read(i) for i in items if _base(i.filename) in _SMALL}
    except BadCheckpoint:
        raise
    except Exception as error:  # zipfile has many ways to fail
        raise BadCheckpoint(
            f"{reader.name} is cut off or no zip: {error}; download it again"
        ) from error
    order = next(
        (content for name, content in small.items() if _base(name) == "byteorder"), b"little"
    )
    if order.decode(errors="replace") != sys.byteorder:
        return None, ""
    empty = io.BytesIO()
    with zipfile.ZipFile(empty, "w") as archive:
        for item in items:
            if item.filename in small or _base(item.filename).startswith("data/"):
                archive.writestr(item.filename, small.get(item.filename, b""))
    with zipfile.ZipFile(empty) as archive:
        begins = {
            i.header_offset + _HEADER + len(i.filename.encode()): i.filename
            for i in archive.infolist()
        }
    empty.seek(0)
    by_name = {item.filename: item for item in items}
    found = {}
    tensors, note = load(empty, "meta", reader.name)
    for key, tensor in tensors.items():
        at = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if at not in begins:
            return None, ""
        item = by_name[begins[at]]
        record = Record(
            item.header_offset,
            item.header_offset + _HEADER + len(item.orig_filename.encode()),
            item.file_size,
        )
        if (
            tensor.untyped_storage().nbytes() > record.size
            or record.nominal + record.size > reader.size
        ):
            raise BadCheckpoint(
                f"{reader.name} is damaged: {key} does not fit into its record of {record.size:,} bytes"
            )
        found[key] = tensor, record
    return found, note


def _base(name: str) -> str:
    """A record's name without the folder that all of them are in."""
    return name.partition("/")[2]


def load(file: Path | io.BytesIO, device: str, name: str) -> tuple[dict[str, Tensor], str]:
    """The tensors, with weights_only, and a note on what else there is: nothing of that is executed or kept."""
    loaded, besides = _loaded(file, device, name)
    try:
        tensors = dict(_flat(loaded))
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{name} is refused: {error}") from None
    some = ", ".join(besides[:3]) + (f" and {len(besides) - 3} more" if len(besides) > 3 else "")
    return (
        tensors,
        f"{name} has more than weights ({some}), which was passed over" if besides else "",
    )


def _loaded(file: Path | io.BytesIO, device: str, name: str) -> tuple[Any, list[str]]:
    """What was saved, and the names of what has stand-ins."""
    _rehearse(file, name)
    try:
        with warnings.catch_warnings(), stand_ins(file) as besides:
            warnings.simplefilter(
                "ignore"
            )  # on protocols of pickle that may not work: then they raise
            return torch.load(file, map_location=device, weights_only=True), besides
    except pickle.UnpicklingError as error:
        raise BadCheckpoint(
            f"{name} is refused, nothing of it was executed: {_refused(error)}"
        ) from None
    except Exception as error:  # a damaged pickle can fail in any way
        raise BadCheckpoint(f"{name} is damaged or no PyTorch file ({_first(error)})") from None


def _rehearse(file: Path | io.BytesIO, name: str) -> None:
    """Refuse a pickle that would take PyTorch's loader too long, or too much memory."""
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                for item in archive.infolist():
                    if _base(item.filename) == "data.pkl":
                        inert(io.BytesIO(archive.read(item)))
        elif isinstance(file, Path):
            with file.open("rb") as stream:
                for _ in range(_LEGACY):
                    inert(stream)
    except (Refused, MemoryError, RecursionError) as error:
        raise BadCheckpoint(f"{name} is refused: {error or type(error).__name__}") from None
    except Exception:  # damaged: PyTorch will say so
        pass
    finally:
        if isinstance(file, io.BytesIO):
            file.seek(0)


def load_tensor(data: bytes, name: str) -> Tensor:
    """The one tensor that was saved, of bytes in memory."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            check_zip(archive.infolist(), len(data), name)
    except BadCheckpoint:
        raise
    except Exception as error:  # zipfile has many ways to fail
        raise BadCheckpoint(f"{name} is cut off or no zip: {error}") from None
    loaded, _ = _loaded(io.BytesIO(data), "cpu", name)
    if not isinstance(loaded, Tensor) or loaded.numel() * loaded.itemsize > len(data):
        raise BadCheckpoint(f"{name} is no tensor that its {len(data):,} bytes can hold")
    return loaded.detach()


def _flat(loaded: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors of nested dicts by dotted names; the dict of weights of a training checkpoint loses its own name.

    A pickle may refer to one dict many times over: no more is walked through than a file of weights can have.
    """
    if not isinstance(loaded, Mapping):
        return
    wrapped = [k for k in _WEIGHTS if isinstance(loaded.get(k), Mapping)]
    alone = bool(wrapped) and not any(isinstance(value, Tensor) for value in loaded.values())
    left, seen = [("", loaded[wrapped[0]] if alone else loaded)], 0
    while left:
        prefix, content = left.pop()
        inside = []
        for key, value in content.items():
            name, seen = f"{prefix}{key}", seen + 1
            if seen > _MOST or len(name) > _LONGEST:
                raise BadCheckpoint("dicts are nested beyond reason")
            if isinstance(value, Tensor):
                yield name, value.detach()
            elif isinstance(value, Mapping) and (prefix or alone or not name.startswith("optim")):
                inside.append((f"{name}.", value))
            elif (
                isinstance(value, StandIn)
                and (alone or "." in name)
                and not name.endswith("_extra_state")
            ):
                raise BadCheckpoint(f"{name} is a {type(value).__name__}, no plain tensor")
        left += reversed(inside)


def _first(error: BaseException) -> str:
    """The first line of a message, without what PyTorch advises, which would execute the file."""
    text = str(error).strip().split("\n")[0]
    return type(error).__name__ if not text or "weights_only" in text else text[:200]


def _refused(error: BaseException) -> str:
    """What is wrong with a pickle that is more than weights, and what can be done about it safely."""
    name = _GLOBAL.search(str(error))
    return (
        f"it {f'asks for {name[1]}, which is' if name else 'is damaged, or holds'} more than weights. Where it was "
        "made, save the weights alone: safetensors.torch.save_file(model.state_dict(), FILE)"
    )

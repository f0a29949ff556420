"""Weights that `torch.save` wrote, without executing anything: `torch.load` with ``weights_only``, and where they lie.

A zip of `torch.save` is a small pickle and one record per storage. The pickle is loaded onto the meta device from a zip
in memory that has the same records, all of them empty: the offset that PyTorch tells of a storage is then the name of
its record. So only the zip's directory and its pickle are read, and nothing is derived from how some version
of PyTorch pads its files: a record's own header says where its bytes begin.
"""

from __future__ import annotations

import io
import pickle  # for the name of its error; nothing is unpickled
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from joma._scan.reading import BadCheckpoint, Reader, Stream, read_bytes

_SMALL = ("data.pkl", "version", "byteorder")  # the records that are read to know what the others hold
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
            raise BadCheckpoint(f"{reader.name} is damaged: there is no record at byte {self.header:,}")
        return self.header + _HEADER + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")


def stored_tensors(reader: Reader) -> dict[str, tuple[Tensor, Record]] | None:
    """Tensors (on the meta device) and their records; None of a zip that has no offsets: it is to be read whole."""
    try:
        with zipfile.ZipFile(Stream(reader)) as archive:
            items = archive.infolist()
            if any(item.compress_type != zipfile.ZIP_STORED for item in items):
                return None
            if any(item.filename.endswith("/constants.pkl") for item in items):
                raise BadCheckpoint(f"{reader.name} is a TorchScript program, which is never run: save its state_dict")
            small = {i.filename: archive.read(i) for i in items if _base(i.filename) in _SMALL}
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise BadCheckpoint(f"{reader.name} is cut off or no zip: {error}; download it again") from error
    order = next((content for name, content in small.items() if _base(name) == "byteorder"), b"little")
    if order.decode(errors="replace") != sys.byteorder:
        return None
    empty = io.BytesIO()
    with zipfile.ZipFile(empty, "w") as archive:
        for item in items:
            if item.filename in small or _base(item.filename).startswith("data/"):
                archive.writestr(item.filename, small.get(item.filename, b""))
    with zipfile.ZipFile(empty) as archive:
        begins = {i.header_offset + _HEADER + len(i.filename.encode()): i.filename for i in archive.infolist()}
    empty.seek(0)
    by_name = {item.filename: item for item in items}
    found = {}
    for key, tensor in load(empty, "meta", reader.name).items():
        at = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if at not in begins:
            return None
        item = by_name[begins[at]]
        record = Record(
            item.header_offset, item.header_offset + _HEADER + len(item.orig_filename.encode()), item.file_size
        )
        if tensor.untyped_storage().nbytes() > record.size or record.nominal + record.size > reader.size:
            raise BadCheckpoint(
                f"{reader.name} is damaged: {key} does not fit into its record of {record.size:,} bytes"
            )
        found[key] = tensor, record
    return found


def _base(name: str) -> str:
    """A record's name without the folder that all of them are in."""
    return name.partition("/")[2]


def load(file: Path | io.BytesIO, device: str, name: str) -> dict[str, Tensor]:
    """The tensors, with weights_only: a pickle that holds anything else is refused before it is executed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on protocols of pickle that may not work: then they raise
            loaded = torch.load(file, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        why = _first(error)
        what = "it is damaged, or holds" if "operand" in why else "it holds"
        raise BadCheckpoint(
            f"{name} is refused, nothing of it was executed: {what} more than weights ({why})"
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise BadCheckpoint(f"{name} is damaged or no PyTorch file ({_first(error)})") from error
    return dict(_flat(loaded))


def _flat(loaded: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of nested dicts by dotted names; the dict of weights of a training checkpoint loses its own name."""
    if not isinstance(loaded, Mapping):
        return
    wrapped = [k for k in ("model", "state_dict", "model_state_dict") if isinstance(loaded.get(k), Mapping)]
    if not prefix and wrapped and not any(isinstance(v, Tensor) for v in loaded.values()):
        loaded = loaded[wrapped[0]]
    for key, value in loaded.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value.detach()
        else:
            yield from _flat(value, f"{prefix}{key}.")


def _first(error: BaseException) -> str:
    """The part of a message that says what is wrong: PyTorch adds advice that would execute the file."""
    text = str(error).strip()
    for mark in ("WeightsUnpickler error:", "Unsupported"):
        if mark in text:
            text = mark.removesuffix(":") * (mark == "Unsupported") + text.split(mark, 1)[1]
            break
    return text.strip().split("\n")[0][:200] or type(error).__name__

"""Files of `torch.save`: zips whose tensors are read by their bytes, and older files, read whole.

A zip of `torch.save` is a small pickle and one record per storage. The pickle is loaded onto the
meta device from a zip in memory that has the same records, all of them empty: the offset that
PyTorch reports for a storage then identifies its record. So only the directory of the file and its
pickle are read, and nothing depends on how some version of PyTorch pads its files: the header of a
record says where its bytes begin. (The offsets that PyTorch derives by itself are wrong for a zip
that was packed again.)
"""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from joma._checkpoints.formats.plain import PlainFile, StoredTensor
from joma._checkpoints.formats.unpickling import StandIn, torch_load
from joma._checkpoints.formats.view import MaterializedFormat, TensorFormat, TensorView
from joma._checkpoints.reading import BadCheckpoint, Reader, ReaderStream, Span, read_bytes

# What the dict of weights is called in a checkpoint that also holds the state of the training.
WEIGHT_DICTS = ("model", "state_dict", "model_state_dict", "module")

_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_ZIP_MAGIC = b"PK\x03\x04"
_SMALL_RECORDS = ("data.pkl", "version", "byteorder")  # what describes the other records
_HEADER_BYTES = 30  # of a record, before its name
_USUAL_PADDING = 128  # bytes that a record may have between its header and its data
_NEAR_BYTES = 4096  # a header so close to the data is fetched with it, not by a request of its own

# A compressed file of weights is at most a few times smaller than the weights: one that claims to
# grow more than this is a zip bomb.
_MAX_INFLATION = 20
_MAX_INFLATION_EXTRA = 16 << 20  # bytes, for small files

# A pickle can refer to one dict many times over, which makes a walk through it endless.
_MAX_ITEMS = 200_000  # tensors and dicts
_MAX_NAME = 2000  # characters


def open_pickle(reader: Reader) -> TensorFormat:
    """Open a file of `torch.save`."""
    magic = read_bytes(reader, 0, min(len(_ZIP_MAGIC), reader.size))
    if magic == _ZIP_MAGIC:
        return _open_zip(reader)
    if reader.suffix not in _SUFFIXES:
        raise BadCheckpoint(
            f"{reader.name} is neither safetensors nor a PyTorch file (it begins with {magic!r})"
        )
    return LoadedFile(reader)


class LoadedFile(MaterializedFormat):
    """A file without offsets (compressed, or written by PyTorch before 1.6), loaded as a whole."""

    def __init__(self, reader: Reader) -> None:
        tensors, note = _load_tensors(reader.download(), "cpu", reader.name)
        self._tensors = {}
        views = []
        for name, tensor in tensors.items():
            # A stride of 0 repeats an element: `contiguous` would take any amount of memory.
            if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
                raise BadCheckpoint(
                    f"{reader.name}: the tensor {name} repeats its numbers and is refused"
                )
            self._tensors[name] = tensor.contiguous()
            views.append(TensorView.full(reader.name, name, tensor.dtype, tensor.shape))
        super().__init__(views)
        self.note = f"{reader.name} is of an old format and was read whole"
        if note:
            self.note += f"; {note}"
        self.bytes_read = reader.size

    def materialize(self, name: str) -> Tensor:
        return self._tensors[name]


@dataclass(frozen=True)
class _ZipRecord:
    """A record of a zip: a header, its name, padding of unknown length, and the data."""

    header: int  # its first byte
    nominal_start: int  # of the data, if there were no padding
    size: int  # of the data

    @classmethod
    def of(cls, item: zipfile.ZipInfo) -> _ZipRecord:
        name_bytes = len(item.orig_filename.encode())
        start = item.header_offset + _HEADER_BYTES + name_bytes
        return cls(item.header_offset, start, item.file_size)

    def read_start(self, reader: Reader) -> int:
        """Return the first byte of the data."""
        header = read_bytes(reader, self.header, _HEADER_BYTES)
        if header[:4] != _ZIP_MAGIC:
            raise BadCheckpoint(
                f"{reader.name} is damaged: there is no record at byte {self.header:,}"
            )
        name_bytes = int.from_bytes(header[26:28], "little")
        padding = int.from_bytes(header[28:30], "little")
        return self.header + _HEADER_BYTES + name_bytes + padding


class TorchZip(PlainFile):
    """A zip of `torch.save`. The place of a tensor is as if its record had no padding."""

    def __init__(
        self, reader: Reader, stored: Mapping[str, StoredTensor], records: Mapping[str, _ZipRecord]
    ) -> None:
        super().__init__(reader, stored)
        self._records = records
        self._paddings: dict[_ZipRecord, int] = {}

    def _padding(self, name: str) -> int:
        record = self._records[name]
        if record not in self._paddings:
            start = record.read_start(self._reader)
            self._paddings[record] = start - record.nominal_start
        return self._paddings[record]

    def _spans(self, stored: StoredTensor, view: TensorView) -> list[Span]:
        # The header of the record has to come first: it says by how much the data is shifted.
        record = self._records[view.name]
        spans = []
        for begin, end in super()._spans(stored, view):
            spans.append((begin, min(end + _USUAL_PADDING, self._reader.size)))
        if not spans:
            return []
        begin, end = spans[0]
        if begin - record.header <= _NEAR_BYTES:
            return [(record.header, end), *spans[1:]]
        return [(record.header, record.nominal_start), *spans]


@dataclass(frozen=True)
class _Directory:
    """The records of a zip, and the content of the small ones."""

    items: list[zipfile.ZipInfo]
    small: dict[str, bytes]

    @classmethod
    def read(cls, reader: Reader) -> _Directory:
        try:
            with zipfile.ZipFile(ReaderStream(reader)) as archive:
                items = archive.infolist()
                _check_growth(items, reader.size, reader.name)
                small = {}
                for item in items:
                    if item.filename.endswith("/constants.pkl"):
                        raise BadCheckpoint(
                            f"{reader.name} is a TorchScript program, which is never run: "
                            "save its state_dict"
                        )
                for item in items:
                    if _short_name(item) in _SMALL_RECORDS:
                        small[item.filename] = archive.read(item)
                return cls(items, small)
        except BadCheckpoint:
            raise
        except Exception as error:  # zipfile has many ways to fail
            raise BadCheckpoint(
                f"{reader.name} is cut off or no zip: {error}; download it again"
            ) from error

    @property
    def has_plain_records(self) -> bool:
        """True if the bytes of the records are the elements, as this machine has them."""
        byte_order = "little"
        for item in self.items:
            if item.compress_type != zipfile.ZIP_STORED:
                return False
            if _short_name(item) == "byteorder":
                byte_order = self.small[item.filename].decode(errors="replace")
        return byte_order == sys.byteorder

    def skeleton(self) -> io.BytesIO:
        """Return a zip in memory with the same records, of which only the small ones are filled."""
        memory = io.BytesIO()
        with zipfile.ZipFile(memory, "w") as archive:
            for item in self.items:
                if item.filename in self.small:
                    archive.writestr(item.filename, self.small[item.filename])
                elif _short_name(item).startswith("data/"):
                    archive.writestr(item.filename, b"")
        memory.seek(0)
        return memory


def _open_zip(reader: Reader) -> TensorFormat:
    directory = _Directory.read(reader)
    if not directory.has_plain_records:
        return LoadedFile(reader)
    # Records of the skeleton have no padding, so that their data begins right after their names.
    skeleton = directory.skeleton()
    item_names: dict[
        int | None, str
    ] = {}  # first byte of a record's data in the skeleton -> name of the record
    with zipfile.ZipFile(skeleton) as archive:
        for item in archive.infolist():
            start = item.header_offset + _HEADER_BYTES + len(item.filename.encode())
            item_names[start] = item.filename
    skeleton.seek(0)
    tensors, note = _load_tensors(skeleton, "meta", reader.name)
    items = {item.filename: item for item in directory.items}
    stored = {}
    records = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        item_name = item_names.get(getattr(storage, "_checkpoint_offset", None))
        # A tensor whose storage is in no record has no place to be read from.
        if item_name is None:
            return LoadedFile(reader)
        record = _ZipRecord.of(items[item_name])
        is_outside = record.nominal_start + record.size > reader.size
        if storage.nbytes() > record.size or is_outside:
            raise BadCheckpoint(
                f"{reader.name} is damaged: {name} does not fit into its record of "
                f"{record.size:,} bytes"
            )
        view = TensorView.full(reader.name, name, tensor.dtype, tensor.shape)
        start = record.nominal_start + int(tensor.storage_offset()) * tensor.dtype.itemsize
        stored[name] = StoredTensor(view, tensor.stride(), start)
        records[name] = record
    file = TorchZip(reader, stored, records)
    file.note = note
    return file


def _short_name(item: zipfile.ZipInfo) -> str:
    """Return the name of a record without the folder that all records are in."""
    return item.filename.partition("/")[2]


def _check_growth(items: list[zipfile.ZipInfo], size: int, name: str) -> None:
    """Refuse a zip of ``size`` bytes that claims to hold far more."""
    largest_stored = 0
    inflated = 0
    for item in items:
        if item.compress_type == zipfile.ZIP_STORED:
            largest_stored = max(largest_stored, item.file_size)
        else:
            inflated += item.file_size
    if inflated > _MAX_INFLATION * size + _MAX_INFLATION_EXTRA or largest_stored > size:
        claimed = max(inflated, largest_stored)
        raise BadCheckpoint(
            f"{name} is a zip of {size:,} bytes that claims to hold {claimed:,}: refused, "
            "download it again"
        )


def load_tensor(data: bytes, name: str) -> Tensor:
    """Return the one tensor that `torch.save` wrote into these bytes."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _check_growth(archive.infolist(), len(data), name)
    except BadCheckpoint:
        raise
    except Exception as error:  # zipfile has many ways to fail
        raise BadCheckpoint(f"{name} is cut off or no zip: {error}") from None
    tensor, _ = torch_load(io.BytesIO(data), "cpu", name)
    if not isinstance(tensor, Tensor) or tensor.numel() * tensor.itemsize > len(data):
        raise BadCheckpoint(f"{name} is no tensor that its {len(data):,} bytes can hold")
    return tensor.detach()


def _load_tensors(file: Any, device: str, name: str) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a file, and a note on what else it has."""
    content, other_classes = torch_load(file, device, name)
    try:
        tensors = dict(_flatten(content))
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{name} is refused: {error}") from None
    if not other_classes:
        return tensors, ""
    some = ", ".join(other_classes[:3])
    if len(other_classes) > 3:
        some += f" and {len(other_classes) - 3} more"
    return tensors, f"{name} has more than weights ({some}), which was passed over"


def _flatten(content: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dicts by dotted names.

    In a checkpoint of a training, only the dict of weights counts, and its name is left out.
    """
    if not isinstance(content, Mapping):
        return
    weights = _weight_dict(content)
    is_weight_dict = weights is not None
    if weights is not None:
        content = weights
    left = [("", content)]
    count = 0
    while left:
        prefix, mapping = left.pop()
        inner = []
        for key, value in mapping.items():
            name = f"{prefix}{key}"
            count += 1
            if count > _MAX_ITEMS or len(name) > _MAX_NAME:
                raise BadCheckpoint("dicts are nested beyond reason")
            if isinstance(value, Tensor):
                yield name, value.detach()
            elif isinstance(value, Mapping):
                is_optimizer = name.startswith("optim") and not prefix and not is_weight_dict
                if not is_optimizer:
                    inner.append((f"{name}.", value))
            elif isinstance(value, StandIn):
                # A stand-in must not make a matrix vanish without a word.
                is_weight = is_weight_dict or "." in name
                if is_weight and not name.endswith("_extra_state"):
                    raise BadCheckpoint(f"{name} is a {type(value).__name__}, no plain tensor")
        left += reversed(inner)  # so that dicts are walked through in their order


def _weight_dict(content: Mapping[Any, Any]) -> Mapping[Any, Any] | None:
    """Return the dict of weights in a checkpoint of a training; None if the file is one itself."""
    if any(isinstance(value, Tensor) for value in content.values()):
        return None
    for name in WEIGHT_DICTS:
        value = content.get(name)
        if isinstance(value, Mapping):
            return value
    return None
